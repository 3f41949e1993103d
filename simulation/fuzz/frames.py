"""Makes valid and damaged control frames of every kind, for fuzzing.

Values are derived from the message types, so a new message is covered at once.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from baton.handoff.protocol.frames import PROTOCOL_VERSION
from baton.handoff.protocol.messages import AttemptKey, ControlMessage, Hello
from baton.kv.interval import Interval

Tree = Any  # any msgpack value: None, bool, int, float, str, bytes, list, dict

_INTEGERS = (-(1 << 63), -1, 0, 1, 2, 63, 64, 65, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 62) + 1, (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "é", "\0", "a\nb\x1b[2J", "../../etc/passwd", "%s%n", "tcp://10.0.0.1:1", "x" * 129, "x" * 5000)
_LONG = 3000


def message_classes() -> dict[str, type[ControlMessage]]:
    """All concrete messages by kind."""
    found: dict[str, type[ControlMessage]] = {}
    waiting: list[type[ControlMessage]] = [ControlMessage]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if not cls.__subclasses__():
            found[str(cls.__struct_config__.tag)] = cls
    return dict(sorted(found.items()))


_type_info = functools.cache(types.type_info)


class FrameMaker:
    """An endless source of frames for one session, reproducible for the same `rng`.

    `hello` opens the session. `keys` and `tickets` are attempts that the listener may know.
    """

    def __init__(
        self, rng: random.Random, hello: Hello, keys: Sequence[AttemptKey] = (), tickets: Sequence[str] = ()
    ) -> None:
        self.rng = rng
        self._hello = msgspec.to_builtins(hello, builtin_types=(bytes,))
        self._keys = [list(msgspec.structs.astuple(key)) for key in keys]
        self._tickets = list(tickets)
        self._types = {kind: _type_info(cls) for kind, cls in message_classes().items()}
        self._kinds = list(self._types)
        self._recent: list[list[bytes]] = []
        self._sequence = 0
        self.session = rng.getrandbits(62)

    # ------------------------------------------------------------ frames

    def open(self) -> list[bytes]:
        self.session, self._sequence = self.rng.getrandbits(62), 0
        return self.say(self._hello)

    def say(self, hello: Tree) -> list[bytes]:
        """Encode a HELLO (a struct, or its msgpack form) in this session."""
        return [self._encode("HELLO", msgspec.to_builtins(hello, builtin_types=(bytes,)))[1]]

    def next(self) -> list[bytes]:
        rng = self.rng
        roll = rng.random()
        if roll < 0.05 and self._recent:
            return rng.choice(self._recent)
        if roll < 0.08:
            return [rng.randbytes(rng.choice((0, 1, 3, 40, 400))) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        kind = rng.choice(self._kinds)
        body = self.body(kind)
        if roll < 0.60:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                body = self.mutated(body)
        parts = self._frame(kind, body)
        if roll < 0.25:
            parts = [self._damaged(parts[0])]
        if rng.random() < 0.02:
            self._recent = [*self._recent[-63:], parts]
        return parts

    def _encode(self, kind: str, body: Tree) -> tuple[list[Tree], bytes]:
        self._sequence += 1
        envelope = [PROTOCOL_VERSION, self.session, self._sequence, kind, body]
        return envelope, msgspec.msgpack.encode(envelope)

    def _frame(self, kind: str, body: Tree) -> list[bytes]:
        envelope, frame = self._encode(kind, body)
        if self.rng.random() < 0.08:
            at = self.rng.randrange(5)
            envelope[at] = self._other(envelope[at])
            frame = msgspec.msgpack.encode(envelope)
        return [frame]

    def _damaged(self, frame: bytes) -> bytes:
        rng, data = self.rng, bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data) + 1)
            what = rng.randrange(4)
            if what == 0:
                del data[at:]
            elif what == 1:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
            elif what == 2:
                del data[at : at + rng.choice((1, 2, 9))]
            elif at < len(data):
                data[at] ^= 1 << rng.randrange(8)
        return bytes(data)

    # ------------------------------------------------------------ bodies

    def body(self, kind: str) -> dict[str, Tree]:
        """A valid body; attempts and tickets are often ones that exist."""
        if kind == "HELLO" and self.rng.random() < 0.5:
            return dict(self._hello)
        body: dict[str, Tree] = self._value(self._types[kind])
        if "key" in body and self._keys and self.rng.random() < 0.7:
            body["key"] = list(self.rng.choice(self._keys))
        if "ticket" in body and self._tickets and self.rng.random() < 0.7:
            at = self.rng.randrange(len(self._tickets))
            body["ticket"], body["key"] = self._tickets[at], list(self._keys[at])
        if "same" in body:  # any other group has no table
            body["same"] = {f"{name}-": name for name in body["pages"] if self.rng.random() < 0.5}
        return body

    def _value(self, kind: types.Type) -> Tree:
        rng = self.rng
        match kind:
            case types.StructType():
                values = {field.encode_name: self._value(field.type) for field in kind.fields}
                if kind.array_like:
                    return sorted(values.values()) if kind.cls is Interval else list(values.values())
                return values if kind.tag_field is None else {kind.tag_field: kind.tag, **values}
            case types.IntType():
                low = kind.ge if kind.ge is not None else 0 if kind.gt is None else kind.gt + 1
                high = kind.le if kind.le is not None else (1 << 31) if kind.lt is None else kind.lt - 1
                return min(high, low + rng.choice((0, 1, rng.randrange(100), high - low)))
            case types.FloatType():
                return rng.choice((0.25, 1.0, 5.0))
            case types.BoolType():
                return rng.random() < 0.5
            case types.StrType():
                return "".join(rng.choices("abP-19", k=self._size(kind)))
            case types.BytesType():
                return rng.randbytes(self._size(kind))
            case types.ListType() | types.VarTupleType():
                return [self._value(kind.item_type) for _ in range(self._size(kind))]
            case types.TupleType():
                return [self._value(item) for item in kind.item_types]
            case types.DictType():
                names = ("target", "draft", "x")[: self._size(kind)]
                return {name: self._value(kind.value_type) for name in names}
            case types.UnionType():
                return self._value(rng.choice(kind.types))
            case types.LiteralType():
                return rng.choice(kind.values)
            case types.NoneType():
                return None
        raise NotImplementedError(f"no example of {kind}")

    def _size(self, kind: Any) -> int:
        low = kind.min_length or 0
        high = low + 3 if kind.max_length is None else kind.max_length
        return int(min(high, low + self.rng.choice((0, 1, 2, 3))))

    # ------------------------------------------------------------ mutation

    def mutated(self, tree: Tree) -> Tree:
        rng = self.rng
        if isinstance(tree, dict) and tree and rng.random() < 0.85:
            name = rng.choice(list(tree))
            return {**tree, name: self.mutated(tree[name])}
        if isinstance(tree, list) and tree and rng.random() < 0.7:
            at = rng.randrange(len(tree))
            return [*tree[:at], self.mutated(tree[at]), *tree[at + 1 :]]
        return self._other(tree)

    def _other(self, tree: Tree) -> Tree:
        rng, huge = self.rng, self.rng.random() < 0.03
        times = _LONG if huge else 2
        changes: list[Callable[[], Tree]] = [
            lambda: rng.choice(_INTEGERS),
            lambda: rng.choice(_INTEGERS),
            lambda: rng.choice(_FLOATS),
            lambda: rng.choice(_TEXTS),
            lambda: rng.choice((None, True, False, [], {}, b"", rng.randbytes(16))),
            lambda: [tree, tree],
            lambda: {"x": tree},
            lambda: _nested(900 if huge else rng.choice((3, 30))),
        ]
        if isinstance(tree, dict) and tree:
            gone = rng.choice(list(tree))
            changes += [
                lambda: {name: v for name, v in tree.items() if name != gone},
                lambda: {**tree, "y": 1, gone: 2},
            ]
            changes += [lambda: {f"g{i}": tree[gone] for i in range(300 if huge else rng.choice((2, 65)))}]
        if isinstance(tree, list) and tree:
            changes += [lambda: tree[:-1], lambda: tree[::-1], lambda: tree * (times // len(tree) + 1)]
        if isinstance(tree, bytes | str):
            changes += [lambda: tree[:-1], lambda: tree * times]
        if isinstance(tree, int) and not isinstance(tree, bool):
            changes += [lambda: min((1 << 64) - 1, tree + 1), lambda: max(-(1 << 63), tree - 1)] * 2
        return rng.choice(changes)()


def _nested(depth: int) -> Tree:
    tree: Tree = 0
    for _ in range(depth):
        tree = [tree]
    return tree
