"""Peers in processes of their own: one that crashes costs its row of a table, not the bench.

The two processes exchange lines of JSON. Times are taken where the peer runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.contenders import ContenderRun
from benchmarks.forwards import Size
from benchmarks.timing import PeerFailed
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.kernels.threads import OPENMP_SPIN

_CODE = """import sys
sys.path[:1], sys.path[len(sys.path):] = sys.argv[1:2], sys.argv[2:]
from benchmarks.peer_process import serve
serve()"""
"""Modules of the Python that is asked go before ours, so it needs no package but its engine."""
_PATHS = (str(Path(__file__).parents[1]), *sys.path)
_END_SECONDS = 10.0


class Peer:
    """An object in a process of its own, started anew where it has crashed.

    Args:
        kind: its class.
        name: how tables call it.
        python: an interpreter of this version, in whose environment the engine is installed; None:
            it is installed in this one.
        options: of its class, such as JSON can hold.

    Attributes:
        failure: why it last gave no answer; None: it always has.

    Raises:
        ConfigError: what the class raises.
    """

    def __init__(self, kind: type, name: str, python: Path | None = None, **options: Any) -> None:
        self.name, self._python = name, python
        self._made = {
            "kind": [kind.__module__, kind.__qualname__],
            "options": options,
            "threads": torch.get_num_threads(),
        }
        self.failure: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._can_start = True
        with contextlib.suppress(PeerFailed):  # said when it is asked
            self._start()

    def ask(self, **request: Any) -> Any:
        """What it answers.

        Raises:
            PeerFailed: nothing.
        """
        if self._process is None or not self._can_start:
            self._start()
        return self._exchange(request)

    def _start(self) -> None:
        if not self._can_start:
            raise PeerFailed(self.failure)
        # How our command lets OpenMP's threads wait is not how a peer would run by itself.
        environment = {name: v for name, v in os.environ.items() if name != OPENMP_SPIN}
        self._process = subprocess.Popen(
            [str(self._python or sys.executable), "-c", _CODE, *_PATHS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        weakref.finalize(self, _end, self._process)
        self._can_start = False
        self._exchange(self._made)
        self._can_start = True

    def _exchange(self, said: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._process = None
            self.failure = _how_it_ended(process.wait())
            raise PeerFailed(self.failure)
        answer = json.loads(line)
        if "mistake" in answer:
            raise ConfigError(answer["mistake"])
        if "failure" in answer:
            self.failure = answer["failure"]
            raise PeerFailed(self.failure)
        return answer["found"]


class PeerContender(Peer):
    """A `contenders.Contender` in a process of its own, greedy."""

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> ContenderRun:
        found = self.ask(call="run", prompt_ids=list(prompt_ids), max_tokens=params.max_tokens)
        return ContenderRun(**found | {"token_ids": tuple(found["token_ids"])})


class PeerStepper(Peer):
    """A `step.TimedStepper` of one row in a process of its own."""

    def fits(self, size: Size) -> bool:
        return size.rows == 1

    def step(self, size: Size) -> dict[str, float]:
        found: dict[str, float] = self.ask(call="step", **asdict(size))
        return found


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _how_it_ended(status: int) -> str:
    return f"crashed (signal {-status})" if status < 0 else f"ended (status {status})"


# ------------------------------------------------------------------------------- the peer's process


def serve() -> None:
    """Make the peer of the first line of standard input and answer the others, to its end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _answer_all(sys.stdin, answers)


def _answer_all(requests: TextIO, answers: TextIO) -> None:
    peer: Any = None
    for line in requests:
        answer: dict[str, Any] = {}
        try:
            if peer is None:
                peer = _made(**json.loads(line))
                answer["found"] = None
            else:
                answer["found"] = _answer(peer, **json.loads(line))
        except ConfigError as mistake:
            answer["mistake"] = str(mistake)
        except Exception as problem:
            answer["failure"] = f"failed ({type(problem).__name__}: {problem})"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _made(kind: Sequence[str], options: dict[str, Any], threads: int) -> Any:
    torch.set_num_threads(threads)
    module, name = kind
    return getattr(importlib.import_module(module), name)(**options)


def _answer(peer: Any, call: str, **said: Any) -> Any:
    if call == "step":
        return peer.step(Size(**said))
    if call == "run":
        return asdict(peer.run(said["prompt_ids"], SamplingParams(max_tokens=said["max_tokens"])))
    return getattr(peer, call)(**said)
