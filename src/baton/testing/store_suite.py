"""The suite of a store: `put` and `get` by content key, with damage, hostile files, rival writers and a full disk.

    from baton.testing import check_store
    check_store(FileStore)

Each check uses its own directory.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton.errors import BatonError, TransportError
from baton.kvstore.store import KEEP_S, Entry, FileStore
from baton.testing.transport_near import require
from baton.testing.transport_peer import pattern
from baton.transports.base import ByteArray

NewStore = Callable[[Path, int], FileStore]
ROOM = 1 << 20


def check_store(factory: NewStore) -> list[str]:
    """Run every check on stores made by `factory(directory, max_bytes)`. Returns the names of the checks.

    Raises `AssertionError` naming the check and its first failure.
    """
    names = []
    for check in _CHECKS:
        name = check.__name__.removeprefix("_check_")
        with tempfile.TemporaryDirectory(prefix="baton-store-") as directory:
            try:
                check(factory, Path(directory))
            except (AssertionError, BatonError) as error:
                raise AssertionError(f"{name}: {error}") from error
        names.append(name)
    return names


def _groups(seed: int = 0) -> dict[str, ByteArray]:
    return {"target": pattern(4096, seed), "draft": pattern(512, seed + 1), "empty": pattern(0, 0)}


def _same(entry: Entry | None, tensors: dict[str, ByteArray], about: dict[str, str]) -> bool:
    return (
        entry is not None
        and entry.about == about
        and sorted(entry.tensors) == sorted(tensors)
        and all(np.array_equal(entry.tensors[name], array) for name, array in tensors.items())
    )


def _check_returns_what_was_put(factory: NewStore, directory: Path) -> None:
    store, about = factory(directory, ROOM), {"tokens": "128"}
    key = store.put(_groups(), about)
    require(_same(store.get(key), _groups(), about), "every group comes back, the drafter's too")
    named = store.put(_groups(5), about, key="ab" * 16)
    require(
        named == "ab" * 16 and _same(store.get(named, named=True), _groups(5), about),
        "an entry may have a name of its own",
    )
    require(store.get("00" * 16) is None, "an absent entry is None")
    again = factory(directory, ROOM)
    require(_same(again.get(key), _groups(), about), "entries outlive the store object")
    again.remove(key)
    again.remove(key)
    require(store.get(key) is None, "a removed entry is gone")


def _check_is_content_addressed(factory: NewStore, directory: Path) -> None:
    store = factory(directory, ROOM)
    key = store.put(_groups())
    require(store.put(_groups()) == key and store.keys() == [key], "equal content is stored once")
    swapped = {"target": _groups()["draft"], "draft": _groups()["target"], "empty": _groups()["empty"]}
    others = [store.put(swapped), store.put(_groups(), {"a": "b"}), store.put({"target": _groups()["target"]})]
    require(len({key, *others}) == 4, "names, strings and bytes all count")


def _check_refuses_damage(factory: NewStore, directory: Path) -> None:
    store = factory(directory, ROOM)
    key = store.put(_groups(), {"tokens": "128"})
    whole = (directory / key).read_bytes()
    cuts = [*range(0, 64), *range(64, len(whole), 97), len(whole) - 1]
    flips = [*range(0, 400, 3), *range(400, len(whole), 131), len(whole) - 1]
    damaged = [whole[:cut] for cut in cuts] + [whole + b"\0"]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :] for at in flips]
    for data in damaged:
        (directory / key).write_bytes(data)
        _refuses(store, key)
        require(store.get(key) is None, "a damaged entry is removed")
    require(store.put(_groups(), {"tokens": "128"}) == key, "what was damaged can be put again")
    require(_same(store.get(key), _groups(), {"tokens": "128"}), "and comes back")


def _check_refuses_hostile_files(factory: NewStore, directory: Path) -> None:
    store, key = factory(directory, ROOM), "cd" * 16
    outside = directory / "outside"
    good = store.put(_groups())
    outside.write_bytes((directory / good).read_bytes())
    header = b'{"x":{"dtype":"F64","shape":[4],"data_offsets":[0,32]}}'
    huge = b'{"x":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}}'
    hostile: list[Callable[[Path], object]] = [
        lambda path: path.symlink_to(outside),
        lambda path: os.mkfifo(path),
        lambda path: path.write_bytes((1 << 63).to_bytes(8, "little")),
        lambda path: path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32)),
        lambda path: path.write_bytes(len(huge).to_bytes(8, "little") + huge),
        lambda path: path.write_bytes(bytes(ROOM + 1)),
    ]
    named = store.put(_groups(5), key="ef" * 16)
    for other in (good, named):
        hostile.append(lambda path, other=other: os.link(directory / other, path))  # type: ignore[misc]
    for make in hostile:
        for is_named in (False, True):
            make(directory / key)
            _refuses(store, key, is_named)
    _refuses(store, named)
    require(outside.exists(), "a link is not followed")
    for name in ("../" + "ab" * 15, "", "AB" * 16, "ab" * 16 + "\n", "ab" * 16 + ".tmp", "/etc/passwd"):
        _refuses(store, name)


def _refuses(store: FileStore, key: str, named: bool = False) -> None:
    try:
        store.get(key, named)
    except TransportError:
        return
    raise AssertionError(f"expected that entry {key!r} is refused")


def _check_evicts_by_size(factory: NewStore, directory: Path) -> None:
    store = factory(directory, ROOM)
    keys = [store.put({"x": pattern(ROOM // 8, i)}) for i in range(7)]
    for age, key in enumerate(reversed(keys)):
        at = os.stat(directory / key).st_mtime - 2 * KEEP_S - age
        os.utime(directory / key, (at, at))
    require(store.get(keys[0]) is not None, "an old entry is there")
    keys.append(store.put({"x": pattern(ROOM // 4, 99)}))
    size = sum(path.stat().st_size for path in directory.iterdir())
    require(size <= ROOM, "all entries fit into max_bytes")
    left = set(store.keys())
    require(keys[0] in left and keys[-1] in left, "what was used last stays")
    require(keys[1] not in left and keys[6] in left, "what was used longest ago goes")
    for i in range(20):
        try:
            store.put({"x": pattern(ROOM // 4, 200 + i)})
        except TransportError:
            break
    else:
        raise AssertionError("expected that a store full of young entries refuses more")
    require(store.get(keys[-1]) is not None, "young entries stay: a peer may be about to read them")
    try:
        store.put({"x": pattern(ROOM, 1)})
    except TransportError:
        return
    raise AssertionError("expected that an entry above max_bytes is refused")


def _check_shows_whole_entries_only(factory: NewStore, directory: Path) -> None:
    stores = [factory(directory, ROOM << 4) for _ in range(3)]
    failures: list[str] = []
    rounds = [{"x": pattern(1 << 16, i)} for i in range(12)]
    keys = [f"{i:032x}" for i in range(len(rounds))]

    def write(store: FileStore) -> None:
        for key, tensors in zip(keys, rounds, strict=True):
            store.put(tensors, key=key)

    def read() -> None:
        for i, key in enumerate(keys):
            entry = None
            while entry is None and not failures:
                try:
                    entry = stores[2].get(key, named=True)
                except TransportError as error:
                    failures.append(str(error))
            if entry is not None and not _same(entry, rounds[i], {}):
                failures.append(f"entry {i} differs")

    threads = [threading.Thread(target=write, args=(store,)) for store in stores[:2]]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(not failures, f"a reader beside two writers sees whole entries ({failures})")
    require(sorted(path.name for path in directory.iterdir()) == keys, "nothing half-written is left behind")


def _check_is_private(factory: NewStore, directory: Path) -> None:
    store = factory(directory / "new" / "store", ROOM)
    key = store.put(_groups())
    modes = [os.stat(path).st_mode & 0o777 for path in (store.directory, store.directory / key)]
    require(modes == [0o700, 0o600], "directory and entries are for one user")


_CHECKS: tuple[Callable[[NewStore, Path], None], ...] = (
    _check_returns_what_was_put,
    _check_is_content_addressed,
    _check_refuses_damage,
    _check_refuses_hostile_files,
    _check_evicts_by_size,
    _check_shows_whole_entries_only,
    _check_is_private,
)
