"""How large an audit is."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.core.errors import ConfigError


@dataclass(frozen=True)
class AuditOptions:
    """How large an audit is.

    Attributes:
        prompts: JSON lines with category and turns; a few built-in ones otherwise.
        texts: least number of replies to test.
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


@dataclass(frozen=True)
class ServerOptions:
    """Options of the audit of a server.

    Attributes:
        endpoint: address of a server with OpenAI's interface, such as http://127.0.0.1:8000.
        plain_endpoint: address of the same without speculation; else one-token requests stand in.
        served_model: the model to ask for, where a server needs its name.
        max_requests: no more requests than that are made, but for those that a busy server refused.
        in_flight: replies that are asked for at the same time: some mistakes only batches show.
        reply_tokens: of a reply.
        keep: all requests and answers go to this file, as JSON lines.
        seed: of what is drawn here and, where it follows seeds, by the server.

    Raises:
        ConfigError: a value is out of range.
    """

    endpoint: str | None = None
    plain_endpoint: str | None = None
    served_model: str | None = None
    max_requests: int = 10_000
    in_flight: int = 4
    reply_tokens: int = 48
    keep: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_requests", "reply_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 2")
        if self.in_flight < 1:
            raise ConfigError(f"in_flight is {self.in_flight}; it must be at least 1")
        if self.plain_endpoint and not self.endpoint:
            raise ConfigError("plain_endpoint goes with an endpoint that is audited; name it, too")
