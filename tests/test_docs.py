"""Everything that the documents name exists: commands, options, make targets, modules, names, files and links."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import baton.cli
from baton.error_help import HELP
from baton.handoff.protocol.frames import PROTOCOL_VERSION
from baton.kv.interval import Kind
from baton.router.config.policy_config import PolicyConfig
from baton.router.config.router_settings import RoutingSettings
from baton.router.policies import POLICIES
from baton.router.routes import WHYS
from baton.setting import declared_settings
from baton.testing.transport_suite import check_names
from simulation.mutations import MUTATIONS
from simulation.settings import FAULTS
from tests.router.test_spans import DOCUMENTED as DOCUMENTED_SPANS
from tests.test_structure import COMMON, ROOMS, room_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / name
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results/README.md")
] + sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*/README.md")])
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
MODULE = re.compile(r"\b(?:python3?|\.venv/bin/python) -m ([\w.]+)")
TARGET = re.compile(r"^\s*make ([\w-]+)", re.MULTILINE)
DOTTED = re.compile(r"\b((?:baton|simulation|benchmarks|testkit|tools|tests)(?:\.\w+)+)(?![\w/])")
FILE = re.compile(r"^[\w./-]+\.(?:py|md|sh|txt|toml)$")
FOLDER = re.compile(r"^(?:src|tests|docs|examples|tools|models|simulation|benchmarks|testkit|baton)/[\w./-]+$")
CLASS = re.compile(r"^[A-Z][a-z]+(?:[A-Z][a-z0-9]+)+(?:\.\w+)*$")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STRUCTURE = (ROOT / "docs/structure.md").read_text()
SNAKE = re.compile(r"^[a-z]+(?:_[a-z0-9]+)+$")
STEP = re.compile(r"^([\w/]+\.py):([\w.]+)$")
PATTERN = re.compile(r"^([\w/]+/)<(\w+)>(\.\w+)$")
# A file of each pattern has one of these names in place of <...>.
EXAMPLES = {
    "model_type": {"llama"},
    "method": {"eagle3"},
    "scheme": {"shm", "nixl"},
    "name": {"least_loaded", "vllm_nixl", "triton", "hermes", "doctor"},
}
TREES = ("src", "simulation", "benchmarks", "testkit", "tests", "tools", "examples")
# `docs/errors.md` comes from it.
ERROR_HELP = ROOT / "src/baton/error_help.py"
# Names of spans and of their attributes.
SPANS = {"baton.handoff_transfer", *DOCUMENTED_SPANS, *(name for names in DOCUMENTED_SPANS.values() for name in names)}
# Programs of others.
ELSEWHERE = {"pip", "pytest", "venv", "vllm.entrypoints.openai.api_server"}
# In examples of commands these stand for other things than files or modules.
NOT_OURS = {"config.json", "tokenizer.json", "baton.transports"}


def fences(text: str) -> str:
    """The fenced blocks, with continued lines joined."""
    return "\n".join(FENCE.findall(text)).replace("\\\n", " ")


def spans(text: str) -> list[str]:
    """The inline code outside of fenced blocks."""
    return SPAN.findall(FENCE.sub("", text))


def code(text: str) -> str:
    return "\n".join([fences(text), *spans(text)])


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def text(request: pytest.FixtureRequest) -> str:
    return str(request.param.read_text())


def test_documents_name_what_is_looked_for() -> None:
    """A pattern that no longer matches would let each test below pass."""
    texts = [path.read_text() for path in DOCUMENTS]
    found = {
        "modules": sum(len(MODULE.findall(code(text))) for text in texts),
        "commands": sum(len(list(commands(text))) for text in texts),
        "targets": sum(len(TARGET.findall(code(text))) for text in texts),
        "dotted names": sum(len(DOTTED.findall(code(text))) for text in texts),
        "files": sum(bool(FILE.match(span) or FOLDER.match(span)) for text in texts for span in spans(text)),
        "patterns of files": sum(bool(PATTERN.match(span)) for text in texts for span in spans(text)),
        "links": sum(len(LINK.findall(text)) for text in texts),
    }
    assert min(found.values()) >= 5, found


def test_modules_that_are_run_exist(text: str) -> None:
    for name in MODULE.findall(code(text)):
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        if name in ELSEWHERE:
            continue
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{name}.__main__"), f"{name} is a package that cannot be run"
        else:
            assert spec.origin is not None
            assert "__main__" in Path(spec.origin).read_text(), f"{name} does nothing when it is run"


def test_the_flags_of_modules_exist(text: str) -> None:
    check_flags(code(text))


def test_commands_in_docstrings_and_examples_exist() -> None:
    """Those that `tools`, `benchmarks` and the others say of themselves."""
    trees = [path for tree in TREES if tree not in ("src", "tests") for path in (ROOT / tree).rglob("*")]
    said = "\n".join(ast.get_docstring(ast.parse(path.read_text())) or "" for path in trees if path.suffix == ".py")
    said += "\n".join(path.read_text() for path in trees if path.suffix in (".sh", ".yaml", ".toml", ".service"))
    names = {name.rstrip(".") for name in MODULE.findall(said)} - ELSEWHERE
    assert len(names) > 80
    assert [name for name in names if importlib.util.find_spec(name) is None] == []
    check_flags(said)


def check_flags(commands: str) -> None:
    for line in commands.splitlines():
        for name, rest in re.findall(r"\b(?:python3?|\.venv/bin/python) -m ([\w.]+\w)([^#)`]*)", line):
            given = set(re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", rest))
            if not given or name in ELSEWHERE:
                continue
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            file = Path(spec.origin)
            is_package = spec.submodule_search_locations is not None
            files = {*(file.parent.rglob("*.py") if is_package else [file]), *file.parent.glob("runs.py")}
            source = "\n".join(path.read_text() for path in files)
            missing = {flag for flag in given if not re.search(rf"[\"']{flag}[\"']|\b{snake(flag)}: ", source)}
            assert missing == set(), name


def snake(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command line that begins with `baton`."""
    for line in code(text).splitlines():
        words = line.split(" #")[0].split()
        if words[:1] == ["baton"] and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            yield words[1:]


