"""The simulator detects every mutation of the protocol within 2,000 seeds."""

from __future__ import annotations

import warnings

import pytest

from baton.errors import ConfigError
from simulation.agent import SimAgent
from simulation.mutations import MUTATIONS, applied
from simulation.parallel import run_seeds
from simulation.scenario import run_seed

# The seed that found it last. A search begins there, and goes through all seeds if the protocol has changed since: that
# takes minutes, and pytest's summary then names the new seed.
FOUND_AT = {
    "abort_then_reuse": 42,
    "admitted_unseen": 3,
    "an_id_is_a_session": 40,
    "any_bye_is_quiet": 85,
    "blocking_connect": 0,
    "cancel_once": 16,
    "cancelled_while_copying": 111,
    "cancelled_while_reading": 16,
    "commit_after_failure": 543,
    "confirm_after_release": 78,
    "deadline_from_ticket": 14,
    "duplicate_commit_is_progress": 601,
    "early_claims_tell_nothing": 541,
    "end_tokens_in_no_fact": 1,
    "failed_copy_counts": 35,
    "files_always_open": 129,
    "final_too_early": 9,
    "finish_while_copying": 39,
    "free_while_reading": 16,
    "identity_without_reach": 14,
    "ignore_cancelled": 13,
    "layer_of_one_rank": 39,
    "layers_by_place": 31,
    "layers_not_withdrawn": 21,
    "no_quarantine": 16,
    "no_ticket_check": 108,
    "no_ticket_check_again": 72,
    "offered_prefixes_are_evictable": 1201,
    "old_round_commits": 17,
    "one_layer_is_all": 21,
    "one_rank_frees_destination": 16,
    "one_silence_gives_up": 126,
    "places_are_lost": 3,
    "prefixes_are_found_early": 1201,
    "prefixes_are_longer": 1201,
    "prefixes_begin_a_page_late": 1201,
    "redials_at_once": 105,
    "register_before_connected": 14,
    "release_before_quiet": 29,
    "removed_engines_are_forgotten": 327,
    "resumed_prompts_are_longer": 69,
    "rows_not_written": 48,
    "short_contexts_are_taken": 27,
    "strangers_are_signs_of_life": 135,
    "timeout_frees_source": 85,
    "timeout_then_reuse": 5,
    "unfenced_is_fenced": 3,
    "unknown_is_quiet": 16,
    "unproven_is_kept": 37,
    "whoever_lives_agrees": 48,
    "windows_are_cut_short": 16,
    "windows_begin_within_a_page": 28,
}


# Of a mutation whose arguments or attributes are out of date.
OWN_ERRORS = ("exception: TypeError", "exception: AttributeError", "exception: NameError")


def test_there_are_at_least_fifteen_mutations() -> None:
    assert len(MUTATIONS) >= 15


@pytest.mark.filterwarnings("default:write down")
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_broken_protocol_is_found(name: str) -> None:
    mutation, first = MUTATIONS[name], FOUND_AT.get(name, 0)
    for seeds in (range(first, first + 30), range(2000)):
        failures = run_seeds(seeds, mutation.faults, mutation=name, stop_early=True).failures
        if failures:
            seed, violation = failures[0]
            assert not str(violation).startswith(OWN_ERRORS), violation
            # A bug without the mutation would find them all.
            assert run_seed(seed, mutation.faults).violation is None
            if seed not in range(first, first + 30):
                warnings.warn(f"write down in FOUND_AT: {name} is found at {seed}", stacklevel=1)
            return
    pytest.fail(f"2,000 seeds do not find {name}: {mutation.rule}")


def test_layers_that_are_not_written_are_wrong_on_the_far_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even without the check of P's reports: they are copied before they are written."""
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
