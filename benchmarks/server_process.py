"""A server of this package in a process of its own, for benches that are its clients."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from foredraft.core.errors import ForedraftError

_START_SECONDS = 300.0
_REPLICA = b"ray::ServeReplica:"
_CODE = "from foredraft.cli.main import main; main()"


@dataclass(frozen=True)
class ServerProcess:
    """A server that takes requests.

    Attributes:
        url: its address.
        pid: of its process; None for a server that was not started here.
    """

    url: str
    pid: int | None = None


@contextmanager
def served(options: Sequence[str]) -> Iterator[ServerProcess]:
    """`foredraft serve` with these options, on a free port, until it is left.

    Raises:
        ForedraftError: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _CODE, "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        yield ServerProcess(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ForedraftError(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise ForedraftError(f"the server was not ready after {_START_SECONDS:.0f} seconds")


def processes_of(pid: int) -> dict[int, bytes]:
    """A process and those that it and its children have started, with their command lines."""
    parents: dict[int, int] = {}
    titles: dict[int, bytes] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            status = (directory / "stat").read_text().rpartition(")")[2].split()
            titles[int(directory.name)] = (directory / "cmdline").read_bytes()
        except OSError:  # it is over
            continue
        parents[int(directory.name)] = int(status[1])

    def descends(child: int) -> bool:
        while child not in (0, pid):
            child = parents.get(child, 0)
        return child == pid

    return {child: titles[child] for child in sorted(parents) if descends(child)}


def engines_of(pid: int) -> list[int]:
    """Processes of the engines of a cluster that ``foredraft serve --ray`` has started."""
    titles = processes_of(pid).items()
    return [each for each, title in titles if title.startswith(_REPLICA) and b":engine" in title]


def resident_mb(pid: int) -> float:
    """Memory of a process in MB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        found = next(line for line in lines if line.startswith("VmRSS:"))
    return int(found.split()[1]) / 1024
