"""A stand-in for torchvision, from which SGLang imports names at start: classes with any constant."""

from __future__ import annotations

__version__ = "0"


class Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def __getattr__(name: str) -> Names:
    if name.startswith("__"):
        raise AttributeError(name)
    return Names(name, (), {})
