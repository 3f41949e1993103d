"""aiperf: a small load, by completions and by chats."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("aiperf")


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/models", timeout=30) as reply:
        (model,) = json.load(reply)["data"]
    for kind in ("completions", "chat"):
        command = [SCRIPT, "profile", "--url", url.removesuffix("/v1"), "--model", model["id"], "--endpoint-type", kind]
        command += ["--streaming", "--isl", "24", "--osl", "8", "--ui", "none", "--request-count", "2"]
        command += ["--concurrency", "1", "--random-seed", "0", "--tokenizer", model["root"]]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            (path,) = Path(folder).rglob("profile_export_aiperf.json")
            report = json.loads(path.read_text())
        print(kind, report["request_count"]["avg"], report.get("error_request_count"))
        assert report["request_count"]["avg"] == 2
        assert not report["error_summary"], report["error_summary"]


main(sys.argv[1])
