"""Does what the README says, command by command, as a newcomer who has just cloned it would.

The commands of its ``sh`` blocks and the code of its ``python`` blocks run in order in a fresh copy
of the repository, which gets a virtual environment of its own from ``make demo``. A command that
serves is started, asked and stopped; a command that reads the keyboard gets a few lines. Every
command must work as it is printed.

``python tools/newcomer.py`` needs a package index (or pip's cache), and nothing of this
environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_KEEPS = (". ", "source ", "cd ", "export ")
"""Commands that change the shell in which the later ones run."""
_TYPED = {"foredraft chat": "Name a river.\n/bye\n"}
"""Input typed into interactive commands."""
_SECONDS = 1800.0


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block."""
    return ((found[1], found[2]) for found in _BLOCK.finditer(text))


def commands(block: str) -> list[str]:
    """The commands of a ``sh`` block, without comments; continued lines are one command."""
    lines = block.replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"(^|\s+)#.*$", "", line).removeprefix("$ ").strip() for line in lines)
    return [line for line in stripped if line]


class Newcomer:
    """A newcomer's shell in a fresh copy of the repository."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._kept = folder, list[str]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._environment = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "FOREDRAFT_PORT": str(self._port),  # another process may have the usual port
        }

    def do(self, command: str) -> None:
        """Run a command as it is printed."""
        began = time.monotonic()
        _say(f"$ {command}")
        if command.startswith("foredraft serve"):
            self._serve(command)
        else:
            self._run(command, _TYPED.get(command, ""))
        if command.startswith(_KEEPS):
            self._kept.append(command)
        _say(f"  {time.monotonic() - began:.1f} s")

    def run_python(self, code: str) -> None:
        """Run a block of Python with the environment's own interpreter."""
        _say("python: " + code.strip().partition("\n")[0] + " …")
        (self._folder / "newcomer_block.py").write_text(code)
        self._run("python newcomer_block.py", "")

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-ec", "\n".join([*self._kept, command])]

    def _run(self, command: str, typed: str) -> None:
        done = subprocess.run(
            self._shell(command), cwd=self._folder, env=self._environment, input=typed,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
        if done.returncode or "Traceback" in done.stdout:
            raise SystemExit(f"{done.stdout}\n{command!r} ended with status {done.returncode}")

    def _serve(self, command: str) -> None:
        url = f"http://127.0.0.1:{self._port}"
        process = subprocess.Popen(
            self._shell(f"exec {command}"), cwd=self._folder, env=self._environment
        )
        try:
            self._wait_until_ready(process, url)
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
            reply = json.loads(_get(f"{url}/v1/chat/completions", body))
            _say("  it answers: " + repr(reply["choices"][0]["message"]["content"]))
            if b"<html" not in _get(f"{url}/"):
                raise SystemExit("the server shows no page at its root")
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(60)
        if status not in (0, 130, -signal.SIGINT):
            raise SystemExit(f"{command!r} ended with status {status} after Ctrl-C")

    def _wait_until_ready(self, process: subprocess.Popen[bytes], url: str) -> None:
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            try:
                _get(f"{url}/ready")
            except OSError:  # not there yet
                time.sleep(0.3)
            else:
                return
        raise SystemExit("the server does not become ready")


def _get(url: str, body: dict[str, object] | None = None) -> bytes:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
        found: bytes = reply.read()
    return found


def copy_of_repository(folder: Path) -> None:
    """The files of a clone: tracked ones, and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted and not committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do what the README says."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "foredraft"
        folder.mkdir()
        copy_of_repository(folder)
        newcomer = Newcomer(folder)
        for language, content in blocks((folder / "README.md").read_text()):
            if language == "sh":
                for command in commands(content):
                    newcomer.do(command)
            elif language == "python":
                newcomer.run_python(content)
    _say(f"the README works as it is printed ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
