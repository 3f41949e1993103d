"""Instances of many ranks over real agents and memory: every wanted byte of every rank arrives, and nothing else is
written; a request is runnable on all ranks or on none, and no page is free before all its pairs are quiet.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.kv.geometry import LAYER_MAJOR_HND
from tests.handoff.ranks import Engine, Shape, hand_over


class Pair:
    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def engine(self, name: str, shape: Shape, *schemes: str, **config: object) -> Engine:
        self.engines.append(Engine(name, shape, schemes or ("local://",), config))
        return self.engines[-1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for engine in made.engines:
        engine.close()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("d_tp", [1, 2, 4])
@pytest.mark.parametrize("p_tp", [1, 2, 4])
def test_every_byte_of_every_rank_arrives(pair: Pair, p_tp: int, d_tp: int, mode: str) -> None:
    """Sharded heads with more ranks than some groups have heads, replicated latents, a drafter with heads."""
    p = pair.engine("P", Shape(tp=p_tp))
    d = pair.engine("D", Shape(tp=d_tp, page_size=5, order=LAYER_MAJOR_HND))
    hand_over(p, d, mode, n=13, salt=1)
    hand_over(p, d, mode, n=8, hit=3, announced=False, salt=2)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(
    ("p_shape", "d_shape"),
    [
        (Shape(stages=(0, 1)), Shape(stages=(0, 3))),
        (Shape(tp=2, stages=(0, 2)), Shape(tp=1, page_size=6)),
        (Shape(tp=1), Shape(tp=2, stages=(0, 1, 3))),
        (Shape(tp=2, stages=(0, 3)), Shape(tp=4, stages=(0, 2))),
    ],
)
def test_stages_that_are_cut_differently(pair: Pair, p_shape: Shape, d_shape: Shape, mode: str) -> None:
    p, d = pair.engine("P", p_shape), pair.engine("D", d_shape)
    hand_over(p, d, mode, salt=1)
    hand_over(p, d, mode, n=6, hit=4, announced=False, salt=2)
