"""Drafters and their registry.

Built-in drafters are the modules of this folder; what several share is in ``common``. Other
packages add theirs with an entry point in the group ``foredraft.drafters`` that names a
`DrafterSpec`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import entry_points

from foredraft.core.errors import CapabilityError, ConfigError, unknown
from foredraft.drafters.base import Drafter, DrafterContext, DrafterSpec

_GROUP = "foredraft.drafters"
_NOT_DRAFTERS = {"base", "common"}


def drafter_names() -> list[str]:
    """Every registered name, built-in and installed."""
    built_in = {module.name for module in pkgutil.iter_modules(__path__)} - _NOT_DRAFTERS
    return sorted(built_in | {entry.name for entry in entry_points(group=_GROUP)})


def drafter_spec(name: str) -> DrafterSpec:
    """The spec registered under ``name``; dashes and underscores are the same.

    Raises:
        ConfigError: no such drafter.
    """
    key = name.replace("-", "_")
    if key not in drafter_names():
        raise unknown("drafter", name, drafter_names())
    for entry in entry_points(group=_GROUP):
        if entry.name == key:
            spec = entry.load()
            break
    else:
        spec = importlib.import_module(f"{__name__}.{key}").DRAFTER
    if not isinstance(spec, DrafterSpec):
        raise ConfigError(
            f"drafter {name!r} is registered as {type(spec).__name__}, not as a DrafterSpec"
        )
    return spec


def build_drafter(name: str, context: DrafterContext) -> Drafter:
    """Build a drafter after checking that the target and the options fit it.

    Raises:
        ConfigError: an unknown option, or a draft model is missing.
        CapabilityError: the target lacks something the drafter needs.
    """
    spec = drafter_spec(name)
    check_options(name, context.options)
    if spec.needs_draft_model and context.draft_model is None:
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
    return spec.build(context)


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
