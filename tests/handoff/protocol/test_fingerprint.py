"""Which engines and ranks may hand over to each other."""

from __future__ import annotations

import json

import pytest

from baton.comparison import PROCESSOR, rounding_difference, token_identity
from baton.errors import IncompatiblePeerError
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.fingerprint import check_pair, compare_fingerprints, target_groups
from baton.kv.geometry import BLOCK_MAJOR_NHD, Geometry
from baton.kv.spec import GroupSpec, kv_planes

SPEC = GroupSpec(
    name="target", owner="target", kind="full", planes=kv_planes(1, 2, "float32"), page_size=4, layer_ids=(0,)
)
GEOMETRY = Geometry.from_order(SPEC, 4, BLOCK_MAJOR_NHD, region=0)


def instance(rank: int, **groups: tuple[int, ...]) -> Instance:
    """An instance seen from `rank`, whose groups are on the given ranks."""
    return Instance(
        rank=rank,
        groups={name: [RankGeometry(rank=each, geometry=GEOMETRY) for each in ranks] for name, ranks in groups.items()},
    )


def test_other_processors_are_told_and_not_refused() -> None:
    here, peer = {"model.dtype": "bfloat16", PROCESSOR: "a"}, {"model.dtype": "bfloat16", PROCESSOR: "b"}
    assert compare_fingerprints(here, peer)
    assert token_identity(json.dumps(here)) == token_identity(json.dumps(peer))
    assert "'a' and 'b' may round differently" in str(rounding_difference(here, peer))
    assert rounding_difference(here, here) is None
    # An engine that is batch-invariant names none: its probe decides.
    assert rounding_difference(here, {"numerics.probe": "0"}) is None


def test_the_drafters_groups_are_those_that_draft_names() -> None:
    both = instance(0, **dict.fromkeys(("target", "target.sliding_window", "draft", "draft.1", "drafty"), (0,)))
    assert target_groups(both) == {"target", "target.sliding_window", "drafty"}


def test_each_side_may_have_every_group_on_its_own_rank() -> None:
    check_pair(instance(0, target=(0,), draft=(0,)), instance(1, target=(1,), draft=(1,)))


@pytest.mark.parametrize(
    "peer",
    [instance(1, target=(1,)), instance(1, target=(1,), draft=(0,)), instance(1, target=(1,), draft=(1, 0))],
    ids=["no rank", "another rank", "two ranks"],
)
def test_a_group_that_one_rank_does_not_hold_alone_is_refused_by_name(peer: Instance) -> None:
    here = instance(0, target=(0,), draft=(0,))
    for one, other in ((here, peer), (peer, here)):
        with pytest.raises(IncompatiblePeerError, match=r"group\.draft\.ranks") as refused:
            check_pair(one, other)
        assert "target" not in str(refused.value)
