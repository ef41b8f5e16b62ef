"""Greedy text of GGUF files beside llama.cpp's: one text through both, position by position.

Two texts that part once have nothing to do with each other from there on. So llama.cpp reads our
text, and each token that it would have written otherwise is shown with its margin: by how much its
own choice is above ours, in standard deviations of the logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.quality import divergence, log_probs
from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError
from foredraft.load import ModelPlan, load_target, plan_models
from foredraft.models.base import ScoreRow, Target
from foredraft.models.files.progress import SilentProgress
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from foredraft.system.machine import package_version

NEAR_TIE = 0.15
"""A margin below so many standard deviations is a near-tie where weights are quantised: llama.cpp
rounds what they are multiplied with to 8 bits."""
_NEAR_TIE_OF_FLOATS = 0.02
_PROMPT = "The ferry crosses the river twice a day. In the morning it carries"
_SYNTHETIC = (
    *(("llama", "q4_0"), ("llama-llama3-rope", "q8_0"), ("llama-linear-rope", "f16")),
    *(("qwen2-yarn-rope", "q5_1"), ("qwen3", "q4_k"), ("smollm3", "q5_0"), ("olmo2", "q6_k")),
    *(("granite", "q4_1"), ("phi3", "bf16"), ("gemma", "q5_k"), ("gemma2", "q8_0")),
    *(("gemma3", "f32"), ("mixtral", "f32"), ("qwen3-moe", "f32"), ("olmoe", "f32")),
)
"""Each family once, each format at least once. Mixtures are in floats: where two experts of random
weights are nearly as good, activations of 8 bits choose another one, and the rest differs."""


@dataclass(frozen=True)
class Comparison:
    """What llama.cpp says of a greedy text of ours.

    Attributes:
        file: its name, or the family and the format of a synthetic one.
        tokens: of the text.
        margins: of the tokens that llama.cpp would not have written, the largest first.
        difference: between the logits of both, root mean square in standard deviations.
        near_tie: margins below are near-ties.
    """

    file: str
    tokens: int
    margins: tuple[float, ...]
    difference: float
    near_tie: float

    @property
    def is_equal(self) -> bool:
        """Whether both write the same, up to near-ties."""
        return all(margin < self.near_tie for margin in self.margins)

    @property
    def line(self) -> str:
        shown = ", ".join(f"{margin:.3f}" for margin in self.margins[:5]) or "none"
        verdict = "equal" if self.is_equal else "NOT EQUAL"
        return (
            f"{self.file:28} {self.tokens} tokens, {len(self.margins)} others "
            f"(margins {shown}); logits differ by {self.difference:.4f}; {verdict}"
        )


def compare(path: Path, prompt: Sequence[int], num_tokens: int, name: str) -> Comparison:
    """Write a greedy text with the file as it comes, and let llama.cpp read it."""
    plan = _plan_of(path)
    text, ours_NV = _greedy(load_target(plan), prompt, num_tokens)
    theirs_NV = _logits_of_llama_cpp(path, text)[len(prompt) - 1 : -1]
    spread_N1 = theirs_NV.std(-1, keepdim=True)
    written = torch.tensor(text[len(prompt) :])[:, None]
    margins_N = ((theirs_NV.amax(-1, keepdim=True) - theirs_NV.gather(1, written)) / spread_N1)[
        :, 0
    ]
    # llama.cpp's logits may be ours plus a number: only their differences mean anything.
    between_NV = ours_NV - theirs_NV
    between_NV = (between_NV - between_NV.mean(-1, keepdim=True)) / spread_N1
    return Comparison(
        file=name,
        tokens=num_tokens,
        margins=tuple(sorted(margins_N[margins_N > 0].tolist(), reverse=True)),
        difference=float(between_NV.square().mean().sqrt()),
        near_tie=NEAR_TIE if plan.weights == "file" else _NEAR_TIE_OF_FLOATS,
    )


@dataclass(frozen=True)
class Distance:
    """From float32 with the weights of the same file: mean KL in nats, and share of equal tokens.

    Attributes:
        positions: of texts, behind the first of each, where activations have outliers.
    """

    positions: int
    mean_kl: float
    agreement: float

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Distance:
        """Of divergences and agreements, [N] of each text."""
        kl_N, agrees_N = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(len(kl_N), float(kl_N.mean()), float(agrees_N.double().mean()))


def distances(path: Path, texts: Sequence[Sequence[int]]) -> dict[str, Distance]:
    """How far our logits are from float32, as they are by default, and llama.cpp's."""
    asked = LoadOptions(model=str(path), drafter="none")
    in_full, ours = (
        load_target(plan_models(one)[0]) for one in (replace(asked, dtype="float32"), asked)
    )
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {"ours": [], "llama.cpp": []}
    for text in texts:
        exact_NV, ours_NV = (torch.cat([*log_probs(one, text)])[1:] for one in (in_full, ours))
        theirs_NV = _logits_of_llama_cpp(path, text)[1:].double().log_softmax(-1)
        parts["ours"].append(divergence(exact_NV, ours_NV))
        parts["llama.cpp"].append(divergence(exact_NV, theirs_NV))
    return {name: Distance.of(found) for name, found in parts.items()}


