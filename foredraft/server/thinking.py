"""Settings of reasoning: a request's fields, translated to variables of the chat template."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.core.params import ThinkingLimit
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.formats.base import Format

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on or off."""
_EFFORT = "reasoning_effort"
_EFFORTS = {"none": None, "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that few templates know; the others are passed on."""
_SHORT_TEXT = re.compile(r"[\w .:/-]{0,64}")


@dataclass(frozen=True)
class Thinking:
    """A request's settings of reasoning.

    Attributes:
        is_on: whether the model reasons before it answers; None: the template's default.
        effort: reasoning effort, such as "low"; "none": no reasoning.
        budget: most tokens of reasoning; None: no limit.
        variables: of the chat template, by name.
        field: the request's field that set ``is_on``, for messages of errors.
    """

    is_on: bool | None = None
    effort: str | None = None
    budget: int | None = None
    variables: Mapping[str, bool | str] = dataclasses.field(default_factory=dict)
    field: str = "enable_thinking"

    def of_template(self, known: Set[str]) -> dict[str, bool | str]:
        """The template's variables to set.

        Args:
            known: those that it has.

        Raises:
            ConfigError: a variable is named that it has not, or its value is no short text.
        """
        for name, value in self.variables.items():
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise _wrong(f"{name} is no variable of the model's template, which has {there}")
            if isinstance(value, str) and not _SHORT_TEXT.fullmatch(value):
                raise _wrong(f"{name} is {shown(value)}; it may be a flag or a short text")
        is_on = self.is_on
        if is_on is None and self.effort is not None:
            is_on = self.effort != "none"
        found: dict[str, bool | str] = {}
        if is_on is not None:
            found = {name: is_on for name in _SWITCHES if name in known}
        effort = _EFFORTS.get(self.effort or "none", self.effort)
        if effort is not None and _EFFORT in known:
            found[_EFFORT] = effort
        return found | dict(self.variables)

    def unheeded(self, known: Set[str]) -> bool:
        """Whether a switch is asked for that the template does not have."""
        asks = self.is_on is not None or self.effort is not None
        effort_counts = self.effort not in (None, "none") and _EFFORT in known
        return asks and not (effort_counts or known & set(_SWITCHES))

    def limit(
        self, tokenizer: Tokenizer, form: Format, is_open: bool, goes_on: bool
    ) -> ThinkingLimit | None:
        """The limit of the reply's thoughts.

        Args:
            is_open: whether the prompt has opened them.
            goes_on: whether a grammar says how a reply goes on behind them.
        """
        if self.budget is None:
            return None
        end = form.end_think + form.after_thoughts if goes_on else form.stops_thinking
        begin = () if is_open else tuple(tokenizer.encode(form.think, add_special_tokens=False))
        return ThinkingLimit(
            max(self.budget, len(begin)),
            begin,
            tuple(tokenizer.encode(end, add_special_tokens=False)),
        )


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"chat_template_kwargs: {problem}", field="chat_template_kwargs")
