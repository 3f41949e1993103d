"""Random engines for `simulation.planning.check`: ranks, stages, planes, layouts, and what one wants of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from baton.handoff.plan.planner import Instance, RankGeometry
from baton.kv.interval import ALL_LAYERS, Interval
from simulation.planning.engines import as_layers, engine, hybrid
from simulation.topologies import Layers, Part, Shape, instance, place, random_layout

_PAGES = 9
_TP = (1, 1, 2, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """Two engines, and per group what to copy: both block tables, tokens, layers."""

    source: Instance
    dest: Instance
    wanted: dict[str, tuple[list[int], list[int], Interval, Interval]]
    regular: bool
    hybrid: bool = False


def draw(random: Random) -> Case:
    """Two engines of a random model: a hybrid cut as real engines cut it, or groups of arbitrary planes."""
    if random.random() < 0.25:
        return _draw_hybrid(random)
    tile = random.choice((1, 1, 1, 2))
    groups = [_group(random, f"group{i}", tile) for i in range(random.randint(1, 3))]
    if random.random() < 0.5:
        groups.append(_group(random, "draft", tile, draft=True))
    regular = random.random() < 0.8
    sides = [_side(random, groups, tile, regular) for _ in range(2)]
    return _case(random, groups, sides, tile, regular)


def _draw_hybrid(random: Random) -> Case:
    """Both engines cut the hybrid by the same rules, or one of them has arbitrary layers and shares of each plane."""
    model, regular = hybrid(random), random.random() < 0.8
    groups = [as_layers(group) for group in model.groups]
    sides = [engine(random, model, random.randint(1, 5), _PAGES) for _ in range(2)]
    if not regular:
        sides[random.randrange(2)] = _odd(random, groups, random.randint(1, 5), tile=1)
    return replace(_case(random, groups, sides, 1, regular), hybrid=True)


def _case(random: Random, groups: Sequence[Layers], sides: Sequence[Instance], tile: int, regular: bool) -> Case:
    wanted = {}
    for group in groups:
        sizes = [side.groups[group.name][0].geometry.page_size for side in sides]
        longest = min(sizes) * (_PAGES - 1)
        start = 0 if group.page_size else random.randrange(longest)
        stop = 1 if group.page_size else random.randint(start + 1, longest)
        tables = [_table(random, start - start % tile, -(-stop // tile) * tile, size) for size in sizes]
        first = random.choice(group.layer_ids)
        layers = random.choice((ALL_LAYERS, ALL_LAYERS, Interval(first, first + random.randint(1, 3))))
        wanted[group.name] = (tables[0], tables[1], Interval(start, stop), layers)
    return Case(sides[0], sides[1], wanted, regular)


def _group(random: Random, name: str, tile: int, draft: bool = False) -> Layers:
    count = 1 if draft else random.randint(1, 5)
    ids = tuple(random.sample(range(12), count))
    if random.random() < 0.7:
        ids = tuple(sorted(ids))
    kind = random.choice(("heads", "heads", "heads", "latent", "state", "any"))
    dtype = random.choice(("bfloat16", "float32", "uint8"))
    heads = random.choice((1, 2, 2, 4, 6, 8))
    dim = random.randint(1, 4)
    if kind == "heads":
        parts = [Part("k", "heads", heads, dim, dtype), Part("v", "heads", heads, dim, dtype)]
    elif kind == "latent":
        parts = [Part("latent", "whole", 1, 5, dtype), Part("rope", "whole", 1, 2, dtype)][: random.randint(1, 2)]
    elif kind == "state" and tile == 1 and not draft:
        groups = random.choice((1, 2, 4))
        parts = [
            Part("conv x", "channels", heads * 3, 2, dtype, unit=3),
            Part("conv b", "channels", groups * 2, 2, dtype, unit=2),
            Part("conv c", "channels", groups * 2, 2, dtype, unit=2),
            Part("ssm", "heads", heads, 6, "float32"),
        ]
        return Layers(name, tuple(parts), ids, page_size=1)
    else:
        cuts = [random.choice(("heads", "channels", "whole")) for _ in range(random.randint(1, 4))]
        parts = [
            Part(f"plane{i}", cut, random.choice((1, 2, 4, 8)), random.randint(1, 3), random.choice((dtype, "float16")))  # type: ignore[arg-type]
            for i, cut in enumerate(cuts)
        ]
    return Layers(name, tuple(parts), ids, "draft" if draft else "target")


def _side(random: Random, groups: Sequence[Layers], tile: int, regular: bool) -> Instance:
    layout = random_layout(random, tile)
    size = random.randint(1, 5) * tile
    if not regular:
        return _odd(random, groups, size, tile)
    fit = [tp for tp in _TP if all(_divides(part, tp) for group in groups for part in group.parts)]
    tp = random.choice(fit)
    draft = random.choice((None, 1))
    shape = Shape(tp, random.choice((1, 1, 2, 3)), draft, size, layout)
    return instance(groups, shape, _PAGES)


def _divides(part: Part, tp: int) -> bool:
    units = part.num_heads // part.unit
    return part.cut == "whole" or units % tp == 0 or tp % units == 0


def _odd(random: Random, groups: Sequence[Layers], size: int, tile: int) -> Instance:
    """Ranks with arbitrary layers and ranges of heads, in arbitrary layouts; perhaps some parts are on no rank."""
    num_ranks = random.randint(1, 5)
    found: dict[str, list[RankGeometry]] = {}
    for group in groups:
        page_size = group.page_size or size
        for rank in range(num_ranks):
            layers = [layer for layer in group.layer_ids if random.random() < 0.8]
            random.shuffle(layers)
            if not layers:
                continue
            shares = []
            # Planes may have equally many heads here, but different ones.
            width = random.choice((None, 1, 2))
            for part in group.parts:
                first = random.choice((0, 0, random.randrange(part.num_heads)))
                last = random.choice((part.num_heads, random.randint(first + 1, part.num_heads)))
                if width is not None and width <= part.num_heads:
                    first = random.randint(0, part.num_heads - width)
                    last = first + width
                shares.append((0, part.num_heads) if part.cut == "whole" else (first, last - first))
            layout = random_layout(random, tile)
            geometry = place(group.name, group.parts, shares, layers, _PAGES, page_size, layout, region=rank)
            found.setdefault(group.name, []).append(RankGeometry(rank=rank, geometry=geometry))
        if group.name not in found:
            shares = [(0, part.num_heads) for part in group.parts]
            layout = random_layout(random, tile)
            geometry = place(group.name, group.parts, shares, group.layer_ids, _PAGES, page_size, layout)
            found[group.name] = [RankGeometry(rank=0, geometry=geometry)]
    return Instance(rank=0, groups=found, sampling=random.randrange(num_ranks))


def _table(random: Random, start: int, stop: int, page_size: int) -> list[int]:
    """Pages in any order for `[start, stop)`. Earlier entries are null, and there may be pages after them."""
    first, last = start // page_size, -(-stop // page_size)
    pages = random.sample(range(1, _PAGES), min(_PAGES - 1, last - first + random.randint(0, 2)))
    if random.random() < 0.5:
        pages.sort()
    return [0] * first + pages