def _plan_of(path: Path) -> ModelPlan:
    """The file as it comes, with activations and cache in float32, as llama.cpp has them here."""
    asked = LoadOptions(model=str(path), drafter="none", dtype="float32", weights="file")
    try:
        plan, _ = plan_models(asked)
    except ConfigError:  # it is a file of floats
        plan, _ = plan_models(replace(asked, weights="auto"))
    return plan


def _greedy(target: Target, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Prompt and text, and the logits [N, V] of the text's tokens."""
    text, slot, pending, rows = list(prompt), target.cache.allocate(), list(prompt), []
    for _ in range(num_tokens):
        [scores] = target.score([ScoreRow(slot, pending)])
        target.cache.keep(slot, len(pending), [])
        rows.append(scores.logits_NV[-1].float())
        pending = [int(rows[-1].argmax())]
        text += pending
    return text, torch.stack(rows)


def _logits_of_llama_cpp(path: Path, text: Sequence[int]) -> Tensor:
    """Logits [N, V] behind each token of a text."""
    if package_version("llama-cpp-python") is None:
        raise ConfigError(
            "llama.cpp is not installed: pip install llama-cpp-python (it compiles for some "
            "minutes and needs a C++ compiler)"
        )
    from llama_cpp import GGML_TYPE_F32, Llama

    llama = Llama(
        str(path), n_ctx=len(text) + 8, n_threads=1, n_threads_batch=1, n_batch=512,
        type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, logits_all=True, verbose=False,
    )  # fmt: skip
    llama.eval(list(text))
    return torch.from_numpy(llama.scores[: len(text)].copy()).float()


def _synthetic(folder: Path) -> Iterator[tuple[str, Path]]:
    from benchmarks.gguf import write_gguf
    from benchmarks.gguf_models import save_tiny

    for name, kind in _SYNTHETIC:
        directory, path = folder / f"{name}-{kind}", folder / f"{name}-{kind}.gguf"
        save_tiny(directory, name)
        write_gguf(directory, path, kind)
        yield f"{name}, {kind.upper()}", path


@o.with_options
def gguf(
    files: Annotated[
        list[Path] | None, typer.Argument(help="GGUF files; none: a tiny one of each family.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each greedy text.")] = 48,
    output: o.Output = None,
) -> None:
    """Greedy texts of GGUF files, as our kernel and as llama.cpp write them."""
    check_outputs(output)
    with tempfile.TemporaryDirectory() as folder:
        named = [(path.name, path) for path in files or ()] or _synthetic(Path(folder))
        found: list[Comparison] = []
        for name, path in named:
            prompt = _prompt_for(path)
            found.append(compare(path, prompt, tokens, name))
            typer.echo(found[-1].line)
    facts: dict[str, Any] = {"files": [asdict(one) for one in found]}
    equal = sum(one.is_equal for one in found)
    Report(facts=facts, lines=[f"{equal} of {len(found)} equal up to near-ties"]).give(output)


def _prompt_for(path: Path) -> list[int]:
    from foredraft.models.files.store import resolve_model

    return Tokenizer(resolve_model(path, progress=SilentProgress())).encode(_PROMPT)
