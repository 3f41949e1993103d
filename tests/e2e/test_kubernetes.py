"""The commands of the Kubernetes manifest serve: one pod of each workload, as processes with addresses of their own."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

from testkit.deploy.manifests import read_manifest
from testkit.deploy.pods import API_KEY, END_LIMIT_S, Cluster, Pod
from testkit.handoffs.remote_uris import uri_of

HERE = {"/models/model": "models/baton-demo-llama", "=8G": "=64M", "--shutdown-timeout=30": "--shutdown-timeout=5"}


def call(pod: Pod, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(f"http://{pod.ip}:8000{path}", headers={"Authorization": f"Bearer {API_KEY}"})
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_pods_of_the_manifest_serve_and_drain(tmp_path: Path) -> None:
    uri_of("nixl", tmp_path)  # skips if it cannot run here
    with Cluster(read_manifest("kubernetes-pd.yaml"), tmp_path, HERE).run() as pods:
        router, decode = pods["router"], pods["decode"]
        body = {"model": "model", "prompt": list(range(10, 150)), "max_tokens": 8, "ignore_eos": True}
        body["model"] = call(router, "/v1/models")["data"][0]["id"]
        assert call(router, "/v1/completions", body)["usage"]["completion_tokens"] == 8
        status = call(router, "/status")
        assert status["decisions"]["last"] == {"handed_off": 1}, "found by name, and both admit each other's keys"
        assert status["handoffs"]["completed"] == 1
        names = {engine["info"]["engine_id"] for engine in status["engines"]}
        assert names == {"baton-prefill-0", "baton-decode-0"}
        assert pods["prefill"].probe("liveness_probe")
        decode.process.send_signal(signal.SIGTERM)
        assert decode.process.wait(END_LIMIT_S) == 0, decode.log.read_text()
        assert call(router, "/v1/completions", body)["usage"]["completion_tokens"] == 8, "the other one serves alone"
