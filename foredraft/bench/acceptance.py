"""Acceptance lengths by category, as SPEED-Bench (arXiv 2604.09557) and InferenceX count them.

Every turn goes through the chat template, greedily, and the model's own answers stand between the
turns. The acceptance length of a category is ``1 + accepted / drafts`` over all its steps that
drafted; the overall figure is the mean of the categories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from foredraft.bench.measure import measure
from foredraft.bench.prompts import BenchPrompt
from foredraft.bench.record import Setting
from foredraft.bench.report import Report, Table
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.text.prompts import Message

CAP = 4096
"""Most tokens of a reply, by the protocol."""
ALL = "mean of categories"
_DRAWS, _BAND = 1000, (2.5, 97.5)
_FIGURES = {
    "acceptance_length": ("acceptance length by category", ".2f"),
    "acceptance_rate": ("accepted of the drafted tokens", ".0%"),
    "tokens_per_s": ("tokens a second, without prefill", ".1f"),
}
_WIDE, _SHORT = 60, 5


@dataclass(frozen=True)
class Counts:
    """Sums over the replies to one prompt.

    Attributes:
        drafts: steps that drafted.
        seconds: of decoding ``tokens``.
    """

    category: str
    drafts: int
    drafted: int
    accepted: int
    tokens: int
    seconds: float


def converse(
    llm: LLM, setting: Setting, prompts: Sequence[BenchPrompt], params: SamplingParams,
    advance: Callable[[str], None],
) -> list[Counts]:  # fmt: skip
    """Answer all turns of all prompts, one after the other, with one setting."""
    view = llm.with_drafter(setting.load_options(llm.options))
    found = []
    for prompt in prompts:
        messages: list[Message] = []
        runs = []
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            runs.append(measure(view.stream_chat(messages, params)))
            messages.append({"role": "assistant", "content": runs[-1].result.text})
        stats = [run.result.stats for run in runs]
        found.append(
            Counts(
                prompt.category,
                sum(each.steps - sum(each.plain_steps.values()) for each in stats),
                sum(each.drafted for each in stats),
                sum(each.accepted for each in stats),
                sum(len(run.result.token_ids) - run.num_first for run in runs),
                sum(run.total_s - run.first_event_s for run in runs),
            )
        )
        advance(f"{setting.name}, {setting.num_draft_tokens} drafted: {prompt.category}")
    return found


def _interval(groups: Sequence[Sequence[Counts]]) -> list[float]:
    """95 % of bootstraps over the prompts of each category hold the mean of the categories."""
    draw, sums = np.random.default_rng(0), np.zeros(_DRAWS)
    for group in groups:
        pairs_N2 = np.array([(each.accepted, each.drafts) for each in group])
        drawn_D2 = pairs_N2[draw.integers(len(group), size=(_DRAWS, len(group)))].sum(1)
        sums += 1.0 + drawn_D2[:, 0] / np.maximum(1, drawn_D2[:, 1])
    low, high = np.percentile(sums / len(groups), _BAND)
    return [float(low), float(high)]


def figures(setting: Setting, counts: Sequence[Counts]) -> Iterator[dict[str, Any]]:
    """A row for each category, and one for their mean with its interval."""
    groups: dict[str, list[Counts]] = defaultdict(list)
    for each in counts:
        groups[each.category].append(each)
    rows: list[dict[str, Any]] = [
        {
            "drafter": setting.name,
            "draft_length": setting.num_draft_tokens,
            "category": name,
            "prompts": len(group),
            "acceptance_length": 1.0
            + sum(c.accepted for c in group) / max(1, sum(c.drafts for c in group)),
            "acceptance_rate": sum(c.accepted for c in group)
            / max(1, sum(c.drafted for c in group)),
            "tokens_per_s": sum(c.tokens for c in group) / max(1e-9, sum(c.seconds for c in group)),
        }
        for name, group in groups.items()
    ]
    means = {name: fmean(row[name] for row in rows) for name in list(rows[0])[4:]}
    total = {"category": ALL, "prompts": len(counts), "interval": _interval([*groups.values()])}
    yield from rows
    yield rows[0] | total | means


def _fitting(titles: Sequence[str]) -> Sequence[str]:
    """Titles of columns that fit on a terminal, where they are cut and stay different."""
    short = [title[:_SHORT] for title in titles]
    is_wide = sum(len(title) + 1 for title in titles) > _WIDE
    return short if is_wide and len({*short}) == len(short) else titles


def acceptance_report(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> Report:
    """The matrices of SPEED-Bench: a row for each drafter and draft length, a column for each
    category, and their mean in the last one."""
    names = [*sorted({row["category"] for row in rows} - {ALL}), ALL]
    own = (f"{name} (category)" if name in ("drafts", "mean") else name for name in names[:-1])
    titles = _fitting([*own, "mean"])
    tables = []
    for figure, (title, form) in _FIGURES.items():
        lines: dict[str, dict[str, Any]] = {}
        for row in rows:
            setting = f"{row['drafter']} {row['draft_length']}"
            lines.setdefault(setting, {})[f"of{names.index(row['category'])}"] = row[figure]
        shown = [{"setting": setting} | line for setting, line in lines.items()]
        columns = {name: f"{{of{n}:{form}}}" for n, name in enumerate(titles)}
        tables.append(Table("", shown, {"drafts": "{setting}"} | columns, title))
    said = [
        "{drafter}, {draft_length} drafted: {acceptance_length:.2f} "
        "[{interval[0]:.2f}, {interval[1]:.2f}], acceptance rate {acceptance_rate:.0%}, "
        "{tokens_per_s:.1f} tokens/s".format(**row)
        for row in rows
        if row["category"] == ALL
    ]
    return Report([*tables, Table("acceptance", rows)], about, said)


def write_golden(
    path: Path, name: str, rows: Sequence[dict[str, Any]], about: str, *, thinks: bool
) -> None:
    """The curve in the form of InferenceX' golden files: of coding, or of all categories.

    Args:
        thinks: whether the replies begin with thoughts.

    Raises:
        ConfigError: the file cannot be written.
    """
    categories = {row["category"] for row in rows}
    kind = "coding" if "coding" in categories else ALL
    curve = [row for row in rows if row["category"] == kind]
    lines = [
        "# Acceptance Length (AL) reference values, by the protocol of SPEED-Bench.",
        f"# dataset: {kind} | {about}",
        "# AL = 1 + accepted draft tokens / drafts",
        "# key = num_speculative_tokens; value = AL",
        f"{name}:",
        f"  thinking_{'on' if thinks else 'off'}:",
        *(f"    {row['draft_length']}: {row['acceptance_length']:.2f}" for row in curve),
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def synthetic_report(length: float, cost: CostModel, loads: Sequence[int], context: int) -> Report:
    """Gains of a drafter with this acceptance length that takes no time, at each draft length."""
    rows = [
        {"drafted": drafted}
        | {
            f"at{load}": length
            * cost.ms([(1, context)] * load)
            / cost.ms([(1 + drafted, context)] * load)
            for load in loads
        }
        for drafted in range(1, 9)
        if drafted + 1 >= length
    ]
    columns = {"drafted": "{drafted:d}"} | {f"{n} at once": f"{{at{n}:.2f}}x" for n in loads}
    title = f"gain at an acceptance length of {length:g}, drafting left out"
    return Report([Table("synthetic", rows, columns, title)], {"acceptance_length": length})
