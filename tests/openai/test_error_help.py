"""Every error of the tree, and every reason, has a stable code, a cause and a cure, and clients get the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from baton import errors
from baton.error_help import CODE_BY_ERROR, CODE_BY_STATUS, HELP, code_of
from baton.openai.http.api_errors import to_api_error
from baton.router.attempts.join import TokenMismatch
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served
from tools.error_table import PAGE, page


def tree(kind: type[errors.BatonError] = errors.BatonError) -> Iterator[type[errors.BatonError]]:
    """The classes of `baton.errors`, and those below them that have no name of their own for clients."""
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def made(kind: type[errors.BatonError]) -> errors.BatonError:
    if issubclass(kind, errors.ConfigError):
        return errors.ConfigError("field", "is wrong")
    if issubclass(kind, errors.IncompatiblePeerError):
        return errors.IncompatiblePeerError({"field": (1, 2)})
    if issubclass(kind, errors.UndefinedTransitionError):
        return errors.UndefinedTransitionError("machine", "phase", "event", [])
    if issubclass(kind, errors.HandoffError):
        return errors.HandoffError("no_room", "full")
    return kind("it failed")


def test_every_class_of_the_tree_has_a_code() -> None:
    own = [kind for kind in tree() if kind.__module__ == errors.__name__]
    assert set(own) == set(CODE_BY_ERROR)
    assert all(code in HELP for code in CODE_BY_ERROR.values())


def test_no_other_module_adds_a_code() -> None:
    """Classes outside of `baton.errors` have the code of their parent, or one of the reasons."""
    for kind in tree():
        if kind.__module__ != errors.__name__:
            assert kind not in CODE_BY_ERROR
    assert code_of(TokenMismatch(0, 1, 2)) in errors.REASONS


def test_every_reason_has_a_cause_and_a_cure() -> None:
    assert set(HELP) >= errors.REASONS
    known = errors.REASONS | set(CODE_BY_ERROR.values()) | set(CODE_BY_STATUS.values())
    assert set(HELP) == known, "no row is for a code that does not exist"
    for code, told in HELP.items():
        for text in (told.cause, told.cure):
            assert text, code
            assert "\n" not in text, code
            assert not text.endswith("."), code


@pytest.mark.parametrize("kind", sorted(CODE_BY_ERROR, key=lambda kind: kind.__name__))
def test_clients_get_the_code(kind: type[errors.BatonError]) -> None:
    error = made(kind)
    told = to_api_error(error)
    assert told.code == code_of(error)
    assert told.code in HELP
    assert str(told.status) in HELP[told.code].where or not HELP[told.code].where[0].isdigit()


# What takes a reason as its first argument, in the protocol, its agents and its errors.
REASONED = {"HandoffError", "DecodeFailed", "Fault", "Abort", "_fail"}


def given_reasons() -> set[str]:
    """All that the package's code names as a text."""
    found = set()
    for file in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                found |= {node.args[0].value} if name in REASONED else set()
    return found


def test_every_reason_that_the_package_gives_is_known() -> None:
    given = given_reasons()
    assert {"agent_lost", "superseded", "incomplete_commit", "register_refused"} <= given
    assert given <= errors.REASONS


def test_every_refusal_that_aiohttp_makes_for_the_package_has_a_code() -> None:
    raised = {
        found
        for file in Path(errors.__file__).parent.rglob("*.py")
        for found in re.findall(r"raise web\.(HTTP\w+)", file.read_text())
    }
    assert len(raised) > 2
    assert {getattr(web, name).status_code for name in raised} <= set(CODE_BY_STATUS)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m tools.error_table"


async def test_refusals_by_http_have_codes_too(directory: Path) -> None:
    app = build_app(FakeEngine(directory), Tokenizer.load(directory))  # type: ignore[arg-type]
    async with served(app) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health", headers={"Expect": "miracles"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (417, "expectation_failed")
        for method, path, body, code in (
            ("GET", "/nothing", None, "not_found"),
            ("GET", "/v1/completions", None, "method_not_allowed"),
            ("POST", "/v1/completions", "{", "invalid_request"),
            ("POST", "/v1/completions", '{"prompt": "a", "temperature": -1}', "invalid_request"),
            ("POST", "/v1/completions", '{"prompt": "a", "model": "b"}', "model_not_found"),
        ):
            async with session.request(method, url + path, data=body) as response:
                assert (await response.json())["error"]["code"] == code
