"""Write docs/errors.md from `baton.error_help`.

python -m tools.error_table
"""

from __future__ import annotations

from pathlib import Path

from baton.error_help import CODE_BY_ERROR, HELP

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
_HEAD = """# Errors

Every refusal and failure has a code that does not change between versions. A client finds it as `code` in the error
of an answer, an operator at the end of a command's `error:` line, in the log, as the label of
`baton:router_handoff_failures`, and on the [dashboard](operations.md#the-dashboard). Reasons of handoffs are seen by
clients only if the request could not be recovered. `python -m tools.error_table` writes this page from
`baton/error_help.py`; a test walks the tree of `baton/errors.py`.

| code | HTTP status, or where | cause | cure |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [f"| `{code}` | {told.where} | {told.cause} | {told.cure} |" for code, told in HELP.items()]
    names = ", ".join(f"`{kind.__name__}` {code}" for kind, code in CODE_BY_ERROR.items())
    return f"{_HEAD}{chr(10).join(rows)}\n\nCodes of exceptions in Python: {names}.\n"


if __name__ == "__main__":
    PAGE.write_text(page())
