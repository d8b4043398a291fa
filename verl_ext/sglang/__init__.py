"""What depends on SGLang's internals: the names a run uses, how to find them, and what it needs without CUDA.

Only `cpu_adapter`, which veRL's training worker loads, imports SGLang.
"""
