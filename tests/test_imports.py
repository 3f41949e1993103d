"""Large libraries are imported without the garbage collector."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from baton.imports import without_gc

# Collections of each generation while `baton.engine.async_engine` is imported, and objects that the collector tracks
# afterwards.
_COUNT = """
import gc
from baton.imports import without_gc
done = []
gc.callbacks.append(lambda phase, info: done.append(phase))
with without_gc():
    import baton.engine.async_engine
print(done, gc.isenabled(), len(gc.get_objects()) < 2000 < gc.get_freeze_count())
"""


def test_no_collection_during_an_import_and_no_imported_object_in_one_afterwards() -> None:
    found = subprocess.run([sys.executable, "-c", _COUNT], timeout=300, capture_output=True, text=True, check=True)
    assert found.stdout == "[] True True\n"


def test_a_missing_kernel_cache_is_one_error_line() -> None:
    """Without a writable package or home, Numba raises its own error at the first import."""
    nowhere = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "_ZipCacheLocator"}
    command = [sys.executable, "-c", "import baton; baton.LLM"]
    found = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False, env=nowhere)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("baton.errors.ConfigError: NUMBA_CACHE_DIR: names no directory")


def test_an_import_without_new_modules_freezes_nothing() -> None:
    before = gc.get_freeze_count()
    with without_gc():
        import baton.errors  # noqa: F401
    assert gc.get_freeze_count() <= before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_even_after_an_error(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), without_gc():
            import baton.nowhere  # noqa: F401
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
