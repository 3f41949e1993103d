"""Each planted misconfiguration is found by its name, with the server, both values and what to do; a healthy one has
no finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.comparison import PROCESSOR
from baton.doctor.checkup import BOTH, Finding, Host, Problem, Reading, RouterEntry, Server
from baton.doctor.diagnose import findings_of
from baton.doctor.key_checks import check_keys
from baton.doctor.report import checkup_json, format_checkup
from baton.handoff.session.keys import make_keys
from baton.wire import EngineIdentity
from tests.doctor.healthy import (
    ROUTER,
    D,
    P,
    addresses,
    checkup,
    engine,
    facts,
    identity,
    settings,
    sglang,
    vllm,
)

AFAR = (Reading(100.0, 5000.0, 0.001), Reading(101.0, 5001.0, 0.001))
DRIFTS = (Reading(100.0, 100.0, 0.001), Reading(110.0, 105.0, 0.001))


def spoken(url: str, version: int) -> EngineIdentity:
    """The identity of a healthy engine, which speaks this version of the handoff protocol."""
    known = engine(url, "prefill" if url == P else "decode").identity
    return msgspec.structs.replace(known, protocol=version)  # type: ignore[type-var]


# Name of the finding -> what is changed, where it is found, and words of its line.
PLANTED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "unreachable": ({"d": {"problem": Problem("unreachable", "refused")}}, D, ("refused",)),
    "unhealthy": ({"d": {"problem": Problem("unhealthy", "HTTP 503: stalled")}}, D, ("stalled",)),
    "api_key": ({"d": {"problem": Problem("api_key", "HTTP 401: a key")}}, D, ("--api-key",)),
    "not_an_engine": ({"d": {"problem": Problem("not_an_engine", "nginx")}}, D, ("nginx",)),
    "draining": ({"router": {"engines": (RouterEntry(url=D, role="decode", draining=True),)}, "p": engine(D, "decode"),
                  "trial": None}, D, ("true",)),
    "version": ({"d": settings(version="0.2.0")}, D, ("'0.2.0'", "'0.1.0'")),
    "protocol": ({"p": {"identity": spoken(P, 8)}, "d": {"identity": spoken(D, 9)}}, D, ("9", "8", "one version")),
    "model.weights": ({"d": facts(model_weights="b")}, D, ("'b'", "'a'", "checkpoint")),
    "model.dtype": ({"d": facts(model_dtype="float32")}, D, ("float32", "bfloat16", "--dtype")),
    "output.sampling_defaults": ({"d": facts(output_sampling_defaults="top_p 0.9")}, D, ("top_p 0.9", "''")),
    "output.first_step": ({"d": facts(output_first_step="verify")}, D, ("'verify'", "kv_connector_extra_config")),
    "drafter.method": ({"d": facts(drafter_method="mtp")}, D, ("'mtp'", "'eagle3'")),
    "drafter.num_speculative_tokens": ({"d": facts(drafter_num_speculative_tokens="5")}, D, ("'5'", "'3'")),
    "drafter.verifier": ({"d": facts(drafter_verifier="rejection")}, D, ("rejection", "coupled")),
    "group.target.full": ({"d": facts(**{"group_target.full": "('mla',)"})}, D, ("mla", "layouts")),
    "max_model_len": ({"d": settings(max_model_len="2048")}, D, ("2048", "4096")),
    "served_model_name": ({"d": settings(served_model_name="other")}, D, ("other", "demo")),
    "seed": ({"d": settings(seed="7")}, D, ("'7'", "--seed")),
    "kv_transport": ({"d": settings(kv_transport="nixl UCX")}, D, ("nixl UCX", "shm")),
    "cache_dtype": ({"d": settings(cache_dtype="float32")}, D, ("float32", "--kv-cache-dtype")),
    "engine_id": ({"d": {"identity": identity("prefill-0", 9102)}}, D, ("'prefill-0'", P)),
    "control_bind": ({"d": addresses()}, D, ("empty", "--keys")),
    "control_unreachable": ({"d": {"unreached": ("tcp://10.0.0.2:7",)}}, D, ("tcp://10.0.0.2:7", "port")),
    "clock": ({"d": {"clocks": DRIFTS}}, D, ("5.000 s", "10.000 s")),
    "role": ({"router": {"engines": (RouterEntry(url=P, role="prefill"), RouterEntry(url=D, role="both"))}}, D,
             ("decode", "both")),
    "token_api": ({"d": {"token_api": False}}, D, ("--token-api",)),
    "router_engine": ({"router": {"engines": (RouterEntry(url=P, role="prefill"),
                                              RouterEntry(url=D, role="decode", problem="draft"))}}, D, ("draft",)),
    "not_joined": ({"router": {"engines": (RouterEntry(url=P, role="prefill"),)}, "trial": None}, D, (P, "--decode")),
    "not_ready": ({"router": {"ready": False}, "trial": None}, ROUTER, ("false",)),
    "not_handed_off": ({"trial": {"handoffs": {}, "decisions": {"short": 1}}}, ROUTER, ("short 1",)),
    "handoff_failed": ({"trial": {"failures": {"handoff_timeout": 1}}}, ROUTER, ("handoff_timeout", "ports")),
    "nofile": ({"host": Host(num_files=256)}, "this host", ("256", "1024", "ulimit -n")),
    "shm": ({"host": Host(num_files=4096, shm_bytes=64 * 2**20)}, "this host", ("64 MiB", "--shm-size")),
    "memlock": ({"host": Host(num_files=4096, memlock=8 * 2**20, rdma=("mlx5_0",)),
                 "p": {"settings": {**settings()["settings"], "kv_transport": "nixl"}},
                 "d": {"settings": {**settings()["settings"], "kv_transport": "nixl"}}},
                "this host", ("8192 KiB", "mlx5_0", "unlimited")),
}  # fmt: skip

# The same for servers of other makes, which hand off without a Baton router.
OTHERS: dict[str, tuple[tuple[Server, ...], str, tuple[str, ...]]] = {
    "no_prefill": ((vllm(P, "decode"), vllm(D, "decode")), P, ("decode", "prefill")),
    "no_decode": ((sglang(P, "prefill"), sglang(D, "prefill")), P, ("prefill",)),
    "mixed_engines": ((engine(P, "prefill"), vllm(D, "decode")), D, ("vllm", "baton")),
    "connector": ((vllm(P, "prefill"), Server(url=D, kind="vllm", roles=BOTH)), D, ("kv_transfer_config",)),
    "block_size": ((vllm(P, "prefill"), vllm(D, "decode", block_size="32")), D, ("'32'", "'16'")),
    "nixl_backends": ((vllm(P, "prefill"), vllm(D, "decode", nixl_backends="['LIBFABRIC']")), D, ("LIBFABRIC", "UCX")),
    "sampling_defaults": (
        (vllm(P, "prefill", sampling_defaults="none"), vllm(D, "decode", sampling_defaults="top_k 5")),
        D,
        ("top_k 5", "none"),
    ),
    "page_size": ((sglang(P, "prefill"), sglang(D, "decode", page_size="16")), D, ("'16'", "'64'")),
    "speculative_algorithm": (
        (sglang(P, "prefill"), sglang(D, "decode", speculative_algorithm="NEXTN")),
        D,
        ("NEXTN", "EAGLE3"),
    ),
    "disaggregation_mode": ((sglang(P, "prefill"), Server(url=D, kind="sglang", roles=())), D, ("null",)),
    "loopback": (
        (engine(P, "prefill"), engine("http://10.0.0.2:8102", "decode", clocks=AFAR)),
        P,
        ("127.0.0.1:9101", "10.0.0.2"),
    ),
}


def found_in(**changes: Any) -> list[Finding]:
    return findings_of(checkup(**changes))


def check(found: list[Finding], name: str, server: str, words: tuple[str, ...]) -> None:
    assert name in [finding.name for finding in found], found
    (line,) = {str(one) for one in found if (one.name, one.server) == (name, server)}
    assert line.startswith(f"{name}: {server}: ")
    assert all(word in line for word in words), line


def test_a_healthy_deployment_is_ready() -> None:
    healthy = checkup()
    assert findings_of(healthy) == []
    text = format_checkup(healthy, [])
    assert text.endswith("\nready")
    assert "handoff: 512 prompt tokens handed off: first token after 20.0 ms" in text
    assert "1,000 bytes of KV in 5 runs over shm" in text
    assert checkup_json(healthy, [])["ready"] is True


def test_other_processors_are_noted() -> None:
    mixed = checkup(
        p={"identity": identity("prefill-0", 9101, **{PROCESSOR: "sapphirerapids AVX512"})},
        d={"identity": identity("decode-0", 9102, **{PROCESSOR: "znver3 AVX2"})},
    )
    assert findings_of(mixed) == []
    text = format_checkup(mixed, [])
    assert f"note: {P} and {D}: 'sapphirerapids AVX512' and 'znver3 AVX2' may round differently" in text
    assert "--batch-invariant" in text


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_misconfiguration_is_found(name: str) -> None:
    changes, server, words = PLANTED[name]
    found = found_in(**changes)
    check(found, name, server, words)
    if name not in ("control_bind", "draining", "not_joined", "router_engine"):  # these have consequences
        assert {finding.name for finding in found} == {name}, found


@pytest.mark.parametrize("name", OTHERS)
def test_a_misconfiguration_of_other_servers_is_found(name: str) -> None:
    servers, server, words = OTHERS[name]
    check(found_in(servers=servers, router=None, trial=None), name, server, words)


def test_drafters_may_differ_where_the_policy_lets_them() -> None:
    own = {"drafter.kv": "recompute"}
    servers = (
        engine(P, "prefill", identity=identity("p", 1, **own)),
        engine(D, "decode", identity=identity("d", 2, **own, **{"drafter.method": "mtp"})),
    )
    assert not findings_of(checkup(servers=servers, router=None, trial=None))


def test_the_odd_one_of_three_is_named() -> None:
    odd = engine(P, "prefill", identity=identity("odd", 1, **{"model.dtype": "float32"}))
    others = [engine(f"http://127.0.0.1:820{i}", "decode", identity=identity(f"d{i}", i)) for i in (1, 2)]
    found = found_in(servers=(odd, *others), router=None, trial=None)
    assert [(one.name, one.server) for one in found] == [("model.dtype", P)]


def test_limits_of_this_host_do_not_matter_to_servers_elsewhere() -> None:
    servers = (engine("http://10.0.0.1:8101", "prefill"), engine("http://10.0.0.1:8102", "decode"))
    found = found_in(servers=servers, router=None, trial=None, host=Host(num_files=1, shm_bytes=1))
    assert found == []


def test_a_forwarded_port_is_another_host() -> None:
    """A loopback URL whose server has another clock leads to another machine, which has limits of its own."""
    far = engine(P, "prefill", clocks=AFAR)
    assert not far.is_here()


def test_a_wrong_ticket_key_is_named_as_the_cause() -> None:
    found = found_in(trial={"problem": "HTTP 503: no engine", "refused": {"ticket": 2}})
    check(found, "handoff_failed", ROUTER, ("no engine", "ticket key"))


def test_a_refused_leg_is_no_handoff() -> None:
    """A vLLM server computes the request itself, and the router counts a completed handoff."""
    tried = checkup(trial={"refused": {"leg": 1}})
    assert "512 prompt tokens not handed off" in format_checkup(tried, findings_of(tried))


def test_of_two_urls_of_one_server_one_is_too_many() -> None:
    d = engine(D, "decode")
    again = engine("http://localhost:8102", "decode")
    found = found_in(servers=(engine(P, "prefill"), d, again))
    check(found, "engine_id", "http://localhost:8102", (D, "the same process"))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda root: (root / "ticket.key").chmod(0o644), ("ticket.key", "chmod go-rwx")),
        (lambda root: (root / "ticket.key").unlink(), ("does not exist",)),
        (lambda root: (root / "secret" / "decode-0.key").chmod(0o640), ("decode-0.key", "engine decode-0")),
        (lambda root: (root / "public").chmod(0o777), ("public", "chmod go-w")),
        (lambda root: (root / "public" / "decode-0.pub").unlink(), ("decode-0", "does not belong")),
        (lambda root: (root / "public" / "prefill-0.pub").write_text("x"), ("prefill-0.pub", "CURVE key")),
    ],
)
def test_a_bad_key_directory_is_found(tmp_path: Path, plant: Any, words: tuple[str, ...]) -> None:
    root = tmp_path / "keys"
    make_keys(root, ["prefill-0", "decode-0"])
    servers = (engine(P, "prefill"), engine(D, "decode"))
    assert list(check_keys(str(root), servers)) == []
    plant(root)
    lines = [str(finding) for finding in check_keys(str(root), servers) if finding.name == "keys"]
    assert any(all(word in line for word in words) for line in lines), lines


def test_an_engine_without_a_key_is_found(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["prefill-0"])
    (finding,) = check_keys(str(tmp_path / "keys"), (engine(P, "prefill"), engine(D, "decode")))
    assert (finding.name, finding.server, finding.value) == ("keys", D, "'decode-0'")
