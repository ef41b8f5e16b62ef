"""How drafters are found, and what is said when one is not."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import foredraft.drafters
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.drafters import (
    _package,
    _warn_of_taken_name,
    build_drafter,
    drafter_names,
    drafter_spec,
)
from foredraft.drafters.draft_model import DRAFTER as DRAFT_MODEL
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import Capabilities
from foredraft.models.table import TableModel

SPEC = DrafterSpec(build=lambda context: NoDrafter(), summary="from elsewhere")
NOT_A_SPEC = NoDrafter
EMPTY = DrafterSpec(build=lambda context: None, summary="builds nothing")  # type: ignore[arg-type]


def _fail(context: DrafterContext) -> NoDrafter:
    raise KeyError("a part")


FAILING = DrafterSpec(build=_fail, summary="fails")
HUNGRY = DrafterSpec(
    build=lambda context: NoDrafter(),
    summary="wants more than there is",
    needs=Capabilities(parts=True, layer_views=True, tree_attention=True),
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if packages had registered the specs above."""
    entries = [
        EntryPoint(name, f"{__name__}:{attribute}", "foredraft.drafters")
        for name, attribute in (
            ("elsewhere", "SPEC"),
            ("broken_entry", "NOT_A_SPEC"),
            ("hungry", "HUNGRY"),
            ("with-dash", "SPEC"),
            ("elsewhere", "HUNGRY"),
            ("draft-model", "SPEC"),
            ("empty", "EMPTY"),
            ("failing", "FAILING"),
            ("missing", "NO_SUCH_NAME"),
        )
    ]
    entries.append(EntryPoint("gone", "no_such_module_of_ours:SPEC", "foredraft.drafters"))
    monkeypatch.setattr(foredraft.drafters, "entry_points", lambda group: entries)


def test_the_built_in_ones_are_the_files_of_the_folder() -> None:
    assert {"draft_model", "ngram", "none"} <= set(drafter_names())
    assert "base" not in drafter_names()
    for name in drafter_names():
        assert drafter_spec(name).summary


def test_dashes_and_underscores_are_the_same() -> None:
    assert drafter_spec("draft-model") is drafter_spec("draft_model")


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


@pytest.mark.usefixtures("installed")
def test_a_name_that_is_taken_stays_whose_it_was(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_taken_name.cache_clear()
    assert drafter_spec("draft-model") is DRAFT_MODEL
    assert drafter_spec("elsewhere") is SPEC
    assert len(drafter_names()) == len(set(drafter_names()))
    ignored = [message.split(" is ignored")[0] for message in caplog.messages]
    assert ignored == [
        f"the drafter 'elsewhere' from {__name__}:HUNGRY",
        f"the drafter 'draft-model' from {__name__}:SPEC",
    ]


@pytest.mark.usefixtures("installed")
def test_what_the_target_lacks_is_said_in_one_sentence() -> None:
    with pytest.raises(CapabilityError, match="needs a target with parts and layer_views, which"):
        build_drafter("hungry", DrafterContext(TableModel.random(4, 0)))
