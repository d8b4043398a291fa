"""SGLang: the names that a run uses, how to find them, and its shims without CUDA.

Only `cpu_adapter`, which veRL's training worker loads, imports SGLang.
"""
