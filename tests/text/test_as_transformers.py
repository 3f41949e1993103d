"""Tokens, end tokens and chats are those of transformers, whichever file of a checkpoint declares them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, processors

from baton.errors import CheckpointError, RequestError
from baton.text import Tokenizer
from testkit.servers.fake_serving import EOS, write_tokenizer

BOS = 256
# As in fine-tunes: plain text for tokenizer.json.
MARKED = "<|im_start|>user\nhi é<|im_end|><tool_call>{}</tool_call> <eos>"


def settings_of(directory: Path, **fields: Any) -> Path:
    path = write_tokenizer(directory) / "tokenizer_config.json"
    value = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    path.write_text(json.dumps({name: entry for name, entry in {**value, **fields}.items() if entry is not None}))
    return directory


def entry(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, "special": special, **flags}


def added(content: str) -> dict[str, Any]:
    return {"__type": "AddedToken", **entry(content)}


DECODER = {
    "256": entry("<bos>"),
    "257": entry("<eos>"),
    "258": entry("<|im_start|>"),
    "259": entry("<|im_end|>"),
    "260": entry("<tool_call>", special=False, normalized=True),
}
DECLARED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "additional": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    "extra": {"extra_special_tokens": ["<|im_start|>", "<tool_call>"]},
    "named": {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    "decoder": {"added_tokens_decoder": DECODER},
    "decoder and more": {"added_tokens_decoder": DECODER, "additional_special_tokens": ["</tool_call>"]},
    "stripping": {"added_tokens_decoder": {**DECODER, "259": entry("<|im_end|>", rstrip=True, lstrip=True)}},
    "plain become special": {"added_tokens_decoder": {"65": entry("a"), **DECODER}},
    "end": {"eos_token": "<|im_end|>"},
    "end with flags": {"eos_token": added("<|im_end|>")},
    "further": {"pad_token": "<pad>", "cls_token": "<tool_call>", "call_token": "</tool_call>"},
    "split": {"split_special_tokens": True},
    "bos": {"add_bos_token": True},
    "both ends": {"add_bos_token": True, "add_eos_token": True},
    "no bos": {"add_bos_token": False},
}


@pytest.mark.parametrize("fields", DECLARED.values(), ids=DECLARED)
def test_tokens_declared_in_the_config_are_special(tmp_path: Path, fields: Mapping[str, Any]) -> None:
    directory = settings_of(tmp_path, **fields)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    for special in (True, False):
        ids = theirs.encode(MARKED, add_special_tokens=special)
        assert ours.encode(MARKED, special) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert theirs.eos_token_id in ours.eos_token_ids
    assert ours.special_ids >= {i for i in theirs.all_special_ids if i is not None}


@pytest.mark.parametrize(
    "files",
    [
        {"special_tokens_map.json": {"eos_token": "<|im_end|>", "pad_token": added("<pad>")}},
        {"special_tokens_map.json": {"additional_special_tokens": ["<|im_start|>"]}},
        {"added_tokens.json": {"<tool_call>": 258, "<|im_start|>": 259}},
        {
            "special_tokens_map.json": {"eos_token": "<|im_end|>"},
            "added_tokens.json": {"<|im_end|>": 258, "<tool_call>": 259},
        },
    ],
)
def test_older_tokenizer_files_give_the_same_end_tokens(tmp_path: Path, files: Mapping[str, Any]) -> None:
    directory = settings_of(tmp_path, additional_special_tokens=["</tool_call>"])
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer.load(directory)
    ids = theirs.encode(MARKED)
    assert ours.encode(MARKED) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert theirs.eos_token_id in ours.eos_token_ids


def llama_files(directory: Path, model_type: str, **fields: Any) -> Path:
    """As Llama 2's: words begin with a block, bytes are a fallback, and each piece of text gets a leading space."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{value:02X}>" for value in range(256)),
        space,
        *"abhi",
        f"{space}h",
        f"{space}hi",
    ]
    model = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[(space, "h"), (f"{space}h", "i")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    stages = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens(tokens[:3])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **fields}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": len(tokens)}))
    return directory


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("fields", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("text", ["hi", "hi</s>hi  hi é</s> a\n", " hi", "</s>hi<s>"])
def test_a_llama_tokenizer_is_what_transformers_makes_of_its_class(
    tmp_path: Path, name: str, fields: dict[str, Any], model_type: str, text: str
) -> None:
    directory = llama_files(tmp_path, model_type, tokenizer_class=name, **fields)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer.load(directory)
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, False) == theirs.decode(ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": entry("<x>")}},
        {"added_tokens_decoder": {"258": {"content": 1}}},
        {"extra_special_tokens": "<x>"},
        {"additional_special_tokens": [5]},
    ],
)
def test_malformed_declarations(tmp_path: Path, fields: Mapping[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        Tokenizer.load(settings_of(tmp_path, **fields))


def test_a_declared_id_that_is_another_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "baton.text.added_tokens"):
        Tokenizer.load(settings_of(tmp_path, added_tokens_decoder={"300": entry("<x>")}))
    assert "token '<x>' is 258, not 300 as declared there" in caplog.text


# ---------------------------------------------------------------- end tokens


@pytest.mark.parametrize(
    ("generation", "config", "own", "expected"),
    [
        (None, None, "<eos>", (EOS,)),
        ([5, 6], 7, "<eos>", (5, 6, 7, EOS)),
        (EOS, EOS, "<eos>", (EOS,)),
        (5, [], "<|im_end|>", (5, 258)),
        (None, 7, None, (7,)),
    ],
)
def test_end_tokens_are_all_that_any_file_names(
    tmp_path: Path, generation: Any, config: Any, own: str | None, expected: tuple[int, ...]
) -> None:
    directory = settings_of(tmp_path, eos_token=own)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": config, "vocab_size": 260}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert Tokenizer.load(directory).eos_token_ids == expected


def test_an_end_token_beyond_the_vocabulary_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = settings_of(tmp_path)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [EOS, 128009], "vocab_size": 260}))
    with caplog.at_level(logging.WARNING, "baton.text.tokenizer"):
        assert Tokenizer.load(directory).eos_token_ids == (EOS,)
    assert "end tokens beyond the vocabulary of 260 are ignored: [128009]" in caplog.text


