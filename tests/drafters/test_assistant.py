"""Gemma 4's assistant: its drafts are those of transformers, and handoffs change neither tokens nor acceptance."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.drafters import assistant
from baton.drafters.registry import load_drafter
from baton.engine.config import SpeculativeConfig
from baton.engine.runner import ModelRunner, TargetOutput
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.families import gemma4
from baton.models.layers.parallel import TensorRank
from baton.models.loading.loader import load_model
from baton.sampling_params import SamplingParams
from testkit.checkpoints.gemma4 import WINDOW, assistant_model, assistants_work, make_assistant, make_gemma4
from testkit.engines import note_drafts, pair, stepped
from testkit.handoffs.rank_threads import on_ranks
from tests.drafters.reference import assert_round
from tests.engine.handoff.test_handoff_kinds import both_ways
from tests.engine.models.test_transformers_equality import TIE, load_reference

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS, NUM_DRAFTS = 4, 3
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# One token, around the window and several windows.
LENGTHS = (1, WINDOW, WINDOW + 2, 25, 40)
ROUNDS = 2
Found = dict[int, list[int]]
Theirs = dict[int, Tensor]
Made = tuple[Path, dict[str, Any], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """A target, an assistant as `speculative_config`, and the same of transformers, by shape and seed."""

    @functools.cache
    def make(shape: str = "gemma4", seed: int = 0, **fields: Any) -> Made:
        root = tmp_path_factory.mktemp(shape)
        target = make_gemma4(root / "target", shape, seed)
        spec = make_assistant(root / "assistant", target, seed + 1, NUM_DRAFTS, **fields)
        model = assistant_model(target, seed + 1, **fields)
        model.generation_config.num_assistant_tokens = NUM_DRAFTS
        return target, spec, model

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def first_drafts(model: Any, helper: Any, tokens: list[int]) -> tuple[int, Tensor]:
    """The token that `generate` chooses after `tokens`, and the logits of the drafts after it.

    Only of its first round: after a rejected draft, transformers 5.23 lets the assistant attend to the rejected
    draft's keys, at the place of the last token.
    """
    logits: list[Tensor] = []
    hook = helper.register_forward_hook(lambda model, inputs, out: logits.append(out.logits[0, -1]))
    ids, most = torch.tensor([tokens]), NUM_DRAFTS + 2
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": most, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=helper, **settings)
        best_two = model(ids).logits[0, -1].topk(2).values
    hook.remove()
    # Engines must choose it too.
    assert float(best_two[0] - best_two[1]) > TIE
    return int(out[0, len(tokens)]), torch.stack(logits[:NUM_DRAFTS])


def drafts_of_transformers(target: Path, helper: Any, prompt: list[int]) -> Theirs:
    """The drafts' logits by number of known tokens, for a prompt and what follows it."""
    known, found = list(prompt), Theirs()
    with assistants_work():
        model = load_reference(target)
    for _ in range(ROUNDS):
        token, logits_DV = first_drafts(model, helper, known)
        known.append(token)
        found[len(known)] = logits_DV
    return found


@functools.cache
def wanted_of(
    made: Callable[..., Made], shape: str, seed: int, fields: tuple[tuple[str, Any], ...]
) -> Sequence[Theirs]:
    """The drafts of transformers for prompts of all lengths."""
    target, _, helper = made(shape, seed, **dict(fields))
    return [drafts_of_transformers(target, helper, prompt_of(length, seed)) for length in LENGTHS]


