"""Baton: prefill/decode disaggregated LLM serving in which speculative decoding stays lossless."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from baton.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> object:
    # Importing torch takes seconds, and a router does not need it.
    if name == "LLM":
        from baton.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
