"""The Kubernetes manifests have no misspelt field, name only what exists, and allow the time that a shutdown takes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from baton.router.discovery import read_services
from testkit.deploy.manifests import DEPLOY, Container, Resource, ScaleSpec, read_manifest, workloads
from tests.cli.test_examples import parsed

MANIFESTS = ("kubernetes-pd.yaml", "kubernetes-vllm.yaml")


def one(resources: list[Resource], kind: str, role: str | None = None) -> Any:
    (found,) = [each for each in resources if each.kind == kind and role in (None, each.metadata.labels.get("role"))]
    return found


def hook_s(container: Container) -> int:
    """How long a preStop hook takes at most."""
    hook = container.lifecycle["preStop"]
    if hook.sleep is not None:
        return hook.sleep["seconds"]
    assert hook.exec is not None
    code = hook.exec["command"][-1]
    compile(code, "preStop", "exec")
    return int(re.findall(r"sleep\((\d+)\)", code)[0]) + int(re.findall(r"range\((\d+)\)", code)[0])


@pytest.mark.parametrize("name", MANIFESTS)
def test_names_of_a_manifest_agree(name: str) -> None:
    resources = read_manifest(name)
    found = workloads(resources)
    assert found.keys() == {"prefill", "decode", "router"}
    for role, workload in found.items():
        template, labels = workload.spec.template, workload.metadata.labels
        assert labels == template.metadata.labels == workload.spec.selector.match_labels
        assert one(resources, "Service", role).spec.selector == labels
        (container,), ports = template.spec.containers, {port.name for port in template.spec.containers[0].ports}
        for probe in (container.startup_probe, container.readiness_probe, container.liveness_probe):
            assert probe is not None
            asked = probe.http_get or probe.tcp_socket
            assert asked is not None
            assert asked.port in ports
        assert container.readiness_probe is not None
        assert container.readiness_probe.http_get is not None
        mounts = [mount["name"] for each in (*template.spec.init_containers, container) for mount in each.volume_mounts]
        assert set(mounts) == {volume.name for volume in template.spec.volumes}
        assert "secret" not in {mount["name"] for mount in container.volume_mounts}, "it has all engines' keys"
        assert template.spec.termination_grace_period_seconds > hook_s(container) + 30
    keys = {
        made
        for text in re.findall(r"baton keys .*", (DEPLOY / name).read_text())
        for made in re.findall(r"\.\.(\d+)", text)
    }
    scaled = [each.spec for each in resources if isinstance(each.spec, ScaleSpec)]
    assert {each.scale_target_ref.name for each in scaled} == {
        found[role].metadata.name for role in ("prefill", "decode")
    }
    assert {str(each.max_replica_count - 1) for each in scaled} == keys, "each pod has a key"
    monitor = one(resources, "ServiceMonitor").spec
    assert monitor.selector.match_labels == one(resources, "Service", "router").metadata.labels
    assert monitor.endpoints[0].port == one(resources, "Service", "router").spec.ports[0].name


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_router_finds_the_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = workloads(read_manifest(name))
    monkeypatch.setenv("BATON_API_KEY", "secret")
    flags = parsed(found["router"].spec.template.spec.containers[0].args)
    assert flags["engine"] == ("vllm" if "vllm" in name else "baton")
    assert (flags["host"], flags["port"], flags["api_key"]) == ("0.0.0.0", 8000, ["secret"])
    for service in read_services(flags["discover"]):
        workload = found[service.role]
        assert (
            service.host
            == workload.spec.service_name
            == one(read_manifest(name), "Service", service.role).metadata.name
        )
        assert service.port == workload.spec.template.spec.containers[0].ports[0].container_port


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_flags_of_the_engines(role: str) -> None:
    template = workloads(read_manifest("kubernetes-pd.yaml"))[role].spec.template
    found = parsed([text.replace("$(POD_IP)", "10.0.0.5") for text in template.spec.containers[0].args])
    assert (found["model"], found["role"], found["port"]) == ("/models/model", role, 8100)
    assert found["kv_transfer_config"].control_bind == "tcp://10.0.0.5:7100"
    assert found["kv_transport"] == "nixl://?host=10.0.0.5"
    timeout = hook_s(template.spec.containers[0]) + 2 * found["shutdown_timeout"]
    assert template.spec.termination_grace_period_seconds > timeout


def test_the_connector_of_the_vllm_servers() -> None:
    kinds = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for role, kind in kinds.items():
        command = workloads(read_manifest("kubernetes-vllm.yaml"))[role].spec.template.spec.containers[0].command
        (text,) = [each for each in command if each.startswith("--kv-transfer-config=")]
        config = json.loads(text.partition("=")[2])
        assert (config["kv_role"], config["engine_id"]) == (kind, "$(POD_NAME)")
        assert config["kv_connector_extra_config"]["keys"] == "/keys/own"
