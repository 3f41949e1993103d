"""What `testkit.vllm.misconfigured` plants: decode servers that are wrong, and a healthy pair that is asked or routed
wrongly.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from baton.handoff.session.keys import make_keys
from benchmarks.vllm import servers
from benchmarks.vllm.servers import ONE_PROCESS, ServerConfig, free_port
from testkit.vllm.servers import EAGLE3, MODEL

# A module that vLLM's own would load; the real one's file stays as it is.
_OLDER = """
import sys, types
sys.modules["vllm._version"] = found = types.ModuleType("vllm._version")
found.__version__ = found.version = "0.31.0"
found.__version_tuple__ = found.version_tuple = (0, 31, 0)
"""
ENGINES = ("P", "D")
# Without a drafter, or with another, these differ too.
WITHOUT_DRAFTER = ("num_speculative_tokens", "output.first_step", "group.draft", "drafter.weights")


@dataclass(frozen=True, slots=True)
class Wrong:
    """A decode server. `faults`: what is wrong with it -> the finding's name. `follows`: beginnings of names that are
    found because of them. `transfer`, `extra`: changes of its `kv_transfer_config` and of the connector's own settings;
    `transfer` None: it has no connector. `python_path`: what it loads first. `routed`: a handoff is tried. `api_key`:
    the key that its clients need.
    """

    faults: Mapping[str, str]
    follows: tuple[str, ...] = ()
    flags: Sequence[str] = ()
    spec: Mapping[str, Any] | None = field(default_factory=lambda: EAGLE3)
    transfer: Mapping[str, Any] | None = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    python_path: Path | None = None
    routed: bool = False
    api_key: str | None = None

    def config(self, name: str, folder: Path, port: int) -> ServerConfig:
        """At `port`."""
        flags = [*ONE_PROCESS, "--port", str(port), *self.flags]
        if self.spec is not None:
            flags += ["--speculative-config", json.dumps(self.spec)]
        if self.api_key is not None:
            flags += ["--api-key", self.api_key]
        transfer = None
        if self.transfer is not None:
            transfer = {
                "kv_connector": "BatonConnector",
                "kv_connector_module_path": "baton.vllm",
                "kv_role": "kv_consumer",
                "engine_id": "D",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"keys": str(folder / "keys"), **self.extra},
                **self.transfer,
            }
        paths = [self.python_path, servers.ENVIRONMENT.get("PYTHONPATH")]
        environment = {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        return ServerConfig(name, flags, transfer, environment)


def altered(source: Path, folder: Path) -> str:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if weights[name].is_floating_point())
    weights[name] = weights[name] * 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def wrong_servers(folder: Path) -> dict[str, Wrong]:
    """By a name for the server. Makes in `folder` what they need; none of them starts without it."""
    make_keys(folder / "keys", ENGINES)
    make_keys(folder / "others", [*ENGINES, "E"])
    (folder / "older").mkdir()
    (folder / "older" / "sitecustomize.py").write_text(_OLDER)
    others = {"keys": str(folder / "others")}
    drafter = {"model": altered(Path(EAGLE3["model"]), folder / "drafter"), "num_speculative_tokens": 2}
    draft_model = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
    return {
        "NIXL's": Wrong(
            {"another connector": "connector"},
            ("block_size",),
            transfer={"kv_connector": "NixlConnector", "kv_connector_module_path": "benchmarks.vllm.peers"},
        ),
        "alone": Wrong({"no connector": "connector"}, ("block_size",), transfer=None),
        "closed": Wrong({"a key of the API": "api_key"}, api_key="secret"),
        "keys": Wrong({"keys of another deployment": "handoff_failed"}, extra=others, routed=True),
        "settings": Wrong(
            {
                "other blocks": "block_size",
                "shorter contexts": "max_model_len",
                "another name": "served_model_name",
                "other sampling defaults": "output.sampling_defaults",
                "another grammar library": "output.grammars",
                "another dtype": "model.dtype",
                "another checkpoint": "model.weights",
                "another drafter's checkpoint": "drafter.weights",
                "fewer drafts": "num_speculative_tokens",
                "another first step": "output.first_step",
                "another transport": "kv_transport",
            },
            ("group.",),  # of another dtype
            [
                *("--block-size", "64", "--max-model-len", "2048", "--served-model-name", "other"),
                *("--override-generation-config", json.dumps({"top_p": 0.9}), "--dtype", "bfloat16"),
                *("--structured-outputs-config", json.dumps({"backend": "guidance"})),
                *("--model", altered(MODEL, folder / "model")),
            ],
            EAGLE3 | drafter,
            extra={"first_step": "recompute", "kv_transport": f"file://{folder}/kv"},
        ),
        "role": Wrong(
            {
                "the wrong role": "no_decode",
                "the name of P": "engine_id",
                "no drafter": "drafter.method",
                "another type of KV": "cache.dtype",
            },
            (*WITHOUT_DRAFTER, "group.", "cache"),
            ["--kv-cache-dtype", "fp8"],
            None,
            {"kv_role": "kv_producer", "engine_id": "P"},
        ),
        "older": Wrong(
            {
                "an engine without a key": "keys",
                "another version": "version",
                "another drafter": "drafter.method",
                "copies by token": "block_size",
            },
            ("engine", *WITHOUT_DRAFTER),
            (),
            draft_model,
            {"engine_id": "E"},
            {"granularity": "token", **others},
            folder / "older",
        ),
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """A healthy pair, asked or routed wrongly, and the finding's name ("": none). `urls` None: both servers'. `keys`:
    the directory that the doctor reads. `router`: its settings; None: there is none.
    """

    found: str
    urls: Sequence[str] | None = None
    keys: str | None = None
    router: Mapping[str, Any] | None = None


def wrongly_asked(p: str, d: str, page: str, folder: Path) -> dict[str, Asked]:
    """By what is wrong. `page`: the URL of a server that is no engine."""
    shutil.copytree(folder / "keys", folder / "open keys")
    (folder / "open keys" / "secret" / "D.key").chmod(0o644)
    make_keys(folder / "fewer keys", ["P"])
    return {
        "nothing": Asked("", router={}),
        "a port on which nothing listens": Asked("unreachable", [p, f"http://127.0.0.1:{free_port()}"]),
        "a page instead of a server": Asked("not_an_engine", [p, page]),
        "no prefill server": Asked("no_prefill", [d]),
        "a server named twice": Asked("engine_id", [p, d, d.replace("127.0.0.1", "localhost")]),
        "a key that others may read": Asked("keys", keys=str(folder / "open keys")),
        "a directory without D's key": Asked("keys", keys=str(folder / "fewer keys")),
        "a router with another ticket key": Asked("handoff_failed", router={"ticket_key": b"another one" * 4}),
        "a router that hands no prompt off": Asked("not_handed_off", router={"max_local_prefill_length": 4096}),
    }
