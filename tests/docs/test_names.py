"""The core path has few names, and the page that walks along it lists them all.

What is counted, and why so: a real `LLM.generate` runs on tables, with the suffix drafter and a
fixed budget, and every class of foredraft is noted whose code runs, or of which an object is made,
until the last token is committed. So no name can be left out because it was forgotten. Two kinds of
names are not counted. What runs inside a call of a *seam* (a target, a cache, a drafter, a
controller) is behind it: a reader of the path needs the seam alone, which counts as one name. And
locks, paths and compilers of `system` and `kernels` are what Python's own library is to others.
Functions are read where they stand; two of them are stations of the token, and count.

The same is counted with the default controller, a draft model and a head, whose own classes count
then. Seams are models, caches, and the runner of a head's layers, which a target offers.

Names are of two kinds. *Parts* do something and change; *records* are plain data that parts hand to
each other (frozen dataclasses and named tuples), and are read in a minute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import FrameType
from typing import Any

import pytest

from foredraft.cache.paged import Cache
from foredraft.control.base import Allowance, Controller
from foredraft.control.fixed import FixedBudget
from foredraft.core.cost import CostModel
from foredraft.core.params import SamplingParams
from foredraft.drafters.base import BaseDrafter, Drafter
from foredraft.llm import LLM
from foredraft.load import LoadedModel
from foredraft.models.base import HeadRunner, Target
from foredraft.models.native.draft_layers import NativeHeadRunner
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.docs.pages import REPO
from tests.drafters.heads import tiny_target
from tests.drafters.test_heads import KINDS
from tests.drafters.test_heads_follow_the_text import new_drafter

PAGE = REPO / "docs" / "understand" / "life-of-a-token.md"
GLOSSARY = REPO / "docs" / "understand" / "glossary.md"
MODELS: dict[type, type] = {
    TableModel: Target,
    NativeTarget: Target,
    Cache: Cache,
    NativeHeadRunner: HeadRunner,
}
SEAMS = MODELS | {BaseDrafter: Drafter, FixedBudget: Controller}
"""The implementations that the run has, and their seams."""
STATIONS = {"step", "verify"}
WIRED = {"Policy"}
"""Data that was put together before the run, and that the path reads."""
MOST_PARTS, MOST_NAMES = 15, 30
"""At revision 88f81de there were 27 parts and 53 names, with `fetch` as a third station."""
MOST_OF_ALL = 79


class Touched:
    """A profiler: the classes of foredraft that calls touch, outside of seams."""

    def __init__(self, seams: Mapping[type, type]) -> None:
        self.classes, self._seams = set[type](), seams
        self._inside: list[bool] = []

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "return" and self._inside:
            self._inside.pop()
        if event != "call":
            return
        owner = _owner(frame)
        is_inside = bool(self._inside) and self._inside[-1]
        seam = next(
            (seam for kind, seam in self._seams.items() if owner and issubclass(owner, kind)), None
        )
        if owner is not None and not is_inside:
            self.classes.add(seam or owner)
        self._inside.append(is_inside or seam is not None)


def _owner(frame: FrameType) -> type | None:
    """The class of foredraft whose method, constructor included, a frame runs."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    if not names or names[0] not in ("self", "cls", "_cls"):
        return None
    first: Any = frame.f_locals[names[0]]
    kind = first if isinstance(first, type) else type(first)
    found = next((each for each in kind.__mro__ if each.__module__.startswith("foredraft.")), None)
    is_infrastructure = found and found.__module__.split(".")[1] in ("system", "kernels")
    return None if is_infrastructure else found


def touched_by(llm: LLM, seams: Mapping[type, type]) -> dict[str, type]:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    profiler = Touched(seams)
    sys.setprofile(profiler)
    try:
        (result,) = llm.generate([[1, 2, 3, 1, 2, 3]], params)
    finally:
        sys.setprofile(None)
    assert result.stats.drafted > 0
    handed_out = {"Allowance": Allowance}  # made behind the seam of the controller, and read here
    return {kind.__name__: kind for kind in profiler.classes} | handed_out


@pytest.fixture(scope="module")
def touched() -> dict[str, type]:
    options = LoadOptions(drafter="suffix", num_draft_tokens=4)
    return touched_by(LLM(TableModel.random(9, seed=1), None, options), SEAMS)


def is_record(kind: type) -> bool:
    return (is_dataclass(kind) and kind.__dataclass_params__.frozen) or issubclass(kind, tuple)  # type: ignore[attr-defined]


def listed(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of the page."""
    section = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    return set(re.findall(r"^\| \[`(\w+)`\]", section, re.MULTILINE))


def test_the_page_lists_the_names_of_the_core_path(touched: dict[str, type]) -> None:
    records = {name for name, kind in touched.items() if is_record(kind)}
    parts = touched.keys() - records | STATIONS | WIRED
    assert listed("Parts") == parts
    assert listed("Records") == records


def test_they_are_few(touched: dict[str, type]) -> None:
    records = {name for name, kind in touched.items() if is_record(kind)}
    names = touched.keys() | STATIONS | WIRED
    assert len(names - records) <= MOST_PARTS, sorted(names - records)
    assert len(names) <= MOST_NAMES, sorted(names)


def test_they_are_few_with_the_default_controller_a_draft_model_and_a_head(
    touched: dict[str, type],
) -> None:
    first, second = (TableModel.random(9, seed=1) for _ in range(2))
    # Beside such steps drafting takes no time, however slow the profiler makes it.
    cost, options = CostModel(((1, 1e6), (8, 1.01e6))), LoadOptions(drafter="draft_model")
    pair = LLM(first, None, options, draft=LoadedModel(second), cost=cost)
    target, plain = tiny_target(), LoadOptions(drafter="none")
    head = new_drafter(KINDS["hidden_head"], target)
    headed = LLM(target, None, plain, cost=cost).with_drafter(plain, drafter=head)
    found = touched | touched_by(pair, MODELS) | touched_by(headed, MODELS)
    assert {"AdaptiveBudget", "DraftModelDrafter", "StepDrafter"} <= found.keys()
    names = found.keys() | STATIONS | WIRED
    assert len(names) <= MOST_OF_ALL, sorted(names)
    assert f"{MOST_OF_ALL} names" in PAGE.read_text()


def test_each_is_in_the_glossary(touched: dict[str, type]) -> None:
    text = GLOSSARY.read_text()
    assert not [name for name in sorted(touched) if f"`{name}`" not in text]
