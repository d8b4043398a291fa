"""A stand-in for SGLang's CUDA kernels on a machine without CUDA: names to import, nothing to call."""
