"""The folder that a training run writes: its lock, its state, its curves, and its model card.

Beside the head itself (`foredraft.drafters.trained`) it holds ``training/``: the state,
with which a training goes on, the curves, and text that the target wrote for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.drafters.trained import (
    CARD,
    META,
    TargetIdentity,
    check_kind,
    finish_saving,
    read_info,
)
from foredraft.models.files.safety import check_safetensors
from foredraft.system.files import write_tensors, write_text

_KEY = "training"


def training_folder(out: Path) -> Path:
    """The folder of files that only training needs."""
    return out / "training"


def state_path(out: Path) -> Path:
    """The file with the state of a training."""
    return training_folder(out) / "state.safetensors"


# ------------------------------------------------------------------------- who may write there


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other processes from training in a folder meanwhile.

    Raises:
        ConfigError: one does already.
    """
    from filelock import FileLock, Timeout

    whole = out.resolve()
    whole.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(whole.with_name(f".{whole.name}.lock"))  # not in the folder, which may be moved
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is training in {out}; wait for its end, or give another --out"
        ) from None
    with held:
        yield


def check_out(out: Path, kind: str, start_from: Path | None = None) -> None:
    """Check that a training run of this kind may write into a folder.

    It may if there is no head, if a run of this kind was interrupted there, or if it starts from
    the head there. In all these cases a head is replaced only by a better one.

    Raises:
        ConfigError: there is a head of another run, or something else.
        ModelLoadError: there is a head, and its ``head.json`` cannot be used.
    """
    finish_saving(out)
    if not (out / META).exists():
        if (out / CARD).exists():
            raise ConfigError(
                f"{out} holds a {CARD} that is not of a head, and a head's would take its place; "
                "give another --out"
            )
        return
    info = read_info(out)
    if info.kind == kind and state_path(out).is_file():
        return
    if start_from is not None and start_from.resolve() == out.resolve():
        check_kind(info, kind, out)
        return
    go_on = f", --start-from {out} to train this head further" if info.kind == kind else ""
    raise ConfigError(
        f"{out} holds a finished head of kind {info.kind!r} for {info.target.name!r} "
        f"({describe_measured(info.measured)}), and no training of kind {kind!r} that could go on. "
        f"Give another --out{go_on}, or --replace, which keeps it as {_free_name(out)}"
    )


def move_aside(out: Path) -> Path | None:
    """Make room for a new head: rename the existing folder.

    Text that the target wrote stays, as a copy.

    Returns:
        The new name; None if there was no folder.
    """
    finish_saving(out)
    if not (out / META).exists() and not state_path(out).exists():
        return None
    aside = _free_name(out)
    out.resolve().rename(aside)
    for texts in training_folder(aside).glob("texts-*"):
        shutil.copytree(texts, training_folder(out) / texts.name)
    return aside


def _free_name(out: Path) -> Path:
    whole, number = out.resolve(), 1
    while (aside := whole.with_name(f"{whole.name}.old-{number}")).exists():
        number += 1
    return aside if out.is_absolute() else out.parent / aside.name


# ---------------------------------------------------------------------------------- the state


@dataclass
class Counters:
    """Progress of a training run.

    Attributes:
        step: batches that were learnt from.
        tokens: without padding.
        seconds: of learning, over all resumptions, as the times below.
        prepared_s: seconds before learning: loading the target, text, the first measurement.
        measuring_s: seconds of measuring acceptance while learning, and of saving.
        last_measuring_s: seconds that the last measurement took.
        epoch: times that all text was seen.
        position: batches of this epoch that were seen.
        order: tells which texts, in which batches, `position` counts.
        survival: running mean of the overlap by depth.
        best: the highest score of a checkpoint.
        evaluated: share of the training at the last evaluation.
        resumed: how often it was taken up again.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    prepared_s: float = 0.0
    measuring_s: float = 0.0
    last_measuring_s: float = 0.0
    epoch: int = 0
    position: int = 0
    order: str = ""
    survival: list[float] = field(default_factory=list)
    best: float = 0.0
    evaluated: float = -1.0
    resumed: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of all."""
        return self.prepared_s + self.seconds + self.measuring_s


@dataclass(frozen=True)
class SavedState:
    """A state that `save_state` wrote."""

    counters: Counters
    recipe: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Tensor]]


