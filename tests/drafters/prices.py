"""Prices of drafting in tests."""

from foredraft.core.cost import LinearPrice

FREE_NODES = LinearPrice(0.0)
"""A step costs the same whatever is drafted: every node that fits the budget is worth it."""
