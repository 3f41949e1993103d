"""A deterministic simulator of handoffs: the real protocol over modelled engines, memory, clocks and networks.

`run_seed(seed)` plays one schedule, `python -m simulation --seeds 20000` plays many. A seed always plays the same
schedule. `docs/simulation.md` lists what is modelled and which invariants are checked.
"""

from simulation.scenario import Result, run_seed
from simulation.world import Violation

__all__ = ["Result", "Violation", "run_seed"]
