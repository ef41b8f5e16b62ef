"""How large a draft is worth its price.

A step with n nodes takes the row's price of n milliseconds, and d draft forwards before it. It
commits one token plus the accepted ones. The best draft has the most expected committed tokens per
millisecond (Sequoia, arXiv 2402.12374; OPT-Tree, arXiv 2406.17276).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from foredraft.core.cost import LinearPrice, Price
from foredraft.drafters.spec import DrafterContext, checked_cost


def asked_price(context: DrafterContext) -> Price | None:
    """The price that the option ``node_cost`` asks for; None leaves it to the controller.

    Raises:
        ConfigError: the option is not a number above 0.
    """
    given = context.options.get("node_cost")
    return None if given is None else LinearPrice(checked_cost("node_cost", given))


@dataclass(frozen=True)
class KnownPrice:
    """A `Price` that was asked once for every number of nodes up to a budget.

    Attributes:
        by_nodes: milliseconds, beginning with no node.
    """

    by_nodes: tuple[float, ...]

    @classmethod
    def of(cls, price: Price, budget: int) -> KnownPrice:
        return cls(tuple(price.ms(num_nodes) for num_nodes in range(budget + 1)))

    def ms(self, num_nodes: int) -> float:
        return self.by_nodes[num_nodes]


@dataclass(frozen=True)
class Worth:
    """Weighs nodes and draft forwards against their time.

    Attributes:
        price: of the row's nodes.
        draft_ms: one draft forward.
    """

    price: Price
    draft_ms: float = 0.0

    def best_num_nodes(self, values: Sequence[float], num_forwards: int) -> int:
        """How many of the nodes to keep, given their values in descending order; may be 0.

        Args:
            values: the chance of each that it is accepted.
            num_forwards: draft forwards that have been spent.
        """
        rates = [
            expected / (self.price.ms(num_nodes) + num_forwards * self.draft_ms)
            for num_nodes, expected in enumerate(accumulate(values, initial=1.0))
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
        spent = self.price.ms(size) + num_forwards * self.draft_ms
        return bound > 0.0 and (expected + bound) / (spent + self.draft_ms) >= expected / spent
