"""`BATON_SGLANG_CONFIG`: errors in it are reported at start, by name."""

from __future__ import annotations

import json

import pytest

from baton.errors import ConfigError
from baton.sglang.config import VARIABLE, read_config

GIVEN = {"engine_id": "P", "keys": "keys"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", f"{VARIABLE}: is not JSON"),
        ("[]", f"{VARIABLE}: must be a JSON object"),
        ('{"keys": "a", "engine_id": "P", "keys": "b"}', f"{VARIABLE}: has keys twice"),
        ('{"keys": "keys"}', "missing required field `engine_id`"),
        (json.dumps(GIVEN | {"engine_id": ""}), rf"{VARIABLE}\.engine_id: "),
        (json.dumps(GIVEN | {"lease": 0}), rf"{VARIABLE}\.lease: "),
        (json.dumps(GIVEN | {"leases": 5}), rf"{VARIABLE}\.leases: is unknown; known: .*\blease\b"),
        (json.dumps(GIVEN | {"kv_transport": "shm"}), "kv_transport: shm:// cannot move SGLang's memory"),
    ],
)
def test_a_bad_setting_is_named(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_config({VARIABLE: text})


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}: is not set"):
        read_config({})
    assert read_config({VARIABLE: json.dumps(GIVEN)}).engine_id == "P"
