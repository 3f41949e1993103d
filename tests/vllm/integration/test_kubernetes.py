"""The commands of the Kubernetes manifest with vLLM servers serve, as processes with addresses of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.vllm import servers
from testkit.deploy.manifests import read_manifest
from testkit.deploy.pods import Cluster
from tests.e2e.test_kubernetes import call

pytestmark = pytest.mark.timeout(900)

HERE = {"/models/model": "models/baton-demo-llama"}


def test_pods_of_the_manifest_serve(tmp_path: Path) -> None:
    paths = [servers.ENVIRONMENT.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environment = servers.ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    flags = [*servers.FLAGS, *servers.ONE_PROCESS]
    cluster = Cluster(read_manifest("kubernetes-vllm.yaml"), tmp_path, HERE, flags, environment)
    with cluster.run() as pods:
        router, decode = pods["router"], pods["decode"]
        body = {"model": "model", "prompt": list(range(10, 150)), "max_tokens": 8, "temperature": 0}
        body["model"] = call(router, "/v1/models")["data"][0]["id"]
        assert call(router, "/v1/completions", body)["usage"]["completion_tokens"] == 8
        assert call(router, "/status")["decisions"]["last"] == {"handed_off": 1}
        hook = decode.container.lifecycle["preStop"].exec
        assert hook is not None
        code = hook["command"][-1].replace("sleep(15)", "sleep(0)").replace("127.0.0.1", decode.ip)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # nothing runs: it ends at once
