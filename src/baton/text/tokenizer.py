"""The tokenizer of a Hugging Face directory, without `transformers`: tokenizer.json and a few settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from baton.errors import CheckpointError, RequestError
from baton.text.spelling import Spelling, escaped
from baton.text.template import ChatTemplate

# One text is never tokenised on several threads. Without this, `tokenizers` warns at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Text to token ids and back. Thread-safe: nothing is changed after construction."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._template = ChatTemplate(chat_template, special_tokens or {}) if chat_template else None
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        # The longest token in characters: a text of more than n times this has more than n tokens.
        self.max_token_chars: int = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.spelling = Spelling(backend)

    @classmethod
    def load(cls, directory: str | Path, skip_vocabulary: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Load from a checkpoint directory. `skip_vocabulary`: it knows the end tokens alone, and all text is empty.
        `chat_template`: one that replaces the directory's.

        Raises `CheckpointError` naming the file that is missing or broken.
        """
        root = Path(directory)
        if skip_vocabulary:
            return cls(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_token_ids=_eos_token_ids(root, {}, None))
        path = root / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        settings = _read_json(root / "tokenizer_config.json")
        special = _special_tokens(settings, _read_json(root / "special_tokens_map.json"))
        return cls(
            backend,
            eos_token_ids=_eos_token_ids(root, special, backend),
            special_tokens=special,
            chat_template=_chat_template(root, settings) if chat_template is None else chat_template,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` lets the tokenizer add its own, such as BOS.

        Other threads run meanwhile.
        """
        # This call keeps no character offsets, and so takes half the time and a fraction of the memory.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """What one token adds to a text, special tokens included; a part of a character as `\\xe2\\x82`."""
        return escaped(self.spelling.token_bytes(token_id))

    def special_tokens_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens among `texts`."""
        numbers = {self._backend.token_to_id(text) for text in texts}
        return frozenset(number for number in numbers if number in self.special_ids)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary has it; empty for a number that is no token's."""
        return str(self._backend.id_to_token(token_id) or "")

    def json(self) -> str:
        """The tokenizer as tokenizer.json has it."""
        return str(self._backend.to_str())

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template asks for; none without a template."""
        return self._template.variables if self._template else frozenset()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text of a conversation; `variables` are more of the template's, `tools` what it may call.

        Raises `RequestError("messages")` when there is no template, or when it refuses the messages. Encode
        the result with `add_special_tokens=False`: templates write BOS themselves.
        """
        if self._template is None:
            raise RequestError("this model has no chat template, use /v1/completions", "messages")
        return self._template.render(messages, add_generation_prompt, variables, tools)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, or {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            if isinstance(value, dict):  # an AddedToken written as an object
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _eos_token_ids(root: Path, special: Mapping[str, str], backend: tokenizers.Tokenizer | None) -> list[int]:
    """Return the ids that end a sequence: generation_config.json, config.json, or the tokenizer's EOS."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(root / name).get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and v >= 0 for v in ids):
            raise CheckpointError(f"{root / name}: eos_token_id is {value!r}, expected token ids")
        return ids
    token_id = backend.token_to_id(special["eos_token"]) if backend and "eos_token" in special else None
    return [] if token_id is None else [token_id]


def _chat_template(root: Path, settings: Mapping[str, Any]) -> str | None:
    path = root / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):  # several named templates: the default one
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
