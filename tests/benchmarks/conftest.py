"""The tiny checkpoint that the tests of the command line use."""

from tests.cli.conftest import checkpoint

__all__ = ["checkpoint"]
