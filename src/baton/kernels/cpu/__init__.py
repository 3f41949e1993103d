"""Batch-invariant CPU kernels in Numba and LLVM."""
