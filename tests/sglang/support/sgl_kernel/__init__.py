"""A stand-in for SGLang's kernels, of which PyPI has builds for CUDA only. SGLang imports names from it at start.

Each name is a function that raises, so a kernel that is needed is reported by name. The servers of the tests run
SGLang's paths in PyTorch (`--attention-backend torch_native`), which need none.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    missing.__name__ = name
    return missing
