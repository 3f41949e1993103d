"""Tokens that `tokenizer_config.json` and older files declare besides `tokenizer.json`, as transformers reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from baton.checkpoint_files import json_if_there
from baton.errors import CheckpointError

log = logging.getLogger(__name__)

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class AddedTokens:
    """The tokens declared in a directory. `special`: by name, such as `eos_token`, for templates. Raises
    `CheckpointError`.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "tokenizer_config.json"
        settings = dict(json_if_there(self._path))
        self.settings: Mapping[str, Any] = settings
        self._decoder: dict[int, AddedToken] = {}
        declared = settings.get("added_tokens_decoder")
        extra = _extra(settings)
        if declared is None:  # old format: special_tokens_map.json has priority, and added_tokens.json has the ids
            older = json_if_there(root / "special_tokens_map.json")
            settings.update(older)
            extra = extra or _extra(older)
        named = {name: value for name, value in settings.items() if name.endswith("_token")}
        if isinstance(extra, Mapping):
            named, extra = {**named, **extra}, []
        if not isinstance(extra, list):
            raise CheckpointError(f"{self._path}: extra_special_tokens is no list of tokens")
        tokens = {name: self._token(value) for name, value in named.items() if isinstance(value, str | Mapping)}
        self._special = [*tokens.values(), *map(self._token, extra)]
        self.special: dict[str, str] = {name: token.content for name, token in tokens.items()}
        if declared is not None:
            if not isinstance(declared, Mapping) or not all(number.isdecimal() for number in declared):
                raise CheckpointError(f"{self._path}: added_tokens_decoder is no object of tokens by their ids")
            self._decoder = {int(number): self._token(value, False) for number, value in declared.items()}
            return
        contents = {token.content for token in self._special}
        for text, number in json_if_there(root / "added_tokens.json").items():
            if not isinstance(number, int):
                raise CheckpointError(f"{root / 'added_tokens.json'}: {text!r} has no id")
            is_special = text in contents
            self._decoder[number] = AddedToken(text, normalized=not is_special, special=is_special)

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds tokens that `backend` lacks or has with other flags. Tokens of the vocabulary keep their ids; others get
        the next free ones."""
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        wanted = [token for _, token in sorted(self._decoder.items()) if not _same(known.get(token.content), token)]
        contents = {*known, *(token.content for token in self._decoder.values())}
        for token in self._special:
            if token.content not in contents:
                contents.add(token.content)
                wanted.append(token)
        if wanted:
            backend.add_tokens(wanted)
        for number, token in self._decoder.items():
            token_id = backend.token_to_id(token.content)
            if token_id != number:
                log.warning("%s: token %r is %s, not %d as declared there", self._path, token.content, token_id, number)
        backend.encode_special_tokens = bool(self.settings.get("split_special_tokens"))

    def _token(self, value: object, special: bool = True) -> AddedToken:
        """Read text, or an object with flags. `special`: regardless of its flags."""
        if isinstance(value, str):
            return AddedToken(value, special=True)
        content = value.get("content") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(content, str):
            raise CheckpointError(f"{self._path}: {value!r} is no token")
        flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(content, **({**flags, "special": True} if special else flags))


def _extra(settings: Mapping[str, Any]) -> Any:
    return settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []


def _same(one: AddedToken | None, other: AddedToken) -> bool:
    return one is not None and all(getattr(one, name) == getattr(other, name) for name in _FLAGS)
