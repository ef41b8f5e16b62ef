"""Which drafters and which kinds of heads there are: ours, and those of other packages.

Ours are the files of this folder, of ``text``, ``model`` and ``heads``; a file's name is its
drafter's name. Other
packages add theirs with an entry point in the group ``foredraft.drafters`` that names a
`DrafterSpec`; a package is imported only when its drafter is named. Names are written with
underscores; `drafter_key` accepts dashes.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import CapabilityError, ConfigError, ForedraftError, unknown
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.trained import shipped_head
from foredraft.models.base import Target, check_taps

if TYPE_CHECKING:
    from foredraft.drafters.heads.base import HeadModule

_GROUP = "foredraft.drafters"
_PACKAGE = "foredraft.drafters"
_FOLDER = Path(__file__).parent
_FOLDERS = ("", ".text", ".model", ".heads")
SHARED = frozenset(
    {
        *("base", "spec", "registry", "trained", "text", "model", "heads"),
        *("guide", "worth", "growth", "confidence", "id_files", "per_request", "chain", "staged"),
        "shortlist",
        *("layers", "rows", "steps", "published"),
    }
)
"""Modules beside the drafters that are none."""
_PARTS = ("taps", "layers", "traits", "begin", "propose", "observe", "end")
"""Attributes of every drafter; see `Drafter`."""


def drafter_key(name: str) -> str:
    """A drafter's name as it is registered: with underscores."""
    return name.replace("-", "_")


def drafter_names() -> list[str]:
    """Every registered name, ours and other packages'. Imports none of them."""
    return sorted(_built_in().keys() | _installed().keys())


@cache
def _built_in() -> dict[str, str]:
    """Our drafters by name, each with its module."""
    return {
        module.name: f"{_PACKAGE}{folder}.{module.name}"
        for folder in _FOLDERS
        for module in pkgutil.iter_modules([str(_FOLDER / folder[1:])])
        if module.name not in SHARED
    }


@cache
def _installed() -> dict[str, EntryPoint]:
    """Drafters of other packages by name; ours cannot be replaced."""
    found = {drafter_key(entry.name): entry for entry in entry_points(group=_GROUP)}
    return {name: entry for name, entry in found.items() if name not in _built_in()}


def drafter_spec(name: str) -> DrafterSpec:
    """The spec registered under ``name``; dashes and underscores are the same.

    Raises:
        ConfigError: there is no such drafter, or its package cannot be used.
    """
    key = drafter_key(name)
    if module := _built_in().get(key):
        spec: DrafterSpec = importlib.import_module(module).DRAFTER
        return spec
    if entry := _installed().get(key):
        return _loaded(key, entry)
    raise unknown("drafter", name, drafter_names())


def usable_specs() -> dict[str, DrafterSpec]:
    """All drafters by name. Imports them; those of packages that cannot be used are left out."""
    specs = {}
    for name in drafter_names():
        with contextlib.suppress(ConfigError):  # `drafter_spec` reports its fault
            specs[name] = drafter_spec(name)
    return specs


def ready_drafters(target: Target) -> list[str]:
    """Drafters that can draft for a target as it is: with no option, draft model or prediction."""
    return [
        name
        for name, spec in usable_specs().items()
        if not spec.needs_draft_model
        and not spec.reads_prediction
        and not spec.missing_capabilities(target)
        and (
            spec.trained is None
            or spec.comes_with(target)
            or shipped_head(spec.trained, target) is not None
        )
    ]


def head_class(kind: str) -> type[HeadModule]:
    """The module of a kind of head that can be trained.

    Raises:
        ConfigError: there is no such kind, or its package cannot be used.
    """
    key = drafter_key(kind)
    if key in drafter_names():
        head = drafter_spec(key).head
        if head is not None and head.kind == key:
            return head
    raise unknown("kind of head", kind, head_kinds())


def head_kinds() -> list[str]:
    """The kinds of heads that can be trained. Imports every drafter to see."""
    specs = usable_specs().items()
    return [name for name, spec in specs if spec.head is not None and spec.head.kind == name]


