"""Memory in huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.kernels.huge_pages import collapse, heap_in, pages_of, runs_of, size_in
from baton.own_memory import mappings_in

_MAPS = """\
55d0a4000000-55d0a4400000 r-xp 00000000 fe:00 17                 /usr/bin/python3.11
55d0a5000000-55d0a5800000 rw-p 00000000 00:00 0                  [heap]
7fb690e00000-7fb691200000 rw-p 00000000 00:00 0
7fb692e00000-7fb693200000 rw-p 00200000 fe:00 17                 /usr/bin/python3.11
7fb694000000-7fb694400000 rw-s 00000000 00:01 5                  /dev/zero (deleted)
7fb695000000-7fb695400000 ---p 00000000 00:00 0
7ffd1c000000-7ffd1c400000 rw-p 00000000 00:00 0                  [stack]
"""
_MOVES = """
import hashlib, mmap, re, sys
from pathlib import Path
from baton.kernels import huge_pages

def num_huge():
    return int(re.search(r"AnonHugePages: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])

known = [b"%d" % number * 40 for number in range(200_000)]
digest, before = hashlib.sha256(b"".join(known)).digest(), num_huge()
for _ in range(5):  # a call fails where one page is in use elsewhere at that moment
    huge_pages.move_heap()
assert hashlib.sha256(b"".join(known)).digest() == digest
moved = num_huge() - before
control = mmap.mmap(-1, 64 << 20)
control.write(bytes(64 << 20))
huge_pages.move_heap()
print(moved, num_huge() - before - moved)
"""


# A mapped file has a name that is no text, and the locale is one of ASCII.
_ANY_NAME = """
import mmap, os, sys
from baton.kernels.huge_pages import move_heap
from baton.observe.dashboard import dashboard_page

with open(os.fsencode(sys.argv[1]), "w+b") as file:
    file.write(b"x")
    file.flush()
    kept = mmap.mmap(file.fileno(), 1)
move_heap()
print(dashboard_page().html.isascii())
"""


def test_each_page_that_holds_a_byte_is_moved_once() -> None:
    assert pages_of([(5, 10), (14, 2), (40, 20)], 10) == [0, 1, 4, 5]
    calls: list[tuple[int, int, int]] = []

    def advise(address: int, size: int, what: int) -> int:
        calls.append((address, size, what))
        return -1 if address == 0 else 0

    assert collapse([0, 1, 3, 4, 5], 10, advise) == 4, "the first page cannot be moved"
    runs, halves = [(0, 20), (30, 30)], [(0, 20), (0, 10), (10, 10), (30, 30)]
    assert calls == [*((*run, 14) for run in runs), *((*run, 25) for run in halves)]


def test_calls_are_for_few_pages() -> None:
    assert runs_of(range(7, 77)) == [(7, 32), (39, 32), (71, 6)]


def test_start_up_waits_for_some_pages_only() -> None:
    seconds = iter([0.0, 0.0, 0.9, 1.1])
    moved: list[int] = []

    def advise(address: int, size: int, what: int) -> int:
        moved.append(what)
        return 0

    collapse([1, 3, 5, 7], 10, advise, lambda: next(seconds))
    assert moved == [14] * 4 + [25] * 2


@pytest.mark.parametrize("text", [None, "", "no number", "0"])
def test_a_system_that_hides_the_size_of_huge_pages_has_none(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "hpage_pmd_size"
    if text is None:
        file.mkdir()  # cannot be read, even by root
    else:
        file.write_text(text)
    assert size_in(file) is None


def test_the_heap_is_private_memory_of_no_file_without_stacks() -> None:
    assert list(heap_in(mappings_in(_MAPS))) == [(0x55D0A5000000, 0x55D0A5800000), (0x7FB690E00000, 0x7FB691200000)]


def test_names_of_mapped_files_and_the_locale_do_not_matter(tmp_path: Path) -> None:
    """The dashboard's script has characters beyond ASCII."""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", _ANY_NAME, str(tmp_path / os.fsdecode(b"caf\xe9\xc2\x85 b"))]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ascii_only})
    assert found.stdout == "False\n", found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_a_process_moves_its_heap() -> None:
    found = subprocess.run([sys.executable, "-c", _MOVES], capture_output=True, text=True, check=True)
    moved, of_control = map(int, found.stdout.split())
    if not of_control:
        pytest.skip("no huge pages on this machine")
    assert moved >= 8 * 1024
