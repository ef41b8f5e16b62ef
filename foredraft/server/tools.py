"""The tools that a request offers, and those of which one must be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.server.formats.base import Tool, name_of


@dataclass(frozen=True)
class ToolUse:
    """The tools and the tool choice of a request.

    Attributes:
        tools: that the model is shown.
        forced: names of which one must be called; empty: the model decides.
        parallel: whether a reply may call several.
    """

    tools: tuple[Tool, ...] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def to_call(self) -> tuple[Tool, ...]:
        """The tools of which one must be called."""
        return tuple(tool for tool in self.tools if name_of(tool) in self.forced)


NO_TOOLS = ToolUse()


def read_tools(fields: Mapping[str, Any], takes_tools: bool) -> ToolUse:
    """The tools that a request offers to the model.

    Args:
        fields: ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of chat.
        takes_tools: whether the model's chat template has a place for them.

    Raises:
        ConfigError: a malformed tool or choice, or a model that knows no tools.
    """
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise ConfigError(f"tools must be a list, not {shown(tools)}", field="tools")
    checked = tuple(_checked(number, tool) for number, tool in enumerate(tools))
    choice = fields.get("tool_choice")
    if choice is None:
        choice = "auto" if checked else "none"
    names = tuple(map(name_of, checked))
    forced = _forced(choice, names)
    if choice == "none" or not checked:
        return NO_TOOLS
    if not takes_tools:
        raise ConfigError(
            "tools are not supported by this model: its chat template has no place for them; leave "
            'them out, or set tool_choice to "none"',
            field="tools",
        )
    return ToolUse(checked, forced, fields.get("parallel_tool_calls") is not False)


def _checked(number: int, tool: object) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if (
        isinstance(tool, Mapping)
        and tool.get("type") == "function"
        and isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), Mapping | None)
    ):
        return tool
    raise ConfigError(
        f"tools[{number}] is {shown(tool)}; it must be of type function, with a function that has "
        "a name and perhaps parameters, a schema",
        field="tools",
    )


def _forced(choice: object, names: Sequence[str]) -> tuple[str, ...]:
    if choice in ("none", "auto"):
        return ()
    if choice == "required":
        wanted = list(names)
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        wanted = [str(function.get("name"))] if isinstance(function, Mapping) else []
    else:
        raise ConfigError(
            f"tool_choice is {shown(choice)}; known are none, auto, required, and one function by "
            "name",
            field="tool_choice",
        )
    if not wanted or not set(wanted) <= set(names):
        known = ", ".join(names) or "none"
        raise ConfigError(
            f"tool_choice is {shown(choice)}, and the tools are {known}", field="tool_choice"
        )
    return tuple(wanted)
