"""The device that a model runs on."""

from __future__ import annotations

from foredraft.core.errors import ConfigError


def resolve_device(asked: str) -> str:
    """The device behind "auto", or the one that was asked for.

    Raises:
        ConfigError: the device does not exist here.
    """
    import torch  # slow to import

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked.startswith("cpu"):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {asked!r} was asked for and torch {torch.__version__} sees no CUDA device; "
            "use device 'cpu' or install a CUDA build of torch"
        )
    number, there = asked.partition(":")[2] or "0", torch.cuda.device_count()
    if not number.isdecimal() or int(number) >= there:
        raise ConfigError(
            f"device {asked!r} was asked for, and torch sees cuda:0 to cuda:{there - 1}"
        )
    return asked
