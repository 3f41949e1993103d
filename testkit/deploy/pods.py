"""Pods of a manifest as processes: the containers' own commands, with each pod's address on loopback."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.deployment import BATON, end_processes
from baton.handoff.session.keys import make_keys
from testkit.deploy.manifests import Container, PodSpec, Resource, workloads

API_KEY = "key-of-the-secret"
START_LIMIT_S, END_LIMIT_S = 300.0, 60.0


@dataclass(slots=True)
class Pod:
    """One pod. `ip`: an address on loopback that only it uses."""

    name: str
    ip: str
    spec: PodSpec
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def container(self) -> Container:
        return self.spec.containers[0]

    def probe(self, kind: str = "readiness_probe") -> bool:
        """Whether a GET probe answers as it should."""
        get = getattr(self.container, kind).http_get
        (port,) = [one.container_port for one in self.container.ports if one.name == get.port]
        try:
            with urllib.request.urlopen(f"http://{self.ip}:{port}{get.path}", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@dataclass(slots=True)
class Cluster:
    """Runs one pod of each workload. `altered`: texts of the manifest's commands that differ here. `more`: flags of
    the engines. `environment`: variables of the engines."""

    resources: list[Resource]
    folder: Path
    altered: Mapping[str, str]
    more: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def run(self) -> Iterator[dict[str, Pod]]:
        """The pods by role, all of them ready."""
        found = workloads(self.resources)
        network = f"127.{random.randrange(1, 250)}.{random.randrange(1, 250)}"
        ips = {"prefill": f"{network}.2", "decode": f"{network}.3", "router": f"{network}.4"}
        services = {found[role].spec.service_name: ips[role] for role in ("prefill", "decode")}
        self._make_secret([f"{name}-0" for name in services])
        pods: dict[str, Pod] = {}
        try:
            for role, ip in ips.items():
                pods[role] = self._start(found[role], ip, services)
            for pod in pods.values():
                _await(pod, pod.probe)
            _await(pods["router"], lambda: _num_healthy(pods["router"]) == 2)
            yield pods
        finally:
            end_processes([pod.process for pod in reversed(pods.values())], END_LIMIT_S)

    def _make_secret(self, engines: list[str]) -> None:
        """As `kubectl create secret --from-file` and a mounted Secret do: one folder of files for user and group."""
        made, flat = self.folder / "made", self.folder / "secret"
        make_keys(made, engines)
        flat.mkdir()
        for path in (made / "ticket.key", *made.glob("public/*"), *made.glob("secret/*")):
            (flat / path.name).write_bytes(path.read_bytes())
            (flat / path.name).chmod(0o440)

    def _start(self, workload: Resource, ip: str, services: Mapping[str, str]) -> Pod:
        name, spec = f"{workload.metadata.name}-0", workload.spec.template.spec
        own, container, engine = self.folder / name, spec.containers[0], spec.containers[0].name != "router"
        (own / "keys").mkdir(parents=True)
        folders = {"/keys": str(own / "keys"), "/secret": str(self.folder / "secret")}
        other = {"$(POD_NAME)": name, "$(POD_IP)": ip, "0.0.0.0": ip, **self.altered}
        other |= {f"={host}:": f"={address}:" for host, address in services.items()}

        def here(text: str) -> str:
            for old, new in other.items():
                text = text.replace(old, new)
            return re.sub(r"(?<![\w.])/(?:keys|secret)(?![\w.])", lambda found: folders[found[0]], text)

        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POD_NAME": name, "POD_IP": ip}
        for variable in container.env:
            secret = variable.value_from is not None and variable.value_from.secret_key_ref is not None
            if secret or variable.value is not None:
                environment[variable.name] = API_KEY if secret else str(variable.value)
        environment |= self.environment if engine else {}
        for first in spec.init_containers:
            subprocess.run([here(one) for one in first.command], env=environment, check=True)
        program = [sys.executable, *container.command[1:]] if container.command else [*BATON]
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(
                [*map(here, (*program, *container.args)), *(self.more if engine else ())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Pod(name, ip, spec, process, own / "log")


def _await(pod: Pod, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not done():
        assert pod.process.poll() is None, pod.log.read_text()
        assert time.monotonic() < deadline, pod.log.read_text()
        time.sleep(0.1)


def _num_healthy(router: Pod) -> int:
    """A router is ready with one engine of either role."""
    with urllib.request.urlopen(f"http://{router.ip}:8000/status", timeout=60) as answer:
        return sum(engine["healthy"] for engine in json.load(answer)["engines"])
