"""Checks that need one CUDA GPU, which CI lacks: `python -m tools.gpu_check`."""
