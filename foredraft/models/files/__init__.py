"""Checkpoints on disk: their sources, and their checks before any is read."""
