"""Check the Kubernetes manifests in `examples/deploy` against the schemas of Kubernetes, strictly.

    pip install kubernetes-validate
    python -m testkit.deploy.validate [VERSION]

Custom resources (ServiceMonitor, ScaledObject) are not part of Kubernetes: `tests/cli/test_kubernetes_manifests.py`
checks their fields. Ends with status 1 if a resource is wrong.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


def main(version: str = "1.34") -> int:
    validator = importlib.import_module("kubernetes_validate")
    status = 0
    for file in sorted(DEPLOY.glob("kubernetes*.yaml")):
        for resource in yaml.safe_load_all(file.read_text()):
            what = f"{file.name}: {resource['kind']} {resource['metadata']['name']}"
            try:
                validator.validate(resource, version, strict=True)
            except validator.SchemaNotFoundError:
                print(f"{what}: a custom resource")
            except validator.ValidationError as error:
                print(f"{what}: {error.message}")
                status = 1
            else:
                print(f"{what}: valid")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
