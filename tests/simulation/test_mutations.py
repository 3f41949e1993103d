"""Every protocol that was broken on purpose is found by the simulator, within 2,000 seeds."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from simulation.agent import SimAgent
from simulation.mutations import MUTATIONS, applied
from simulation.parallel import run_seeds
from simulation.scenario import run_seed

# Where a search found them last. It begins there, and goes through all seeds when the protocol has changed since.
FOUND_AT = {
    "abort_then_reuse": 15,
    "any_bye_is_quiet": 112,
    "blocking_connect": 177,
    "cancel_once": 37,
    "cancelled_while_copying": 94,
    "cancelled_while_reading": 69,
    "commit_after_failure": 48,
    "confirm_after_release": 55,
    "draft_state_has_seen_drafts": 33,
    "drafts_go_over_the_state": 33,
    "duplicate_commit_is_progress": 538,
    "every_pair_wants_all": 28,
    "failed_copy_counts": 48,
    "finish_while_copying": 87,
    "free_while_reading": 15,
    "late_pairs_hear_nothing": 28,
    "no_quarantine": 47,
    "no_ticket_check": 49,
    "old_round_commits": 36,
    "one_layer_is_all": 39,
    "preempt_keeps_pages": 49,
    "progress_of_one_rank": 15,
    "release_before_quiet": 110,
    "said_to_the_leading_pair": 28,
    "skip_digest_check": 29,
    "timeout_frees_source": 243,
    "timeout_then_reuse": 94,
    "unfenced_is_fenced": 185,
    "unknown_is_quiet": 15,
    "unproven_is_kept": 47,
    "early_claims_tell_nothing": 319,
    "end_tokens_in_no_fact": 55,
    "removed_engines_are_forgotten": 175,
    "resumed_prompts_are_longer": 70,
    "wrong_head_share": 21,
}


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 15


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_broken_protocol_is_found(name: str) -> None:
    mutation, first = MUTATIONS[name], FOUND_AT.get(name, 0)
    for seeds in (range(first, first + 30), range(2000)):
        failures = run_seeds(seeds, mutation.faults, mutation=name, stop_early=True).failures
        if failures:
            # What is broken without the mutation too would find them all.
            assert run_seed(failures[0][0], mutation.faults).violation is None
            return
    pytest.fail(f"2,000 seeds do not find {name}: {mutation.rule}")


def test_layers_that_are_not_written_are_wrong_on_the_far_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody looks at what P says of them: they are copied before they are written."""
    monkeypatch.setattr(SimAgent, "_check_final", lambda *_: None)
    for seeds in (range(48, 60), range(500)):
        failures = run_seeds(seeds, mutation="layer_not_written", stop_early=True).failures
        if failures:
            assert failures[0][1].startswith(("early_commit", "false_proof"))
            return
    pytest.fail("500 seeds do not find it")


def test_mutations_are_undone() -> None:
    before = run_seeds(range(5))
    with pytest.raises(ConfigError, match="gremlin"), applied("gremlin"):
        pass
    for name in MUTATIONS:
        with applied(name):
            pass
    assert run_seeds(range(5)) == before
