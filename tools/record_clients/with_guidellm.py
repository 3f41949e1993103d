"""guidellm: a small load, by completions and by chats."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("guidellm")


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/models", timeout=30) as reply:
        (model,) = json.load(reply)["data"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        backend = f"kind=openai_http,target={url.removesuffix('/v1')},request_format={path},model={model['id']}"
        command = [SCRIPT, "run", "--backend", backend, "--profile", "kind=concurrent,streams=1"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={model['root']}"]
        command += ["--constraint", "kind=max_requests,count=2", "--disable-console-interactive"]
        command += ["--output", "kind=json,path=report.json"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            report = json.loads((Path(folder) / "report.json").read_text())
        totals = report["benchmarks"][0]["metrics"]["request_totals"]
        print(path, totals)
        assert totals["successful"] == 2, totals
        assert not totals["errored"], totals


main(sys.argv[1])
