"""The tokenizer of a Hugging Face directory (tokenizer.json and a few settings), without `transformers`."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import tokenizers

from baton.checkpoint_files import json_if_there
from baton.errors import CheckpointError, ConfigError, RequestError
from baton.text.added_tokens import AddedTokens
from baton.text.content_format import ContentFormatOption
from baton.text.llama_tokenizer import apply_class
from baton.text.spelling import Spelling, escaped_text
from baton.text.template import DEFAULT, TOOL_USE, ChatTemplate, read_templates

log = logging.getLogger(__name__)

# `tokenizers` warns at every fork otherwise.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NO_TEMPLATES: Mapping[str, str] = MappingProxyType({})


class Tokenizer:
    """Text to token ids and back. Thread-safe: immutable after construction."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] = NO_TEMPLATES,
        content_format: ContentFormatOption = "auto",
    ) -> None:
        """`chat_templates` by name: `tool_use` for chats with tools, `default` for all others."""
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._sources = dict(chat_templates)
        self._templates = self._compiled(self._sources, content_format)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        # A text longer than n times this has more than n tokens.
        self.max_token_chars: int = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.spelling = Spelling(backend)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        skip_vocabulary: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
    ) -> Tokenizer:
        """`skip_vocabulary`: load the end tokens only; all text is empty. `chat_template` replaces the directory's
        templates.

        Raises `CheckpointError` naming the file.
        """
        root = Path(directory)
        if skip_vocabulary:
            return cls(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_token_ids=_eos_token_ids(root, {}, None))
        path = root / "tokenizer.json"
        if not path.is_file():
            others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (root / name).is_file()]
            convert = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers makes it"
            how = f" beside {others[0]}: {convert}" if others else ""
            raise CheckpointError(f"{path}: no such file{how}")
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        declared = AddedTokens(root)
        apply_class(backend, path, declared.settings, json_if_there(root / "config.json"))
        declared.add_to(backend)
        own = read_templates(root, declared.settings)
        return cls(
            backend,
            eos_token_ids=_eos_token_ids(root, declared.special, backend),
            special_tokens=declared.special,
            chat_templates=own if chat_template is None else {DEFAULT: chat_template},
            content_format=chat_template_content_format,
        )

    def with_templates(self, chat_template: str | None, content_format: ContentFormatOption) -> Tokenizer:
        """None: the templates of this tokenizer.

        Raises `ConfigError`.
        """
        if content_format not in (formats := get_args(ContentFormatOption)):
            raise ConfigError("chat_template_content_format", f"{content_format!r} is not one of {', '.join(formats)}")
        if chat_template is None and content_format == "auto":
            return self
        sources = self._sources if chat_template is None else {DEFAULT: chat_template}
        other = copy.copy(self)
        other._sources = sources
        try:
            other._templates = self._compiled(sources, content_format)
        except CheckpointError as error:
            raise ConfigError("chat_template", str(error)) from None
        return other

    def _compiled(self, sources: Mapping[str, str], content_format: ContentFormatOption) -> dict[str, ChatTemplate]:
        return {name: ChatTemplate(text, self._special_tokens, content_format) for name, text in sources.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Releases the GIL. Raises `RequestError` for text with half of a surrogate pair."""
        try:
            # Without character offsets, in half the time and a fraction of the memory.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise RequestError("prompt is not valid Unicode text", "prompt") from None
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Invalid UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        r"""The text that a token adds, also a special one. A part of a character is written as `\xe2\x82`."""
        return escaped_text(self.spelling.token_bytes(token_id))

    def special_tokens_of(self, texts: Iterable[str]) -> frozenset[int]:
        numbers = {self._backend.token_to_id(text) for text in texts}
        return frozenset(number for number in numbers if number in self.special_ids)

    def token(self, token_id: int) -> str:
        """Empty for an unknown id."""
        return str(self._backend.id_to_token(token_id) or "")

    def json(self) -> str:
        return str(self._backend.to_str())

    @property
    def template_variables(self) -> frozenset[str]:
        return frozenset().union(*(template.variables for template in self._templates.values()))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """See `ChatTemplate.render`. Encode the text with `add_special_tokens=False`: templates write BOS
        themselves.
        """
        named = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        template = self._templates.get(named)
        if template is None:
            others = ", ".join(sorted(self._templates))
            why = f"no default chat template, only {others}" if others else "no chat template"
            raise RequestError(f"this model has {why}, use /v1/completions", "messages")
        return template.render(messages, add_generation_prompt, variables, tools)


def _eos_token_ids(root: Path, special: Mapping[str, str], backend: tokenizers.Tokenizer | None) -> list[int]:
    """The end tokens of generation_config.json, config.json and the tokenizer: fine-tunes often change only one. Ids
    beyond the vocabulary are ignored."""
    end_ids: list[int] = []
    config = json_if_there(root / "config.json")
    for name, source in (
        ("generation_config.json", json_if_there(root / "generation_config.json")),
        ("config.json", config),
    ):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(number, int) and number >= 0 for number in ids):
            raise CheckpointError(f"{root / name}: eos_token_id is {value!r}, expected token ids")
        end_ids += ids
    number = backend.token_to_id(special["eos_token"]) if backend and "eos_token" in special else None
    end_ids += [] if number is None else [number]
    size = config.get("vocab_size")
    last = size - 1 if isinstance(size, int) and not isinstance(size, bool) else max(end_ids, default=0)
    if beyond := sorted({number for number in end_ids if number > last}):
        log.warning("%s: end tokens beyond the vocabulary of %s are ignored: %s", root, size, beyond)
    return list(dict.fromkeys(number for number in end_ids if number <= last))
