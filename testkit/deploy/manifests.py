"""Types of the parts of the Kubernetes API that the example manifests use. An unknown or misspelt field is an error.

Source: the API reference of Kubernetes 1.34, and the custom resources of the Prometheus operator and KEDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
Labels = dict[str, str]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class Metadata(_Strict):
    labels: Labels
    name: str = ""


class Selector(_Strict):
    match_labels: Labels = {}
    match_expressions: list[dict[str, Any]] = []


class Key(_Strict):
    name: str
    key: str


class Source(_Strict):
    field_ref: dict[Literal["fieldPath"], Literal["metadata.name", "status.podIP"]] | None = None
    secret_key_ref: Key | None = None


class Variable(_Strict):
    name: str
    value: str | None = None
    value_from: Source | None = None


class Port(_Strict):
    name: str
    container_port: int


class HttpGet(_Strict):
    path: str
    port: str


class Tcp(_Strict):
    port: str


class Probe(_Strict):
    http_get: HttpGet | None = None
    tcp_socket: Tcp | None = None
    period_seconds: int = 10
    timeout_seconds: int = 1
    failure_threshold: int = 3


class Hook(_Strict):
    sleep: dict[Literal["seconds"], int] | None = None
    exec: dict[Literal["command"], list[str]] | None = None


class Container(_Strict):
    name: str
    image: str
    security_context: dict[str, Any]
    volume_mounts: list[dict[str, str | bool]]
    command: list[str] = []
    args: list[str] = []
    env: list[Variable] = []
    ports: list[Port] = []
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: dict[Literal["preStop"], Hook] = {}
    resources: dict[Literal["requests", "limits"], dict[str, str]] = {}


class Volume(_Strict):
    name: str
    persistent_volume_claim: dict[str, str | bool] | None = None
    secret: dict[str, Any] | None = None
    empty_dir: dict[Literal["medium", "sizeLimit"], str] | None = None


class PodSpec(_Strict):
    termination_grace_period_seconds: int
    enable_service_links: bool
    automount_service_account_token: bool
    security_context: dict[str, int | bool]
    init_containers: list[Container]
    containers: list[Container]
    volumes: list[Volume]


class Template(_Strict):
    metadata: Metadata
    spec: PodSpec


class WorkloadSpec(_Strict):
    selector: Selector
    template: Template
    replicas: int | None = None
    service_name: str | None = None
    pod_management_policy: Literal["OrderedReady", "Parallel"] = "OrderedReady"


class ServicePort(_Strict):
    name: str
    port: int
    target_port: str | None = None


class ServiceSpec(_Strict):
    selector: Labels
    ports: list[ServicePort]
    cluster_ip: str | None = msgspec.field(name="clusterIP", default=None)


class NetworkSpec(_Strict):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]]
    ingress: list[dict[Literal["from"], list[dict[Literal["podSelector"], Selector]]]]


class Endpoint(_Strict):
    port: str
    path: str
    interval: str
    honor_labels: bool


class MonitorSpec(_Strict):
    selector: Selector
    endpoints: list[Endpoint]


class Target(_Strict):
    api_version: str
    kind: str
    name: str


class Trigger(_Strict):
    type: Literal["prometheus"]
    metadata: dict[Literal["serverAddress", "query", "threshold"], str]


class ScaleSpec(_Strict):
    scale_target_ref: Target
    min_replica_count: int
    max_replica_count: int
    cooldown_period: int
    triggers: list[Trigger]


_SPECS: dict[tuple[str, str], Any] = {
    ("v1", "Service"): ServiceSpec,
    ("apps/v1", "Deployment"): WorkloadSpec,
    ("apps/v1", "StatefulSet"): WorkloadSpec,
    ("networking.k8s.io/v1", "NetworkPolicy"): NetworkSpec,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): MonitorSpec,
    ("keda.sh/v1alpha1", "ScaledObject"): ScaleSpec,
}


class Resource(msgspec.Struct):
    """One document of a manifest. `spec`: of the type of its kind."""

    kind: str
    metadata: Metadata
    spec: Any


def read_manifest(name: str) -> list[Resource]:
    """The resources of a file in `examples/deploy`. Raises `msgspec.ValidationError` naming a field that is wrong."""
    found = []
    for document in yaml.safe_load_all((DEPLOY / name).read_text()):
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}, document.keys()
        spec = msgspec.convert(document["spec"], _SPECS[document["apiVersion"], document["kind"]])
        found.append(Resource(document["kind"], msgspec.convert(document["metadata"], Metadata), spec))
    return found


def workloads(resources: list[Resource]) -> dict[str, Resource]:
    """The Deployment and the StatefulSets, by the label `role`."""
    return {one.metadata.labels["role"]: one for one in resources if isinstance(one.spec, WorkloadSpec)}
