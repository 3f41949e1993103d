"""Check the Kubernetes manifests in `examples/deploy` against the schemas of Kubernetes, strictly.

    pip install kubernetes-validate
    python -m testkit.deploy.validate [VERSION]

Custom resources (ServiceMonitor, ScaledObject) are checked against their definitions in npm's packages
`@kubernetes-models`, if npm is there; unknown fields are found by `tests/cli/test_kubernetes_manifests.py`. Ends with
status 1 if a resource is wrong.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
_CUSTOM = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
}
_SCRIPT = """
import fs from "fs";
let status = 0;
for (const [module, what, resource] of JSON.parse(fs.readFileSync(0, "utf8"))) {
  const kinds = await import(module);
  try { new kinds[resource.kind](resource).validate(); console.log(`${what}: valid`); }
  catch (error) { status = 1; console.log(`${what}: ${error.message}`); }
}
process.exit(status);
"""


def main(version: str = "1.34") -> int:
    try:
        validator = importlib.import_module("kubernetes_validate")
    except ModuleNotFoundError:
        raise SystemExit("needs the package of: pip install kubernetes-validate") from None
    status = 0
    custom: list[tuple[str, dict[str, Any]]] = []
    for file in sorted(DEPLOY.glob("kubernetes*.yaml")):
        for resource in yaml.safe_load_all(file.read_text()):
            what = f"{file.name}: {resource['kind']} {resource['metadata']['name']}"
            if resource["kind"] in _CUSTOM:
                custom.append((what, resource))
                continue
            try:
                validator.validate(resource, version, strict=True)
            except validator.ValidationError as error:
                print(f"{what}: {error.message}")
                status = 1
            else:
                print(f"{what}: valid")
    return check_custom(custom) or status


def check_custom(resources: Sequence[tuple[str, dict[str, Any]]]) -> int:
    """Print what is wrong with custom resources, each with its name. Returns 1 if one is."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        print(f"without npm and node, {len(resources)} custom resources are not checked")
        return 0
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        packages = {"/".join(module.split("/")[:2]) for module in _CUSTOM.values()}
        subprocess.run([npm, "install", "--silent", "--prefix", folder, *sorted(packages)], check=True)
        script = Path(folder) / "check.mjs"
        script.write_text(_SCRIPT)
        told = [(_CUSTOM[resource["kind"]], what, resource) for what, resource in resources]
        return subprocess.run([node, str(script)], input=json.dumps(told), text=True).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