def save_state(
    path: Path,
    counters: Counters,
    recipe: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Write a state in one file; the one before is there until this one is whole.

    Args:
        recipe: settings that a resumed run must share.
        groups: tensors, such as weights and moments, by group and name.

    Raises:
        TrainingError: it cannot be written, such as on a full disk.
    """
    tensors = {f"{g}/{name}": t for g, part in groups.items() for name, t in part.items()}
    content = {"counters": asdict(counters), "recipe": dict(recipe)}
    write_tensors(path, tensors, {_KEY: json.dumps(content)})


def load_state(path: Path, recipe: Mapping[str, Any]) -> SavedState | None:
    """The state that `save_state` wrote; None if there is none.

    Args:
        recipe: settings that the saved run must share.

    Raises:
        ConfigError: another recipe was trained there.
        ModelLoadError: the file is damaged.
    """
    if not path.is_file():
        return None
    counters, trained = _read_header(path)
    _check_recipe(path, trained, recipe)
    groups: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = file.get_tensor(name)
    return SavedState(counters, trained, groups)


def read_counters(out: Path) -> Counters:
    """Progress of the training run in a folder; zero if there is none.

    Raises:
        ModelLoadError: its state is damaged.
    """
    path = state_path(out)
    return _read_header(path)[0] if path.is_file() else Counters()


def _read_header(path: Path) -> tuple[Counters, Mapping[str, Any]]:
    check_safetensors(path)
    with safe_open(path, "pt") as file:
        try:
            content = json.loads((file.metadata() or {})[_KEY])
            return Counters(**content["counters"]), dict(content["recipe"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{path} is no state of a training ({error!r:.100})") from error


def _check_recipe(path: Path, trained: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    for name, value in json.loads(json.dumps(recipe)).items():
        if trained.get(name) != value:
            raise ConfigError(
                f"{path.parent.parent} holds a training with {name} {trained.get(name)!r:.60}, and "
                f"now it is {value!r:.60}; take the same, another --out, or --replace"
            )


# ---------------------------------------------------------------------------------- the curves


class Curves:
    """A file of JSON lines, each with ``tokens`` and ``seconds``; steps and evaluations.

    Args:
        tokens: how far the training has come: lines of what a kill has undone are dropped.
    """

    def __init__(self, path: Path, tokens: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in read_curves(path) if line["tokens"] <= tokens]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_curves(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of curves."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # a kill in the middle of the last one
            continue
    return lines


# ------------------------------------------------------------------------------ the model card


def describe_measured(measured: Mapping[str, Any]) -> str:
    """In a line, for people: the acceptance of a head, or the share of a table."""
    try:
        greedy, sampled = (shares(measured[name], 2) for name in ("greedy", "sampled"))
        return (
            f"tokens a step {measured['committed_greedy']:.2f} greedy, "
            f"{measured['committed_sampled']:.2f} at temperature 1 (by depth {greedy} | {sampled})"
        )
    except (KeyError, TypeError, ValueError):
        return "acceptance not measured" if not measured else f"measured {shown(measured):.100}"


def model_card(
    kind: str,
    target: TargetIdentity,
    num_parameters: int,
    provenance: Mapping[str, Any],
    measured: Mapping[str, Any],
) -> str:
    """The README of a trained head, in Markdown: its kind, its training and its acceptance."""
    depths = " | ".join(str(k + 1) for k in range(len(measured["greedy"])))
    greedy_anchors, sampled_anchors = measured["num_anchors"]
    rows = {name: shares(measured[name], 3, " | ") for name in ("greedy", "sampled", "overlap")}
    return f"""\
# A drafter of kind {kind} for {target.name}

A head of {num_parameters / 1e6:.1f}M parameters that guesses ahead for **{target.name}**
(fingerprint `{target.fingerprint}`) in foredraft. The target checks every guess, so the text is
exactly its own; with another target the head is refused.

```sh
foredraft generate "…" --model {target.name} --drafter {kind} --drafter-option head=THIS_FOLDER
```

## Acceptance on held-out text

| depth | {depths} |
|---{"|---" * len(measured["greedy"])}|
| greedy: right, given that all before it were | {rows["greedy"]} |
| temperature 1: chance with shared noise | {rows["sampled"]} |
| temperature 1: overlap of the distributions | {rows["overlap"]} |

Expected tokens a step of a chain of {len(measured["greedy"])}:
**{measured["committed_greedy"]:.2f}** greedy, **{measured["committed_sampled"]:.2f}** at
temperature 1 (over {greedy_anchors} and {sampled_anchors} positions of replies that were kept from
training). The head can name {measured["covered"]:.1%} of the target's mass there.

{how_it_was_made(provenance)}"""


def how_it_was_made(provenance: Mapping[str, Any]) -> str:
    """The last section of a card."""
    rows = "\n".join(f"| {name} | {shown(value)} |" for name, value in provenance.items())
    return f"## How it was made\n\n| | |\n|---|---|\n{rows}\n"


def shares(values: Sequence[float], digits: int, between: str = " ") -> str:
    """Shares in a line."""
    return between.join(f"{value:.{digits}f}" for value in values)


def shown(value: Any) -> str:
    """A value of a card's table."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
