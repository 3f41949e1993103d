"""`python -m tools.settings_table` writes the settings of engines and routers into docs/reference/settings.md.

A test compares the file with the declarations.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from baton.cli.flag_sources import FLAG_VARIABLES
from baton.engine.config import ServingSettings, declared_settings
from baton.router.config.router_settings import RouterSettings
from baton.setting import DeclaredSetting

DOC = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
_HEAD = """# Settings of an engine

What `baton serve`, `baton up`, `baton generate` and `baton.LLM` take. A setting is a flag, a variable, a key of the
file given with `--config`, and an argument of `baton.LLM`; the flag wins over the variable, and the variable over the
file. An unknown name is an error that names it. `python -m tools.settings_table` writes this page from
`engine/config/settings.py`, where each setting is declared once.

| flag | key, argument | type | default | must be | |
|---|---|---|---|---|---|
"""
_ROUTER = """# Settings of a router

What `baton router` takes, besides engines and the flags of a server; `baton up` takes those that do not depend on
running engines. They are declared in `router/config/router_settings.py`.

| flag | key | type | default | must be | |
|---|---|---|---|---|---|
"""


def table() -> str:
    """The whole page."""
    engine, router = _rows(ServingSettings), _rows(RouterSettings)
    variable = f"The variable of a key is `{FLAG_VARIABLES}` and the key in capitals."
    return f"{_HEAD}{engine}\n\n{variable}\n\n{_ROUTER}{router}\n"


def _rows(kind: type) -> str:
    return "\n".join(_row(one) for one in declared_settings(kind).values())


def _row(one: DeclaredSetting) -> str:
    setting = one.setting
    flag = f"`{one.flag}`" if setting.short is None else f"`{one.flag}`, `{setting.short}`"
    rule = setting.rule.words if setting.rule is not None else ", ".join(get_args(one.type)) if _is_choice(one) else ""
    default = "" if one.default is None else f"`{one.default}`"
    cells = (flag, f"`{one.name}`", _type(one.type), default, rule, setting.help.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def _is_choice(one: DeclaredSetting) -> bool:
    return get_origin(one.type) is Literal


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "text"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(kind) if part is not type(None))
    return {"str": "text", "bool": "switch", "int": "integer", "float": "number"}.get(kind.__name__, "JSON")


if __name__ == "__main__":
    DOC.write_text(table())
