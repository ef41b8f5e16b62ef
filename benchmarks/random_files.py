"""Model files of well-known shapes with random weights: for loading, and for nothing else.

Random numbers are drawn once and written again and again: a file is there at the disk's speed.
"""

from __future__ import annotations
