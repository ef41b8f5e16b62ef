"""The number of draft nodes with the most expected tokens for their time.

A step with n nodes takes the row's price of n plain steps, and d draft forwards before it. It
commits one token plus the accepted ones. The best draft has the most expected committed tokens by
time (Sequoia, arXiv 2402.12374; OPT-Tree, arXiv 2406.17276).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from foredraft.core.cost import Prices, price_of


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
