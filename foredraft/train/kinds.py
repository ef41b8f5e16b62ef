"""Options of the kinds of heads that can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from foredraft.drafters.heads.base import HeadModule


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
