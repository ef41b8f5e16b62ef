"""``python -m benchmarks …``: each measurement of the repository is a command."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from benchmarks.affinity import affinity
from benchmarks.against_llama_cpp import gguf
from benchmarks.beside_peers import peers
from benchmarks.busy import busy
from benchmarks.cluster import cluster
from benchmarks.contexts import contexts
from benchmarks.curves import curves
from benchmarks.drafters import drafters
from benchmarks.fair_load import fair_load
from benchmarks.grammar import grammar
from benchmarks.memory import memory
from benchmarks.prefix import prefix, prefix_hits
from benchmarks.priors import priors
from benchmarks.prompts import prompts
from benchmarks.quality import quality
from benchmarks.results import report
from benchmarks.revisions import revisions
from benchmarks.same_text import same_text
from benchmarks.serve_load import serve_load
from benchmarks.serve_sim import serve_sim
from benchmarks.serve_stream import serve_stream
from benchmarks.stalls import stalls
from benchmarks.step import step
from benchmarks.vllm_beside import vllm
from foredraft.cli.main import exit_with_message
from foredraft.system.timing_lock import measuring

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TIMES_NOTHING = ("report", "curves", "quality", "gguf", "priors", "serve-load", "fair-load",
                  "prefix-hits", "affinity", "same-text", "vllm")  # fmt: skip


@app.callback()
def _group() -> None:
    """Measure foredraft on this machine: interleaved, with medians. Trainings stand still."""


def _alone(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which waits for other measurements once its options are read."""

    @wraps(command)
    def run(**given: Any) -> None:
        with measuring(lambda text: typer.echo(text, err=True)):
            command(**given)

    return run


COMMANDS = (
    *(drafters, step, prompts, busy, serve_sim, serve_load, serve_stream, cluster, affinity),
    *(prefix, prefix_hits, contexts, grammar, quality, gguf, same_text, memory, priors, revisions),
    *(report, curves, stalls, fair_load, peers, vllm),
)
for command in COMMANDS:
    name = command.__name__.replace("_", "-")
    app.command(name)(command if name in _TIMES_NOTHING else _alone(command))


if __name__ == "__main__":
    exit_with_message(app)
