"""Measurements as commands: interleaved runs, medians and ratios, with where they came from."""
