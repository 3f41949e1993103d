"""Makes the fakes of `tests/server` importable."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory, as far as a router looks at it."""
    from tests.server.fake_serving import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("model"))
