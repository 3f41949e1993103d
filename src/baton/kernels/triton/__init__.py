"""CUDA kernels in Triton."""
