"""`python -m baton.testing.conformance [--device cuda:N] [TRANSPORT ...]`: run the suite over transports, and print a
table.

Default: every built-in transport, including the `file` store; with `--device` those that open memory of a device. A
transport that this machine cannot run is a column of dashes. Exits 1 if a check failed, 2 for an unknown transport.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence

from baton.errors import ConfigError
from baton.kvstore.store import FileStore
from baton.testing.store_suite import check_store
from baton.testing.transport_suite import check_names, check_transport
from baton.transports.registry import built_in_transports, create_transport, parse_uri, with_path


def run_suite(uri: str, device: str | None = None) -> tuple[dict[str, str], list[str]]:
    """Seconds or `FAILED` per check; and why a check failed or none ran."""
    scheme = uri.partition(":")[0]
    try:
        create_transport(uri).close()
    except ConfigError as error:
        return {}, [f"{scheme}: not run: {error}"]
    spawn_uri = None if scheme.endswith("local") else uri
    cells, notes = {}, []
    for name in check_names():
        start = time.perf_counter()
        try:
            check_transport(lambda: create_transport(uri), spawn_uri=spawn_uri, only=[name], device=device)
            cells[name] = f"{time.perf_counter() - start:.1f} s"
        except AssertionError as error:
            cells[name] = "FAILED"
            notes.append(f"{scheme}: {error}")
        except Exception as error:  # a transport of another package may raise anything
            cells[name] = "FAILED"
            notes.append(f"{scheme}: {name}: {type(error).__name__}: {error}")
    return cells, notes


def format_table(columns: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Rows are checks, columns transports: (name, cells)."""
    names = check_names()
    width = max(len(name) for name in names)
    lines = [" ".join([f"{'check':{width}}", *(f"{scheme:>9}" for scheme, _ in columns)])]
    lines += [" ".join([f"{name:{width}}", *(f"{cells.get(name, '-'):>9}" for _, cells in columns)]) for name in names]
    totals = [f"{sum(cell != 'FAILED' for cell in cells.values())}/{len(names)}" for _, cells in columns]
    return "\n".join([*lines, " ".join([f"{'passed':{width}}", *(f"{total:>9}" for total in totals)])])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.testing.conformance", allow_abbrev=False)
    parser.add_argument("transports", nargs="*", metavar="TRANSPORT", help="names or URIs; those of Baton by default")
    parser.add_argument("--device", help="cuda:N: regions lie in its memory")
    options = parser.parse_args(arguments)
    try:
        for uri in options.transports:
            parse_uri(uri)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="baton-conformance-") as directory:
        built_in = [with_path(name, f"{directory}/store") for name in built_in_transports(options.device or "cpu")]
        columns, notes = [], []
        for uri in options.transports or built_in:
            print(f"{uri} ...", file=sys.stderr, flush=True)
            cells, more = run_suite(uri, options.device)
            columns.append((uri.partition(":")[0], cells))
            notes += more
    try:
        notes.append(f"the store of file: {len(check_store(FileStore))} checks passed")
    except AssertionError as error:
        notes.append(f"the store of file: FAILED {error}")
    print("\n".join([format_table(columns), *notes]))
    return int(any("FAILED" in cells.values() for _, cells in columns) or "FAILED" in notes[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
