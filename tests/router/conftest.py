"""Makes the fakes of `tests/server` importable."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of a model's directory that a router reads."""
    from testkit.servers.fake_serving import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("model"))
