"""How many draft nodes are worth their price.

A step with n nodes takes the row's price of n plain steps, and d draft forwards before it. It
commits one token plus the accepted ones. The best draft has the most expected committed tokens by
time (Sequoia, arXiv 2402.12374; OPT-Tree, arXiv 2406.17276).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from foredraft.core.checks import checked_real
from foredraft.core.cost import Prices, price_of
from foredraft.drafters.spec import DrafterContext

NODE_COST = MappingProxyType(
    {"node_cost": "time one more draft token adds to a step, in plain steps (measured)"}
)


def asked_prices(context: DrafterContext) -> Prices | None:
    """The prices that the option of `NODE_COST` asks for; None leaves them to the controller.

    Raises:
        ConfigError: the option is not a number, 0 or more.
    """
    given = context.options.get("node_cost")
    return None if given is None else (1.0, 1.0 + checked_real("node_cost", given, 0.0))


@dataclass(frozen=True)
class Worth:
    """Weighs nodes and draft forwards against their time.

    Attributes:
        prices: of the row's nodes.
        round_cost: time of a draft forward, in plain steps.
    """

    prices: Prices
    round_cost: float = 0.0

    def best_num_nodes(self, values: Sequence[float], num_forwards: int) -> int:
        """The number of nodes to keep, given their values in descending order; may be 0.

        Args:
            values: the chance of each that it is accepted.
            num_forwards: draft forwards that have been spent.
        """
        rates = [
            expected / (price_of(self.prices, num_nodes) + num_forwards * self.round_cost)
            for num_nodes, expected in enumerate(accumulate(values, initial=1.0))
        ]
        return max(range(len(rates)), key=lambda num_nodes: (rates[num_nodes], num_nodes))

    def is_worth_a_forward(self, values: Sequence[float], bound: float, num_forwards: int) -> bool:
        """Whether one more draft forward can raise the rate.

        Args:
            values: of the nodes so far, in descending order.
            bound: the most accepted tokens that another depth can add.
            num_forwards: draft forwards spent so far.
        """
        size = self.best_num_nodes(values, num_forwards)
        expected = 1.0 + sum(values[:size])
        spent = price_of(self.prices, size) + num_forwards * self.round_cost
        return bound > 0.0 and (expected + bound) / (spent + self.round_cost) >= expected / spent
