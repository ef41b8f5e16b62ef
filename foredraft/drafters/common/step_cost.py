"""What a step costs by the number of its tokens, and how large a draft is worth that.

A step with n nodes takes T(n + 1) + D·d milliseconds: one forward of the target over the root and
the nodes, and d draft forwards. It commits one token plus the accepted ones. The best draft has
the most expected committed tokens per millisecond (Sequoia, arXiv 2402.12374; OPT-Tree, arXiv
2406.17276).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from foredraft.core.errors import ConfigError
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.common.options import checked_cost


@dataclass(frozen=True)
class StepCost:
    """Measured times in milliseconds.

    Attributes:
        target_ms: (tokens of the forward, time) pairs, by rising tokens; straight lines between
            them and beyond the last. None: a forward costs the same whatever its size.
        draft_ms: one draft forward.

    Raises:
        ConfigError: sizes do not rise or a time is not positive.
    """

    target_ms: tuple[tuple[int, float], ...] = ()
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.target_ms]
        if any(a >= b for a, b in pairwise([0, *sizes])):
            raise ConfigError(f"step times for {sizes} tokens; the numbers must rise from 1 on")
        for value in (self.draft_ms, *(ms for _, ms in self.target_ms)):
            if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise ConfigError(f"{value!r} is no time in milliseconds")

    @classmethod
    def parse(cls, text: str, draft_ms: float = 0.0) -> StepCost:
        """From text such as ``"1:9.5,4:13,8:18.5"``: tokens and milliseconds.

        Raises:
            ConfigError: it is not of that form.
        """
        try:
            pairs = [entry.split(":") for entry in text.split(",") if entry.strip()]
            points = tuple((int(size), float(ms)) for size, ms in pairs)
        except ValueError:
            raise ConfigError(
                f"step_ms is {text!r}; write tokens and milliseconds such as '1:9.5,4:13,8:18.5'"
            ) from None
        return cls(points, draft_ms)

    @classmethod
    def linear(cls, node_cost: float) -> StepCost:
        """Each token after the first adds ``node_cost`` plain steps."""
        return cls(((1, 1.0), (2, 1.0 + node_cost)))

    def ms(self, num_tokens: int) -> float:
        """One forward of the target over ``num_tokens``."""
        return _interpolated(self.target_ms, num_tokens)

    def best_num_nodes(self, values: Sequence[float], num_forwards: int) -> int:
        """How many of the nodes to keep, given their values in descending order; may be 0.

        Args:
            num_forwards: draft forwards that have been spent.
        """
        rates = [
            expected / (self.ms(size) + num_forwards * self.draft_ms)
            for size, expected in enumerate(accumulate(values, initial=1.0), start=1)
        ]
        return max(range(len(rates)), key=lambda num_nodes: (rates[num_nodes], num_nodes))

    def is_worth_a_forward(self, values: Sequence[float], bound: float, num_forwards: int) -> bool:
        """Whether one more draft forward can raise the rate.

        Args:
            values: what there is so far, in descending order.
            bound: the most accepted tokens that another depth can add.
            num_forwards: draft forwards spent so far.
        """
        size = self.best_num_nodes(values, num_forwards)
        expected = 1.0 + sum(values[:size])
        spent = self.ms(size + 1) + num_forwards * self.draft_ms
        return bound > 0.0 and (expected + bound) / (spent + self.draft_ms) >= expected / spent


@dataclass(frozen=True)
class LiveStepCost(StepCost):
    """Times as they are now.

    Attributes:
        forward_ms: gives the latest ones; see `DrafterContext.forward_ms`.
    """

    forward_ms: Callable[[], Sequence[tuple[int, float]]] = tuple

    def ms(self, num_tokens: int) -> float:
        return _interpolated(self.forward_ms(), num_tokens)


def _interpolated(points: Sequence[tuple[int, float]], num_tokens: int) -> float:
    if len(points) < 2 or num_tokens <= points[0][0]:
        return points[0][1] if points else 1.0
    enclosing = (pair for pair in pairwise(points) if num_tokens <= pair[1][0])
    left, right = next(enclosing, points[-2:])
    share = (num_tokens - left[0]) / (right[0] - left[0])
    return left[1] + share * (right[1] - left[1])


NODE_COST = 0.15
"""Where nothing was measured: a usual CPU."""

LINEAR_STEPS = StepCost.linear(NODE_COST)

FREE_STEPS = StepCost()
"""Without measurements: every node that fits the budget is taken."""


def step_cost(context: DrafterContext) -> StepCost:
    """What a step costs: as measured from now on, unless the option ``node_cost`` says otherwise.

    Raises:
        ConfigError: the option is not a number above 0.
    """
    given = context.options.get("node_cost")
    if given is not None:
        return StepCost.linear(checked_cost("node_cost", given))
    if context.forward_ms is None:
        return LINEAR_STEPS
    context.forward_ms()  # measures now, not in the middle of the first reply
    return LiveStepCost(forward_ms=context.forward_ms)
