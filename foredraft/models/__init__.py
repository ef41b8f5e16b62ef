"""Targets: things that score a draft in one forward."""
