"""Drafters that run a model: another one, a copy of the target, or some of its layers."""
