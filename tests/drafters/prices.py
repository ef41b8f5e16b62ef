"""Prices of drafting in tests."""

FREE_NODES = (1.0, 1.0)
"""A step costs the same whatever is drafted: every node that fits the budget is worth it."""
