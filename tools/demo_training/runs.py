"""What the training scripts that may run on a GPU share: arguments, text, notes on a run, and their two parts."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from .corpus import load_corpus
from .target import TokenStream

Part = Callable[[argparse.Namespace, Path], None]


def parser_of(doc: str | None, work: Path) -> argparse.ArgumentParser:
    """A parser with the arguments of all scripts. `doc`: the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models"), help="directory of the checkpoint")
    parser.add_argument("--work", type=Path, default=work, help="directory of unfinished work and notes on the run")
    parser.add_argument("--text", type=Path, help="file to keep the training text's tokens in, or to take them from")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--generated-rows", type=int, default=96, help="rows of one batch of the target's text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("train", "measure"), help="train, or write the card of what was trained")
    return parser


def run_parts(args: argparse.Namespace, name: str, train: Part, measure: Part) -> None:
    """`train` writes the checkpoint `name`, and `measure` its card."""
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.only != "measure":
        train(args, args.output / name)
    if args.only != "train":
        measure(args, args.output / name)


def note_run(args: argparse.Namespace, **own: object) -> None:
    """Write how a checkpoint was made, for `noted_run`."""
    gpu = args.device.startswith("cuda")
    common = {
        "rows": args.rows,
        "seed": args.seed,
        "where": torch.cuda.get_device_name() if gpu else f"{args.threads} CPU thread(s)",
        "made": f"torch {torch.__version__}",
    }
    (args.work / "run.json").write_text(json.dumps(own | common), encoding="utf-8")


def noted_run(args: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = json.loads((args.work / "run.json").read_text(encoding="utf-8"))
    return found


def training_text(tokenizer: Path, kept: Path | None = None) -> TokenStream:
    """Plain text and chats in the tokens of `tokenizer`. `kept`: the file (.npz) to take them from, or to write, for a
    machine with another Python."""
    if kept is not None and kept.exists():
        with np.load(kept) as arrays:
            return TokenStream.of(arrays["ids"], arrays["starts"])
    stream = TokenStream(load_corpus().train, Tokenizer.from_file(str(tokenizer)), chat=True)
    if kept is not None:
        np.savez_compressed(kept, ids=stream.ids.astype(np.uint16), starts=stream.starts.astype(np.int32))
    return stream
