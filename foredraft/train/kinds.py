"""Which kinds of heads there are: the folders of `foredraft.drafters` that have a ``module.py``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from foredraft.drafters.common.head import HeadModule

_DRAFTERS = Path(__file__).parents[1] / "drafters"


def head_kinds() -> list[str]:
    """Names of all that can be trained. Imports nothing."""
    return sorted(path.parent.name for path in _DRAFTERS.glob("*/module.py"))


def module_class(kind: str) -> type[HeadModule]:
    """The module of a kind; dashes and underscores are the same.

    Raises:
        ConfigError: no such kind.
    """
    key = kind.replace("-", "_")
    if key not in head_kinds():
        raise unknown("kind of head", kind, head_kinds())
    module: type[HeadModule] = importlib.import_module(f"foredraft.drafters.{key}.module").MODULE
    return module


def checked_options(module: type[HeadModule], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the kind takes; ``5,14,29`` and ``29,`` become lists of numbers.

    Raises:
        ConfigError: it has no such option.
    """
    known = module.option_help()
    for name in options:
        if name not in known and not known:
            raise ConfigError(f"{module.kind} has no options, and {name!r} was given")
        if name not in known:
            raise unknown(f"option of {module.kind!r}", name, known)
    return {name: _as_list(value) for name, value in options.items()}


def _as_list(value: Any) -> Any:
    if not isinstance(value, str) or "," not in value:
        return value
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        return value
