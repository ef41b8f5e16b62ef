"""Drafters and their registry.

Built-in drafters are the modules of this folder; what several share is in ``common``. Other
packages add theirs with an entry point in the group ``foredraft.drafters`` that names a
`DrafterSpec`. A built-in drafter's name stays its own.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from foredraft.core.errors import CapabilityError, ConfigError, ForedraftError, unknown
from foredraft.drafters.base import Drafter, DrafterContext, DrafterSpec
from foredraft.models.base import check_taps

_GROUP = "foredraft.drafters"
_NOT_DRAFTERS = {"base", "common"}
_PARTS = ("taps", "layers", "look_ahead", "begin", "propose", "observe", "end")
"""What the engine uses of every drafter."""
_log = logging.getLogger("foredraft")


def drafter_names() -> list[str]:
    """Every registered name, built-in and installed, written with underscores."""
    return sorted(_built_in() | _installed().keys())


def _built_in() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__)} - _NOT_DRAFTERS


def _installed() -> dict[str, EntryPoint]:
    """What other packages have registered, by name; a name that is taken is ignored."""
    built_in, found = _built_in(), dict[str, EntryPoint]()
    for entry in entry_points(group=_GROUP):
        key = _key(entry.name)
        if key in built_in or key in found:
            _warn_of_taken_name(entry.name, entry.value)
        else:
            found[key] = entry
    return found


@cache  # so that it is said once
def _warn_of_taken_name(name: str, value: str) -> None:
    _log.warning(
        "the drafter %r from %s is ignored: there is one of that name already; its package has to "
        "register it under another",
        name,
        value,
    )


def _key(name: str) -> str:
    return name.replace("-", "_")


def drafter_spec(name: str) -> DrafterSpec:
    """The spec registered under ``name``; dashes and underscores are the same.

    Raises:
        ConfigError: no such drafter, or its package cannot be used.
    """
    key = _key(name)
    if key in _built_in():
        spec = importlib.import_module(f"{__name__}.{key}").DRAFTER
    elif key in (installed := _installed()):
        spec = _loaded(name, installed[key])
    else:
        raise unknown("drafter", name, drafter_names())
    if not isinstance(spec, DrafterSpec):
        raise ConfigError(
            f"drafter {name!r} of {_package(installed[key])} is registered as "
            f"{type(spec).__name__}, not as a DrafterSpec"
        )
    return spec


def build_drafter(name: str, context: DrafterContext) -> Drafter:
    """Build a drafter after checking that the target and the options fit it.

    Raises:
        ConfigError: an unknown option, a draft model is missing, or another package's drafter
            cannot be built.
        CapabilityError: the target lacks something the drafter needs, or a layer that it taps.
    """
    spec = drafter_spec(name)
    check_options(name, context.options)
    if spec.lacks_draft_model(context.draft_model is not None, context.options):
        raise needs_draft_model(name)
    offered = context.target.capabilities
    missing = [
        need for need, wanted in vars(spec.needs).items() if wanted and not getattr(offered, need)
    ]
    if missing:
        raise CapabilityError(
            f"drafter {name!r} needs a target with {' and '.join(missing)}, which "
            f"{type(context.target).__name__} does not offer"
        )
    if _key(name) in _built_in():
        drafter = spec.build(context)
    else:
        drafter = _built(name, _installed()[_key(name)], spec, context)
    try:
        check_taps(drafter.taps, offered)
    except ConfigError as error:
        raise CapabilityError(f"drafter {name!r} does not fit this target: {error}") from None
    return drafter


def _loaded(name: str, entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"drafter {name!r} of {_package(entry)} cannot be imported "
            f"({type(error).__name__}: {error}); update or remove that package"
        ) from error


def _built(name: str, entry: EntryPoint, spec: DrafterSpec, context: DrafterContext) -> Drafter:
    """Build another package's drafter; what goes wrong there is said to be there."""
    try:
        drafter = spec.build(context)
    except ForedraftError:
        raise
    except Exception as error:
        raise ConfigError(
            f"drafter {name!r} of {_package(entry)} cannot be built "
            f"({type(error).__name__}: {error}); update that package or take another drafter"
        ) from error
    missing = [part for part in _PARTS if not hasattr(drafter, part)]
    if missing:
        raise ConfigError(
            f"drafter {name!r} of {_package(entry)} builds {type(drafter).__name__}, which is no "
            f"drafter: it has no {', '.join(missing)}; update that package or take another drafter"
        )
    return drafter


def _package(entry: EntryPoint) -> str:
    """Who registered it, for messages."""
    found = entry.dist
    return f"package {found.name} {found.version}" if found else entry.value


def check_options(name: str, options: Iterable[str]) -> None:
    """Refuse options that the drafter does not declare, naming the nearest.

    Raises:
        ConfigError: there is one.
    """
    known = drafter_spec(name).options
    for option in options:
        if option not in known:
            raise unknown(f"option of drafter {name!r}", option, known)


def needs_draft_model(name: str) -> ConfigError:
    """The error for a drafter whose draft model was not named."""
    return ConfigError(
        f"drafter {name!r} needs a draft model: a smaller model of the same vocabulary "
        "(draft_model=… or --draft-model …)"
    )
