"""aider: one turn of its coder over a file of a repository, streamed and not. LiteLLM sends the requests."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("aider")


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        work = Path(folder) / "work"
        work.mkdir()
        subprocess.run(["git", "init", "-q", work], check=True)
        (work / "hello.py").write_text('print("hello")\n')
        environment = {**os.environ, "HOME": str(home), "OPENAI_API_BASE": url, "OPENAI_API_KEY": "none"}
        environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        # Without a limit a model may go on to the end of its context.
        settings = Path(folder) / "settings.yml"
        settings.write_text("- name: openai/demo\n  extra_params: {max_tokens: 16}\n")
        for flag in ("--stream", "--no-stream"):
            command = [
                SCRIPT,
                "--model",
                "openai/demo",
                "--yes-always",
                "--no-check-update",
                "--no-show-model-warnings",
            ]
            command += [
                "--no-gitignore",
                "--no-auto-commits",
                "--map-tokens",
                "0",
                "--analytics-disable",
                "--no-pretty",
            ]
            command += ["--edit-format", "ask", "--no-show-release-notes", "--no-detect-urls", flag]
            command += ["--model-settings-file", settings, "--message", "What does hello.py print?", "hello.py"]
            done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=200)
            print(done.stdout[-1500:], done.stderr[-500:])
            assert done.returncode == 0, done.returncode
            # aider exits with 0 whatever the server answers, and prints token counts only if there was an answer.
            assert " received." in done.stdout


main(sys.argv[1])