def test_commands_and_their_options_exist(text: str) -> None:
    app = typer.main.get_command(baton.cli.app)
    for words in commands(text):
        command: Any = app
        rest = list(words)
        while hasattr(command, "commands") and rest and re.fullmatch(r"[a-z]+", rest[0]):
            assert rest[0] in command.commands, f"there is no command baton {' '.join(words)}"
            command = command.commands[rest.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        given = {word.split("=")[0] for word in rest if re.fullmatch(r"--[a-z-]+(?:=.*)?", word)}
        if not hasattr(command, "commands"):
            assert given <= known, f"baton {command.name} has no {given - known}"


def test_commands_are_accepted_with_their_values(text: str) -> None:
    app: Any = typer.main.get_command(baton.cli.app)
    lines = [line.removeprefix("$ ") for line in fences(text).splitlines()]
    for words in (shlex.split(line, comments=True) for line in lines if line.startswith("baton ")):
        command, rest = app, [word for word in words[1:] if word != "..."]
        while hasattr(command, "commands") and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        command.make_context(command.name, rest)


def test_make_targets_exist(text: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(code(text))) <= targets


def test_dotted_names_exist(text: str) -> None:
    for name in DOTTED.findall(code(text)):
        if name not in NOT_OURS | SPANS and not (ROOT / name).exists():
            assert resolves(name), name


def resolves(name: str) -> bool:
    """True for the name of a module or of its member. Only modules of the plug-in are looked up."""
    module, _, attribute = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        return False
    return hasattr(importlib.import_module(module), attribute)


def test_files_exist(text: str) -> None:
    """A path may omit its beginning."""
    missing = []
    for span in spans(text):
        word = span.rstrip("/")
        named = word not in NOT_OURS and (FILE.match(word) or FOLDER.match(word))
        if named and not (ROOT / word).exists() and not any(path.endswith(f"/{word}") for path in paths()):
            missing.append(span)
    assert not missing


@functools.cache
def paths() -> list[str]:
    return [f"/{path.relative_to(ROOT)}" for tree in TREES for path in (ROOT / tree).rglob("*")]


def test_patterns_of_files_match_some(text: str) -> None:
    """A pattern may omit the beginning of the path."""
    for folder, kind, suffix in (found.groups() for span in spans(text) if (found := PATTERN.match(span))):
        files = {f"/{folder}{name}{suffix}" for name in EXAMPLES[kind]}
        assert any(str(path).endswith(tuple(files)) for path in (ROOT / "src").rglob(f"*{suffix}")), files


def test_the_modules_inside_the_rooms_are_there() -> None:
    table = (ROOT / "docs/structure.md").read_text().split("## Inside the rooms")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for where, what in rows:
        folders = [ROOT / "src/baton" / name for name in re.findall(r"`([a-z_/]+)/`", where)]
        files = [path for folder in folders for path in (*folder.rglob("*"), *folder.parent.glob("*.py"))]
        known = {path.stem for path in files} | {"model_type", "auto"}
        assert [name for name in re.findall(r"`([a-z_]+)(?:\.py)?`", what) if name not in known] == [], where


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(page for tree in ("docs", "models", *TREES) for page in (ROOT / tree).rglob("*.md"))]
    links = [(page, link) for page in pages for link in LINK.findall(FENCE.sub("", page.read_text()))]
    assert len(links) > 200
    assert [(page.name, link) for page, link in links if not _leads(page, *link)] == []


