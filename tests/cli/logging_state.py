"""Commands that serve set up logging for the whole process: their tests restore the process's state."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """No logging is set up inside the context, whatever other tests did; what `log_to_stderr` sets there ends
    with it.
    """
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before, level, own, hook = root.handlers[:], root.level, baton.level, sys.excepthook
    names = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
    added = [name for name in names if name not in os.environ]
    root.handlers[:] = [handler for handler in before if "baton" not in type(handler).__module__]
    try:
        yield
    finally:
        root.handlers[:], sys.excepthook = before, hook
        root.setLevel(level)
        baton.setLevel(own)
        logging.captureWarnings(False)
        for name in added:
            os.environ.pop(name, None)
