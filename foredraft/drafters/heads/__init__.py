"""Drafters that were trained for their target, and their shared code."""
