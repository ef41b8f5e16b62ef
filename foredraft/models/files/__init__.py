"""Checkpoints on disk: where they come from, and what is checked before any is read."""
