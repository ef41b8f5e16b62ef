"""How drafters are found, and what is said when one is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import foredraft.drafters.registry
from foredraft import LLM
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.drafters import build_drafter, drafter_names, drafter_spec, ready_drafters
from foredraft.drafters.base import DraftRow
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.registry import (
    SHARED,
    _installed,
    _package,
    head_class,
    head_kinds,
)
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.load import resolve_drafter
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions

SPEC = DrafterSpec(build=lambda context: NoDrafter(), summary="from elsewhere")
NOT_A_SPEC = NoDrafter
EMPTY = DrafterSpec(build=lambda context: None, summary="builds nothing")  # type: ignore[arg-type]


def _fail(context: DrafterContext) -> NoDrafter:
    raise KeyError("a part")


FAILING = DrafterSpec(build=_fail, summary="fails")
HUNGRY = DrafterSpec(
    build=lambda context: NoDrafter(),
    summary="wants more than there is",
    needs=("parts", "first_layers", "tree_attention"),
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if packages had registered the specs above."""
    entries = [
        EntryPoint(name, f"{__name__}:{attribute}", "foredraft.drafters")
        for name, attribute in (
            ("elsewhere", "SPEC"),
            ("broken_entry", "NOT_A_SPEC"),
            ("hungry", "HUNGRY"),
            ("with-dash", "SPEC"),
            ("draft-model", "SPEC"),
            ("empty", "EMPTY"),
            ("failing", "FAILING"),
            ("missing", "NO_SUCH_NAME"),
        )
    ]
    entries.append(EntryPoint("gone", "no_such_module_of_ours:SPEC", "foredraft.drafters"))
    monkeypatch.setattr(foredraft.drafters.registry, "entry_points", lambda group: entries)
    _installed.cache_clear()
    yield
    _installed.cache_clear()


def test_the_built_in_ones_are_the_files_of_the_folder() -> None:
    assert {"draft_model", "ngram", "none"} <= set(drafter_names())
    assert "base" not in drafter_names()
    for name in drafter_names():
        assert drafter_spec(name).summary


@pytest.mark.parametrize(
    ("asked", "near"), [("ngramm", "ngram"), ("draft", "draft_model"), ("None", "none")]
)
def test_an_unknown_name_is_answered_with_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown drafter '{asked}'; did you mean '{near}'"):
        drafter_spec(asked)


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    context = DrafterContext(TableModel.random(4, 0), options={"max_ngram": 3})
    with pytest.raises(ConfigError, match=r"option of drafter 'ngram' 'max_ngram'.*max_ngram_size"):
        build_drafter("ngram", context)


@pytest.mark.usefixtures("installed")
def test_packages_add_theirs() -> None:
    assert "elsewhere" in drafter_names()
    context = DrafterContext(TableModel.random(4, 0))
    assert isinstance(build_drafter("elsewhere", context), NoDrafter)
    assert drafter_spec("draft-model") is not SPEC  # ours cannot be replaced
    with pytest.raises(ConfigError, match="registered as type, not as a DrafterSpec"):
        drafter_spec("broken-entry")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "drafter 'empty' of .*:EMPTY builds NoneType, which is no drafter: it has no"),
        ("failing", r"drafter 'failing' of .* cannot be built \(KeyError: 'a part'\)"),
        ("missing", r"drafter 'missing' of .* cannot be imported \(AttributeError"),
        ("gone", r"drafter 'gone' of .* cannot be imported \(ModuleNotFoundError: .*remove that"),
    ],
)
def test_a_broken_package_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(name, DrafterContext(TableModel.random(4, 0)))


def test_a_drafter_of_ones_own_has_all_parts() -> None:
    class Half:
        taps, layers = (), ()

        def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
            return [NO_PROPOSAL] * len(rows)

    llm = LLM(TableModel.random(4, 0), None, LoadOptions(drafter="none"))
    with pytest.raises(ConfigError, match="Half, which is no drafter: it has no traits, begin, "):
        llm.with_drafter(llm.options, drafter=Half())  # type: ignore[arg-type]


def test_the_package_of_a_drafter_is_named() -> None:
    class Package:
        name, version = "foredraft-recall", "1.2"

    entry = EntryPoint("recall", "gone:SPEC", "foredraft.drafters")
    object.__setattr__(entry, "dist", Package())
    assert _package(entry) == "package foredraft-recall 1.2"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["with-dash", "with_dash"])
def test_packages_may_use_dashes(name: str) -> None:
    assert "with_dash" in drafter_names()
    assert drafter_spec(name) is SPEC


def test_every_file_is_a_drafter_or_shared() -> None:
    folder = Path(foredraft.drafters.registry.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/*.py"), *folder.glob("*/*/__init__.py")]
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in files}
    built_in = set(foredraft.drafters.registry._built_in())
    assert names - {"drafters"} == built_in | SHARED
    assert not built_in & SHARED


def test_kinds_of_heads_are_what_drafters_train() -> None:
    assert {"hidden_head", "eagle", "mtp", "medusa"} <= set(head_kinds())
    assert "blend" not in head_kinds()  # it drafts with a hidden_head
    for kind in head_kinds():
        assert head_class(kind).kind == kind
    with pytest.raises(ConfigError, match="unknown kind of head 'eagel'; did you mean 'eagle'"):
        head_class("eagel")
    with pytest.raises(ConfigError, match="unknown kind of head 'blend'"):
        head_class("blend")


@pytest.mark.usefixtures("installed")
def test_what_the_target_lacks_is_said_in_one_sentence() -> None:
    with pytest.raises(CapabilityError, match="needs a target with parts and first_layers, which"):
        build_drafter("hungry", DrafterContext(TableModel.random(4, 0)))


@pytest.mark.usefixtures("installed")
def test_ready_drafters_need_nothing_and_include_other_packages() -> None:
    ready = ready_drafters(TableModel.random(4, 0))
    assert {"none", "suffix", "ngram", "token_recycling", "elsewhere"} <= set(ready)
    needing = {"draft_model", "hidden_head", "blend", "table", "prediction", "hungry"}
    assert not needing & set(ready)
    assert not {"missing", "gone", "broken_entry"} & set(ready)


def test_an_option_of_auto_names_what_was_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"'suffix' \(which 'auto' means here\) 'taps'"):
        resolve_drafter(LoadOptions(drafter_options={"taps": 1}))


def test_names_are_resolved_to_underscores() -> None:
    options = LoadOptions(drafter="token-recycling")
    assert resolve_drafter(options) == "token_recycling"