def _leads(page: Path, path: str, heading: str) -> bool:
    """`heading`: as in a link, in lower case with hyphens."""
    if "://" in path:
        return True
    target = page.parent / path if path else page
    if not heading or target.suffix != ".md":
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\nnot_in_nav:")[0]
    pages = re.findall(r"[\w/-]+\.md", navigation)
    assert len(pages) == len(set(pages))
    assert {ROOT / page for page in pages} == {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")}


@functools.cache
def words_of_the_code() -> set[str]:
    files = {path for tree in TREES for path in (ROOT / tree).rglob("*.py")} - {ERROR_HELP}
    return {*re.findall(r"\w+", "\n".join(path.read_text() for path in files)), *HELP, *MUTATIONS, *check_names()}


def test_names_exist(text: str) -> None:
    """Classes and names with underscores, including those of vLLM: they must occur in the code."""
    words = words_of_the_code()
    named = {word for span in spans(text) if CLASS.match(span) or SNAKE.match(span) for word in span.split(".")}
    assert named <= words, named - words


def test_the_checks_and_mutations_of_the_tables_are_all() -> None:
    table = re.findall(r"^\| `(\w+)`(?: \*)? \| .* \| \d+ \| ", (ROOT / "docs/simulation.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(MUTATIONS)
    page = (ROOT / "docs/transports.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, re.MULTILINE)[-len(check_names()) :] == check_names()


def first_cells(page: str, section: str) -> list[str]:
    """The code in the first column of a section's tables."""
    rows = (ROOT / page).read_text().split(section)[1].split("\n#")[0].splitlines()
    return [name for row in rows if row.startswith("| `") for name in SPAN.findall(row.split("|")[1])]


def test_the_tables_of_the_router_are_complete() -> None:
    named = set(first_cells("docs/router.md", "## How engines are chosen"))
    assert named == {*POLICIES, *PolicyConfig.__struct_fields__} - {"tenants"}
    assert set(first_cells("docs/router.md", "## Where a request runs")) == set(WHYS)
    assert all(name in declared_settings(RoutingSettings)["policy"].setting.help for name in POLICIES)


def test_the_table_of_caches_has_every_kind() -> None:
    assert set(get_args(Kind)) <= set(first_cells("docs/lifecycle.md", "## Kinds of cache"))


def test_the_tables_of_the_simulator_are_complete() -> None:
    source = "\n".join(path.read_text() for path in ROOT.glob("simulation/**/*.py"))
    broken = set(re.findall(r"(?:\.fail|Violation)\(\s*\"([a-z_]+)\"", source))
    named = set(first_cells("docs/simulation.md", "## Invariants"))
    assert broken <= named
    assert [name for name in named if f'"{name}"' not in source] == []
    assert set(first_cells("docs/simulation.md", "## Faults")) == set(FAULTS)


def test_the_table_of_the_doctor_has_all_findings() -> None:
    source = "\n".join(path.read_text() for path in ROOT.glob("src/baton/doctor/*.py"))
    page = (ROOT / "docs/operations.md").read_text().split("| it looks at | findings |")[1].split("\n\n")[0]
    found = set(re.findall(r"(?:Finding|Problem)\(\s*\"([a-z_]+)\"", source)) - {"version"}
    assert found <= set(SPAN.findall(page))


def test_the_changelog_names_the_version_of_the_protocol() -> None:
    assert f"; version {PROTOCOL_VERSION} of [the protocol]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_metric_is_documented() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src/baton").rglob("*.py"))
    names = set(re.findall(r"\b(?:counter|gauge|histogram)\(\s*\"([a-z_]+)\"", source))
    assert len(names) > 60
    pages = "\n".join(path.read_text() for path in ROOT.glob("docs/*.md"))
    assert sorted(names - set(re.findall(r"\w+", pages))) == []


def test_the_lines_of_plug_ins_are_about_as_stated() -> None:
    page = (ROOT / "docs/sglang.md").read_text().split("## What an engine costs\n")[1].split("\n## ")[0]
    stated = [int(number.replace(",", "")) for number in re.findall(r"\b\d[\d,]{2,}\b", page)]
    router = ("router/clients/sglang_client.py", "router/connectors/sglang.py")
    places = [("sglang",), ("vllm",), router, ("plugin_base",), ("handoff", "transports", "kv")]
    counted = [sum(num_lines(ROOT / "src/baton" / name) for name in names) for names in places]
    assert stated == pytest.approx(counted, rel=0.05)


def num_lines(path: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in ([path] if path.is_file() else path.rglob("*.py")))


def test_each_alarm_of_the_table_is_a_rule() -> None:
    page = (ROOT / "docs/operations.md").read_text().split("| alarm on | because |")[1].split("\n\n")[0]
    rules = (ROOT / "examples/observability/alerts.yaml").read_text()
    asked = {name.removesuffix("_total") for name in re.findall(r"baton:\w+", rules)}
    rows = [set(re.findall(r"`(baton:\w+)", row.split("|")[1])) for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) > 10
    assert set().union(*rows) == asked


def test_the_rooms_of_the_picture_are_those_that_imports_keep_to() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([^|]+) \|$", STRUCTURE, re.MULTILINE)
    assert [name for name, _ in rows] == list(ROOMS)
    for name, imports in rows:
        assert set(SPAN.findall(imports)) == ROOMS[name], name
    everywhere = re.search(r"^All rooms may import [^:]*: (.*?)\n\n", STRUCTURE, re.MULTILINE | re.DOTALL)
    assert everywhere is not None
    assert {name for name in SPAN.findall(everywhere[1]) if name.startswith("baton.")} == COMMON


def test_the_functions_on_a_request_s_way_exist() -> None:
    steps = steps_of(STRUCTURE)
    assert len(steps) > 30
    for file, name in (step.groups() for step in steps):
        assert name in defined(ROOT / "src/baton" / file), f"{file}:{name}"


@pytest.mark.parametrize("document", ["structure.md", "protocol.md"])
def test_the_house_holds_what_its_plans_name(document: str) -> None:
    """Packages, functions, classes, fields and values, alone, as `Class.member` or with arguments."""
    names, members = names_and_members()
    text = (ROOT / "docs" / document).read_text()
    spoken = [match[1] for span in spans(text) if (match := re.match(r"([A-Za-z_][\w.]*)(?:\(.*\))?$", span))]
    for name in {name for name in spoken if CLASS.match(name) or SNAKE.match(name)}:
        assert name in (members if "." in name else names), name


@functools.cache
def names_and_members() -> tuple[set[str], set[str]]:
    """Of all packages and modules; members as `Class.member`."""
    names = {path.parent.name for path in (ROOT / "src/baton").rglob("__init__.py")}
    members: set[str] = set()
    for path in (ROOT / "src/baton").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
            if isinstance(node, ast.ClassDef):
                members |= {f"{node.name}.{name}" for name in members_of(node)}
    return names, members


def members_of(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, FUNCTIONS):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def defined(path: Path) -> set[str]:
    """The functions and classes of a module, and the methods of its classes as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS)}
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            names.add(node.name)
    return names


def test_the_rooms_and_climbs_of_each_way_are_counted_right() -> None:
    ways = re.split(r"^## The way of one request: ", STRUCTURE, flags=re.MULTILINE)[1:]
    counts = {"Eight": 8, "Nine": 9, "Ten": 10, "Eleven": 11, "four": 4, "five": 5, "six": 6}
    assert len(ways) == 2
    for way in ways:
        text = way.partition("\n## ")[0]
        stated = re.search(r"^(\w+) rooms \(([^)]+)\)\s+and (\w+) climbs", text, re.MULTILINE)
        assert stated is not None
        rooms = SPAN.findall(stated[2])
        assert counts[stated[1]] == len(rooms) == len(set(rooms))
        assert set(rooms) <= set(ROOMS)
        climbs = re.findall(r"\*\*Climb (\d)\*\*,\s+from\s+`([\w.]+)`\s+to\s+`([\w.]+)`", text)
        assert [int(number) for number, _, _ in climbs] == list(range(1, counts[stated[3]] + 1))
        for _, lower, upper in climbs:
            assert lower in ROOMS[upper], f"{upper} does not import {lower}"
        passed = {room_of("baton." + match[1].removesuffix(".py").replace("/", ".")) for match in steps_of(text)}
        assert passed | {upper for _, _, upper in climbs} <= set(rooms)


def steps_of(text: str) -> list[re.Match[str]]:
    return [match for span in spans(text) if (match := STEP.match(span))]


def test_no_docstring_says_only_where_another_is() -> None:
    """A docstring that repeats an interface's is omitted: it belongs to the interface."""
    found = [
        f"{path}:{node.lineno}"
        for path in [*(ROOT / "src/baton").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
        if "See `" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.ClassDef, *FUNCTIONS))
        and re.fullmatch(r"See `[^`]+`\.", (ast.get_docstring(node) or "").strip())
    ]
    assert found == []
