"""Settings of the server, from the command line or the environment (``FOREDRAFT_…``)."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Names = Annotated[tuple[str, ...], NoDecode]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

_log = logging.getLogger("foredraft.server")
_WITHOUT_LIMIT = 1 << 30
_NEVER = 1e9
"""Seconds."""


class ServerSettings(BaseSettings):
    """Where the server listens, whom it lets in, and its limits. Times are in seconds.

    This is the one list of defaults: the options of `foredraft serve` and the table in the docs are
    made of it.
    """

    model_config = SettingsConfigDict(
        env_prefix="FOREDRAFT_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Address to bind to; other machines reach the server only if it is not loopback."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: SecretStr | None = None
    """API keys, separated by commas."""
    api_key_file: Path | None = None
    """File of API keys, one a line, or name:key. The log names a key by its name, or by its number
    in the file. Empty lines and those that begin with # do not count."""
    allow_no_key: bool = False
    """Serve other machines without any key."""
    allowed_hosts: Names = ()
    """Names by which a server without keys may be called, beside addresses and localhost. A web
    page elsewhere that points its own name at this machine (DNS rebinding) is refused."""
    cors_origins: Names = ()
    """Origins of web pages that may call the server from a browser."""
    ssl_certfile: Path | None = None
    """Certificate, for https."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate."""
    served_model_names: Names = ()
    """Names by which clients may call the model; its own name when empty."""
    allow_priority: bool = False
    """Clients may say whose request goes first; otherwise the keys take turns."""
    page: Literal["auto", "on", "off"] = "auto"
    """Serve the page at /, which runs forwards of its own; auto: only to this machine."""

    max_waiting: Annotated[int, Field(ge=0)] = 256
    """Requests that wait beside those in the batch; further ones get 429."""
    max_live_per_key: Annotated[int, Field(ge=0)] = 0
    """Replies of one key that run or wait at a time; further ones get 429. 0: no limit."""
    max_connections: Count = 1024
    """Connections; requests on further ones get 503."""
    max_body_bytes: Count = 4 << 20
    """Bytes of a request's body."""
    max_header_bytes: Count = 32 << 10
    """Bytes of a request's headers."""
    max_depth: Count = 64
    """Depth of lists and objects in a body."""
    max_n: Count = 8
    """Replies to one prompt."""
    max_replies: Count = 64
    """Prompts times n of one request."""
    max_messages: Count = 1024
    """Messages or items of a conversation."""
    max_tools: Count = 128
    """Tools of a request."""
    max_stop: Count = 16
    """Stop strings of a request, and bad words."""
    max_stop_characters: Count = 1024
    """Characters of all its stop strings, and of all its bad words."""
    max_logit_bias: Count = 300
    """Tokens that a request biases."""
    max_schema_bytes: Count = 64 << 10
    """Characters of a schema or grammar, and of all tools."""

    header_timeout: Positive = 10.0
    """Time for a client to send the headers of a request."""
    body_timeout: Positive = 30.0
    """Time for a client to send the body."""
    request_timeout: Positive = 600.0
    """Time of a reply from its first token to its end; then it ends with finish reason length.
    Before the first token: time in which the engine does no step."""
    send_timeout: Positive = 30.0
    """How long a client may leave unread what it was sent."""
    drain_timeout: Positive = 30.0
    """How long replies under way may go on after SIGTERM."""
    keep_alive_timeout: Count = 30
    """How long a connection stays open without a request."""
    ping_interval: Positive = 15.0
    """Time between the comments that keep a silent stream open."""

    give_back_after: Positive = 600.0
    """Time without a request after which cached prompts are given up, and memory is returned to the
    system."""
    prove_every: Annotated[int, Field(ge=0)] = 0
    """One in this many steps that drafted is repeated without drafts while the server is idle, and
    compared; 0: none."""
    request_metrics: Literal["none", "summary", "detailed"] = "summary"
    """Figures of speculation in each reply."""
    reasoning_content: bool = True
    """Send thoughts of chat as ``reasoning_content`` as well, the name that most clients read."""
    tool_format: str = "auto"
    """How the model writes tool calls, such as hermes; auto: its chat template says."""
    share_between_keys: bool = False
    """Text of one key may draft for another."""
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Where a span of each request is sent; without it no spans are made."""

    @field_validator("allowed_hosts", "cors_origins", "served_model_names", mode="before")
    @classmethod
    def _names(cls, names: Any) -> Any:
        """Names of the environment are separated by commas."""
        if isinstance(names, str):
            return tuple(name for name in map(str.strip, names.split(",")) if name)
        return names

    @field_validator("port", mode="before")
    @classmethod
    def _without_kubernetes(cls, port: Any) -> Any:
        """Kubernetes tells each container of a Service named foredraft by this variable."""
        if isinstance(port, str) and port.startswith(("tcp://", "udp://")):
            default = cls.model_fields["port"].default
            _log.warning(
                "FOREDRAFT_PORT is %.100r: Kubernetes sets it for a Service named foredraft; it is "
                "ignored, and the port is %d (enableServiceLinks: false leaves it out)",
                port,
                default,
            )
            return default
        return port

    @property
    def has_page(self) -> bool:
        """Whether the page is served."""
        return self.page == "on" or (self.page == "auto" and self.is_loopback)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can call."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def address(self, port: int) -> str:
        """The server's URL for a browser on this machine.

        Args:
            port: the bound port, which the system chooses for ``port`` 0.
        """
        scheme = "https" if self.ssl_certfile else "http"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def local_settings(**given: Any) -> ServerSettings:
    """Settings of a server that its own process calls: no keys, and next to no limits.

    The environment is not read: its variables are meant for `foredraft serve`.
    """
    counts = ("max_waiting", "max_body_bytes", "max_n", "max_replies", "max_messages", "max_tools")
    values: dict[str, Any] = {"_env_prefix": "no variable: "}
    values |= dict.fromkeys(counts, _WITHOUT_LIMIT)
    values |= dict.fromkeys(("request_timeout", "body_timeout"), _NEVER)
    return ServerSettings(**values | given)