# ---------------------------------------------------------------- chats

CHAT = [
    {"role": "system", "content": "Be brief. é"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "reasoning": "think", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "user", "content": "go on"},
]
# transformers fills in the names of reasoning from 5.23 on, which needs Python 3.11.
FILLED = [
    {"thinking": message["reasoning"], **message, "reasoning_content": message["reasoning"]}
    if "reasoning" in message
    else message
    for message in CHAT
]
THEIRS = CHAT if sys.version_info >= (3, 11) else FILLED
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d é", "parameters": {"b": 1, "a": [2, 3]}}}]
TEMPLATES = {
    "tojson": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=True) }}"
    "{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(sort_keys=true) }}{{ tools | tojson(false, 4) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}A {{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}end",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}\n{% endfor %}",
    "dict": "{% set d = dict(a=1) %}{{ d }}{{ dict.fromkeys(['x'], 2) }}{% set n = namespace(b=3) %}"
    "{% set n.b = 4 %}{{ n.b }}",
    "self": "{% set n = namespace(self=1) %}{{ n.self }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ cls_token is defined }}",
    "loop": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    "{{ tools is none }}",
    "blanks": "  {% for m in messages %}\n    {{- m.content -}}\n  {% endfor %}\n x \n",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_chats_render_as_in_transformers(tmp_path: Path, template: str, tools: list[dict[str, Any]] | None) -> None:
    special = {"pad_token": "<pad>", "extra_special_tokens": {"image_token": "<img>"}}
    directory = settings_of(tmp_path, chat_template=template, **special)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(THEIRS, tools=tools, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.load(directory).apply_chat_template(CHAT, True, None, tools) == expected


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_named_templates(tmp_path: Path, in_files: bool, tools: list[dict[str, Any]] | None) -> None:
    named = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ tools | tojson }}", "rag": "R"}
    if in_files:
        directory = settings_of(tmp_path, chat_template="older")
        (directory / "chat_template.jinja").write_text(named.pop("default"))
        (directory / "additional_chat_templates").mkdir()
        for name, text in named.items():
            (directory / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    else:
        entries = [{"name": name, "template": text} for name, text in named.items()]
        directory = settings_of(tmp_path, chat_template=entries)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
    assert Tokenizer.load(directory).apply_chat_template(CHAT, False, None, tools) == expected
    replaced = Tokenizer.load(directory, chat_template="mine").apply_chat_template(CHAT, False, None, tools)
    assert replaced == "mine"


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    directory = settings_of(tmp_path, chat_template=[{"name": "rag", "template": "R"}])
    with pytest.raises(RequestError, match="no default chat template, only rag"):
        Tokenizer.load(directory).apply_chat_template(CHAT)


@pytest.mark.parametrize("name", ["_x", "__class__"])
def test_namespaces_hold_no_private_names(tmp_path: Path, name: str) -> None:
    for text in (f"{{% set n = namespace({name}=1) %}}", f"{{% set n = namespace() %}}{{% set n.{name} = 1 %}}"):
        with pytest.raises(RequestError, match="cannot hold"):
            Tokenizer.load(settings_of(tmp_path, chat_template=text)).apply_chat_template(CHAT)


def test_a_developers_messages_are_the_systems_where_a_template_does_not_know_them(tmp_path: Path) -> None:
    chat = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}, {"role": "system", "content": "c"}]
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    tokenizer = Tokenizer.load(settings_of(tmp_path / "plain", chat_template=plain))
    assert tokenizer.apply_chat_template(chat) == "system:a\n\nc;user:b;"
    assert tokenizer.apply_chat_template(chat[1:]) == "user:b;system:c;", "nothing else is moved"
    knows = plain + "{% if messages[0].role == 'developer' %}!{% endif %}"
    tokenizer = Tokenizer.load(settings_of(tmp_path / "knows", chat_template=knows))
    assert tokenizer.apply_chat_template(chat) == "developer:a;user:b;system:c;!"
