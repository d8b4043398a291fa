"""A stand-in for the CUDA kernels of SGLang 0.5.12: names to import, nothing to call."""