def settings_of(target: Path, spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": str(target), "speculative_config": SpeculativeConfig.parse(json.dumps(spec)), **more}


def our_drafts(
    target: Path, spec: dict[str, Any], prompts: Sequence[list[int]], patch: pytest.MonkeyPatch, **more: Any
) -> list[Found]:
    made: list[Found] = []
    with patch.context() as patched, stepped(**settings_of(target, spec, **more)) as one:
        found = note_drafts(patched)
        for prompt in prompts:
            one.run(f"{len(prompt)}", prompt, GREEDY)
            made.append(dict(found))
            found.clear()
    return made


def assert_alike(ours: Sequence[Found], theirs: Sequence[Theirs]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        both = our.keys() & their.keys()
        assert both
        for known in both:
            assert len(our[known]) == len(their[known])
            assert_round(our[known], their[known])


@pytest.mark.parametrize(
    ("shape", "seed", "fields"),
    [
        ("gemma4", 0, {}),
        ("gemma4", 3, {"num_centroids": 26}),
        ("gemma4-odd", 1, {"attention_bias": True}),
        ("gemma4-k_is_v", 2, {"num_attention_heads": 6, "final_logit_softcapping": None}),
    ],
)
def test_drafts_are_those_of_transformers(
    shape: str, seed: int, fields: dict[str, Any], made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, spec, _ = made(shape, seed, **fields)
    prompts = [prompt_of(length, seed) for length in LENGTHS]
    theirs = wanted_of(made, shape, seed, tuple(fields.items()))
    drafted = {tuple(logits_DV.argmax(-1).tolist()) for found in theirs for logits_DV in found.values()}
    assert len(drafted) > len(LENGTHS)
    # Whole prompts; then chunks of 7 rows, with pages of 5 tokens.
    sizes: Sequence[dict[str, Any]] = ({}, {"max_num_batched_tokens": 7, "block_size": 5})
    for size in sizes:
        assert_alike(our_drafts(target, spec, prompts, monkeypatch, **size), theirs)


Change = Callable[[Any, Any, Any, Any], tuple[Any, ...]]


def with_inputs(change: Change) -> tuple[object, str, Any]:
    """A fault in the inputs of each forward of the assistant: ids, states, positions, cache."""
    original = assistant.Assistant.forward
    return assistant.Assistant, "forward", lambda self, *inputs: original(self, *change(*inputs))


def other_features(runner: ModelRunner, plan: Any, output: TargetOutput, original: Any = ModelRunner.draft) -> Any:
    return original(runner, plan, TargetOutput(output.hidden_TE.roll(1, 0), output.aux))


class Moving:
    """Positions of a round that move with each draft, as other drafters'."""

    def __init__(self) -> None:
        self._last, self._step = -1, 0

    def __call__(self, ids: Any, states: Any, positions: Any, cache: Any) -> tuple[Any, ...]:
        self._step = self._step + 1 if int(positions[0]) == self._last else 0
        self._last = int(positions[0])
        return ids, states, positions + self._step, cache


# What is broken: an attribute of a module or class, and its replacement.
FAULTS: dict[str, tuple[object, str, Any]] = {
    "a window without the entry before it": (assistant, "LOOKBACK", 0),
    # Not the last of its kind that has keys of its own.
    "the first layers": (assistant, "_layers_of", lambda config, target: (0, 1)),
    # As with a hidden state that D does not have.
    "features of another row": (ModelRunner, "draft", other_features),
    "positions that move": with_inputs(Moving()),
    "the row's position": with_inputs(lambda ids, states, positions, cache: (ids, states, positions - 1, cache)),
    "another token": with_inputs(lambda ids, states, positions, cache: (ids * 0, states, positions, cache)),
    "no state": with_inputs(lambda ids, states, positions, cache: (ids, states * 0, positions, cache)),
    "embeddings as they are stored": (assistant, "rounded", lambda number, build: 1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_in_the_drafts(fault: str, made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    target, spec, _ = made()
    wanted = wanted_of(made, "gemma4", 0, ())
    prompts = [prompt_of(length) for length in LENGTHS]
    with mock.patch.object(*FAULTS[fault]), pytest.raises(AssertionError, match="other drafts"):
        assert_alike(our_drafts(target, spec, prompts, monkeypatch), wanted)


def test_a_window_that_keeps_too_little_shows(
    made: Callable[..., Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry before the window, which only the assistant reads, is freed or not handed over."""
    target, spec, _ = made()
    settings = settings_of(target, spec, block_size=1)
    with stepped(**settings) as single, pair(tmp_path, **settings) as two:
        both_ways(single, two, [3, 40], GREEDY, "push")
        whole = single.run("whole", prompt_of(40), GREEDY)
    with mock.patch.object(gemma4, "LOOKBACK", 0), pair(tmp_path, **settings) as two:
        told, rest = two.legs("40", prompt_of(40), GREEDY, "push")
        two.settle()
    assert (told.error, told.token_ids) == (None, whole.token_ids[:1])
    assert rest.error == "step_failed: BatonError"
    assert "a row's slot is in the null page" in caplog.text


def test_it_keeps_nothing_and_reads_what_the_target_keeps(made: Callable[..., Made]) -> None:
    target, spec, _ = made()
    loaded = load_drafter("assistant", spec["model"], load_model(target))
    assert isinstance(loaded, assistant.Assistant)
    assert (loaded.kv_layers, loaded.kv_modules) == ((), ())
    # Layers 3 and 4 share the keys of 2 and 1.
    assert [read.layer for read in loaded.target_reads] == [2, 1]
    with stepped(**settings_of(target, spec)) as one:
        assert {name.partition(".")[0] for name in one.core.cache.rules} == {"target"}


class Heads:
    """A cache in which attention gives each head its query."""

    def attend_kept(self, layer_id: int, q_THD: Tensor, scale: float, window: int | None) -> Tensor:
        return q_THD


def test_each_rank_attends_with_the_heads_of_its_keys(made: Callable[..., Made]) -> None:
    target, spec, _ = made()
    states = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    ids, positions = torch.tensor([5, 9]), torch.tensor([3, 70])

    def run(ranks: TensorRank) -> tuple[Tensor, Tensor]:
        drafter: Any = load_drafter("assistant", spec["model"], load_model(target, ranks=ranks))
        assert [layer.self_attn.q_proj.out_features for layer in drafter.layers] == [48 // ranks.size, 64 // ranks.size]
        out: tuple[Tensor, Tensor] = drafter(ids, states, positions, Heads())
        return out

    expected = run(TensorRank())
    for found in on_ranks(2, 2, run):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "gemma4_text"}, "model_type is 'gemma4_text', expected 'gemma4_assistant'"),
        ({"backbone_hidden_size": 64}, "backbone_hidden_size is 64, and the target's is 48"),
        ({"text_config": {"vocab_size": 300}}, "vocab_size is 300, and the target's is 260"),
        ({"text_config": {"sliding_window": WINDOW + 1}}, "sliding_window is 10, and the target's is 9"),
        ({"text_config": {"head_dim": 8}}, "windowed layers have 2 heads of 8, and the target's have others"),
        ({"text_config": {"per_layer_config": {"1": {"head_dim": 8}}}}, "full layers have 2 heads of 8"),
        ({"text_config": {"enable_moe_block": True}}, "enable_moe_block is True, which is not supported"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "7 clusters, of which 2 are chosen, do not fit 260"),
    ],
)
def test_an_assistant_that_does_not_fit_its_target_is_refused(
    fields: dict[str, Any], text: str, made: Callable[..., Made], tmp_path: Path
) -> None:
    target, spec, _ = made()
    for file in Path(spec["model"]).iterdir():
        shutil.copy(file, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    inner = raw["text_config"] | fields.get("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps({**raw, **fields, "text_config": inner}))
    with pytest.raises(CheckpointError, match=text):
        load_drafter("assistant", tmp_path, load_model(target))


@pytest.mark.parametrize("last", [0, 260, -1])
def test_clusters_without_each_token_once_are_refused(last: int, made: Callable[..., Made], tmp_path: Path) -> None:
    """Each draft would read logits that do not exist, and fail its request."""
    target, spec, _ = made("gemma4", 3, num_centroids=26)
    for file in Path(spec["model"]).iterdir():
        shutil.copy(file, tmp_path)
    name, tensors = "masked_embedding.token_ordering", load_file(tmp_path / "model.safetensors")
    order = torch.arange(260)
    order[-1] = last
    save_file({**tensors, name: order}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} does not list each token once"):
        load_drafter("assistant", tmp_path, load_model(target))


def test_another_target_is_refused(target: CausalLM, made: Callable[..., Made]) -> None:
    with pytest.raises(CheckpointError, match="an assistant is for a target of type gemma4_text"):
        load_drafter("assistant", made()[1]["model"], target)
