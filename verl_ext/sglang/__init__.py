"""SGLang: the names that a run uses, how to find them, and its shims without CUDA."""
