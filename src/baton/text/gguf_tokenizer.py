"""The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece's (`llama`), as in transformers 5.23
(integrations/gguf). Unlike there, a special token outside the alphabet of bytes keeps its id, and Llama 3's its BOS and
whole words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from reprlib import repr
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from baton.errors import CheckpointError
from baton.text.spelling import ALPHABET

Metadata = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_OF_BYTE = {byte: character for character, byte in ALPHABET.items()}
# Ends of a text, a turn, and a message.
_ENDS = ("eos", "eot", "eom")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> how text is split before merges, None for GPT-2's way.
_SPLITS: Mapping[str, str | None] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-2": None,
    "smollm": None,
}
# Limit of characters copied by cutting all tokens everywhere: sixteen times a vocabulary of 262,144 tokens.
_MOST_CUT = 1 << 28
_OF_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
_DIGITS_ALONE = ("smollm",)


def gguf_tokenizer(metadata: Metadata) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer and its `tokenizer_config.json`. Raises `CheckpointError`."""
    kind = metadata.get("tokenizer.ggml.model")
    build = _BUILDERS.get(str(kind))
    if build is None:
        raise CheckpointError(f"tokenizer.ggml.model is {repr(kind)}, expected one of {', '.join(_BUILDERS)}")
    texts = _texts(metadata, "tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", [0] * len(texts))
    try:
        backend = build(metadata, texts, kinds)
        for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [text for text, found in zip(texts, kinds, strict=True) if found == kind]
            backend.add_tokens([AddedToken(text, normalized=False, special=is_special) for text in added])
    except CheckpointError:
        raise
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"tokenizer.ggml: {error}") from None
    named = _named(metadata, texts)
    backend.post_processor = _ends_added(metadata, named)
    settings: dict[str, Any] = {f"{name}_token": text for name, (text, _) in named.items()}
    if templates := _templates(metadata):
        settings["chat_template"] = templates
    return backend, settings


def end_tokens(metadata: Metadata) -> list[int]:
    """Raises `CheckpointError`."""
    ids = (_token_id(metadata, name) for name in _ENDS)
    return sorted({number for number in ids if number is not None})


def _byte_level(metadata: Metadata, texts: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise CheckpointError(f"tokenizer.ggml.pre is {repr(pre)}, which is not supported, only {', '.join(_SPLITS)}")
    merges = [_pair(merge) for merge in _texts(metadata, "merges")]
    vocabulary = {
        text if kind in (_CONTROL, _USER_DEFINED) else _in_bytes(text): number
        for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _OF_LLAMA3))
    split = _SPLITS[pre]
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        parts.insert(0, pre_tokenizers.Split(Regex(split), behavior="isolated"))
    elif pre in _DIGITS_ALONE:
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Metadata, texts: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    given = metadata.get("tokenizer.ggml.merges")
    ids = {text: number for number, text in enumerate(texts)}
    merges = [_pair(merge) for merge in given] if given else _merges_of(ids, _list(metadata, "scores"))
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if has_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    stages = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if has_prefix else stages)
    return backend


_BUILDERS: dict[str, Callable[[Metadata, list[str], list[int]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _merges_of(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best score first. Source: transformers' `generate_merges`."""
    merges = []
    if sum(len(text) ** 2 for text in ids) > _MOST_CUT:
        raise CheckpointError("tokenizer.ggml.tokens are too long for merges made of them")
    for text, score in zip(ids, scores, strict=True):
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        pairs = [(one, other, score) for one, other in cuts if one in ids and other in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    merges.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    return [(one, other) for one, other, _ in merges]


def _named(metadata: Metadata, texts: list[str]) -> dict[str, tuple[str, int]]:
    special = {}
    for name, key in _NAMED.items():
        number = _token_id(metadata, key)
        if number is not None:
            special[name] = texts[number], number
    return special


def _ends_added(metadata: Metadata, named: Mapping[str, tuple[str, int]]) -> Any:
    is_usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _OF_LLAMA3
    begin = metadata.get("tokenizer.ggml.add_bos_token", is_usual) and "bos" in named
    end = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in named
    special = [named[name] for name, is_added in (("bos", begin), ("eos", end)) if is_added]
    single = [*([named["bos"][0]] if begin else []), "$A", *([named["eos"][0]] if end else [])]
    return processors.TemplateProcessing(single=single, special_tokens=special)


def _templates(metadata: Metadata) -> str | list[dict[str, str]] | None:
    default = _template(metadata, "tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    if not names:
        return default
    if not isinstance(names, list):
        raise CheckpointError(f"tokenizer.chat_templates is {repr(names)}, expected a list of names")
    further = {str(name): _template(metadata, f"tokenizer.chat_template.{name}") for name in names}
    every = {"default": default, **further}
    return [{"name": name, "template": text} for name, text in every.items() if text is not None]


def _template(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"{key} is {repr(value)}, expected a text")


def _token_id(metadata: Metadata, name: str) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    num_tokens = len(_texts(metadata, "tokens"))
    if token_id is None or (type(token_id) is int and 0 <= token_id < num_tokens):
        return token_id
    raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {repr(token_id)}, of {num_tokens} tokens")


def _texts(metadata: Metadata, name: str) -> list[str]:
    values = _list(metadata, name)
    if not isinstance(values[0], str):
        raise CheckpointError(f"tokenizer.ggml.{name} is a list of numbers, expected texts")
    return values


def _list(metadata: Metadata, name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"tokenizer.ggml.{name} is missing or empty")
    return value


def _pair(merge: str) -> tuple[str, str]:
    one, _, other = merge.partition(" ")
    return one, other


def _in_bytes(text: str) -> str:
    """Some files have text instead of the alphabet of bytes."""
    if all(character in ALPHABET for character in text):
        return text
    return "".join(_OF_BYTE[byte] for byte in text.encode())