def build_drafter(name: str, context: DrafterContext) -> Drafter:
    """Build a drafter after checking that the target and the options fit it.

    Raises:
        ConfigError: an unknown option, a draft model is missing, or another package's drafter
            cannot be built.
        CapabilityError: the target lacks something the drafter needs, or a layer that it taps.
    """
    key = drafter_key(name)
    spec = drafter_spec(key)
    check_options(key, context.options)
    check_draft_model(key, context.draft_model is not None)
    _check_encoders(context)
    if missing := spec.missing_capabilities(context.target):
        needed = spec.needs_in_words or f"a target with {' and '.join(missing)}"
        raise CapabilityError(
            f"drafter {key!r} needs {needed}, which {type(context.target).__name__} does not offer"
            + (" here" if spec.needs_in_words else "")
        )
    if key in _built_in():
        drafter = spec.build(context)
    else:
        drafter = _built(key, _installed()[key], spec, context)
    try:
        check_taps(drafter.taps, context.target.capabilities.taps)
    except ConfigError as error:
        raise CapabilityError(f"drafter {key!r} does not fit this target: {error}") from None
    return drafter


def _check_encoders(context: DrafterContext) -> None:
    draft = context.draft_model
    if draft is None or not draft.capabilities.encoder or context.target.capabilities.encoder:
        return
    raise CapabilityError(
        "the draft model has an encoder and the target has none, so there is no source that it "
        "could read; choose a draft model without one"
    )


def _loaded(key: str, entry: EntryPoint) -> DrafterSpec:
    try:
        spec = entry.load()
    except Exception as error:
        raise ConfigError(
            f"drafter {key!r} of {_package(entry)} cannot be imported "
            f"({type(error).__name__}: {error}); update or remove that package"
        ) from error
    if not isinstance(spec, DrafterSpec):
        raise ConfigError(
            f"drafter {key!r} of {_package(entry)} is registered as {type(spec).__name__}, not as "
            "a DrafterSpec"
        )
    return spec


def _built(key: str, entry: EntryPoint, spec: DrafterSpec, context: DrafterContext) -> Drafter:
    """Build another package's drafter; an error names the package."""
    try:
        drafter = spec.build(context)
    except ForedraftError:
        raise
    except Exception as error:
        raise ConfigError(
            f"drafter {key!r} of {_package(entry)} cannot be built "
            f"({type(error).__name__}: {error}); update that package or take another drafter"
        ) from error
    check_parts(drafter, f"drafter {key!r} of {_package(entry)} builds")
    return drafter


def check_parts(drafter: Drafter, built: str) -> None:
    """Refuse an object that lacks a part of a drafter; no base class is needed.

    Args:
        built: beginning of the message.

    Raises:
        ConfigError: it lacks one.
    """
    if missing := [part for part in _PARTS if not hasattr(drafter, part)]:
        raise ConfigError(
            f"{built} {type(drafter).__name__}, which is no drafter: it has no "
            f"{', '.join(missing)}. `foredraft.drafters.base.BaseDrafter` has defaults of most"
        )


def _package(entry: EntryPoint) -> str:
    """The package that registered a drafter, for messages."""
    package = entry.dist
    return f"package {package.name} {package.version}" if package else entry.value


def check_options(name: str, options: Iterable[str], asked: str | None = None) -> None:
    """Refuse options that the drafter does not declare, naming the nearest.

    Args:
        asked: the user's word where ``name`` was chosen for it, such as "auto".

    Raises:
        ConfigError: there is one.
    """
    known = drafter_spec(name).options
    for option in options:
        if option not in known:
            chosen = f" (which {asked!r} means here)" if asked not in (None, name) else ""
            raise unknown(f"option of drafter {drafter_key(name)!r}{chosen}", option, known)


def check_draft_model(name: str, has_one: bool) -> None:
    """Refuse a drafter whose draft model was not named.

    Raises:
        ConfigError: it needs one.
    """
    if drafter_spec(name).needs_draft_model and not has_one:
        raise ConfigError(
            f"drafter {name!r} needs a draft model: a smaller model of the same vocabulary "
            "(draft_model=… or --draft-model …)"
        )
