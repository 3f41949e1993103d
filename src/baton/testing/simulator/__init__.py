"""A deterministic simulator of handoffs: the real protocol on modelled engines, memory, clocks and networks.

`run_seed(seed)` plays one schedule; `python -m baton.testing.simulator --seeds 20000` plays many. The same
seed always plays the same schedule. `docs/simulation.md` says what is modelled and what is checked.
"""

from baton.testing.simulator.scenario import Result, run_seed
from baton.testing.simulator.world import Violation

__all__ = ["Result", "Violation", "run_seed"]
