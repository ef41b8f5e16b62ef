"""How large an audit is."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.errors import ConfigError


@dataclass(frozen=True)
class AuditOptions:
    """How large an audit is.

    Attributes:
        prompts: JSON lines with id, category and turns; a few built-in ones otherwise.
        texts: at least so many replies are looked at.
        detect: the smallest shift to be found: a share of tokens that are not the model's own.
        alpha: the chance of a false alarm, of all tests together.
        power: the chance that a shift of that size is found.
        time_limit: seconds after which no further text is begun.
        plant_faults: known mistakes are planted, and looked for.

    Raises:
        ConfigError: a value is out of range.
    """

    prompts: str | None = None
    texts: int = 16
    detect: float = 0.02
    alpha: float = 1e-4
    power: float = 0.99
    time_limit: float = 600.0
    plant_faults: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("detect", 0.0, 1.0), ("alpha", 0.0, 0.5), ("power", 0.5, 1.0)):
            if not low < (value := getattr(self, name)) < high:
                raise ConfigError(f"{name} is {value}; it must lie between {low} and {high}")
        if self.texts < 1:
            raise ConfigError(f"texts is {self.texts}; it must be at least 1")
        if not self.time_limit > 0.0:
            raise ConfigError(f"time_limit is {self.time_limit}; it must be some seconds")
