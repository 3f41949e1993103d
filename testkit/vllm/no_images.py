"""Models of text and images in vLLM's environment for CPUs, which has no torchvision: PyPI's build needs CUDA, without
which its import fails ("operator torchvision::nms does not exist"). vLLM and transformers import it for such models
even if no prompt has an image.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from benchmarks.vllm import servers

MODULES = ("", "io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional")
# Any name is a class that does nothing, and has any constant.
ANY_NAME = """
__version__ = "0.28.0"


class Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Names(name, (), {})
"""


@contextlib.contextmanager
def servers_without_images(folder: Path) -> Iterator[None]:
    """Servers that are started meanwhile import a `torchvision` of names alone, made in `folder`."""
    for module in MODULES:
        package = folder / "torchvision" / module
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(ANY_NAME)
    paths = (servers.ENVIRONMENT.get("PYTHONPATH"), str(folder))
    with patch.dict(servers.ENVIRONMENT, {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}):
        yield
