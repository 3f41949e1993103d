"""Parts that transformers takes from the class `LlamaTokenizer` and not from `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_CLASS, _MODEL_TYPE = "LlamaTokenizer", "llama"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def apply_class(
    backend: tokenizers.Tokenizer, file: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Replace parts of a Llama model's tokenizer of that class, as transformers 5 does.

    Llama 2's files put a space before each text between special tokens; the class, before the first one unless `legacy`
    is set. `file`: tokenizer.json, kept if its vocabulary is of bytes (Llama 3).
    `settings`, `config`: tokenizer_config.json and config.json. Source: `AutoTokenizer` and `LlamaTokenizer`, 5.23.
    """
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    is_class = isinstance(name, str) and name.removesuffix("Fast") == _CLASS
    if not is_class or config.get("model_type") != _MODEL_TYPE or not isinstance(backend.model, models.BPE):
        return
    if '"ByteLevel"' in file.read_text(encoding="utf-8"):
        return
    has_prefix = settings.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if settings.get("legacy") else "first"
    stages = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if has_prefix else stages)
