"""Drafters that were trained for their target, and what they share."""
