"""What can be set about the server, from the command line or the environment (``FOREDRAFT_…``)."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Names = Annotated[tuple[str, ...], NoDecode]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class ServerSettings(BaseSettings):
    """Where the server listens, whom it lets in, and its limits. Times are in seconds.

    Attributes:
        host: address to bind to; others than this machine reach it only if it is not loopback.
        api_key: keys from the environment (FOREDRAFT_API_KEY), separated by commas.
        api_key_file: one key a line; empty lines and those that begin with # do not count.
        allow_no_key: serve other machines without any key.
        allowed_hosts: names by which the server may be called, beside addresses and localhost. A
            web page elsewhere that points its own name at this machine (DNS rebinding) is refused.
        cors_origins: web pages of these origins may call the server from a browser.
        served_model_names: what clients may call the model; its own name when empty.
        max_waiting: requests that wait beside those in the batch; further ones get 429.
        max_body_bytes, max_header_bytes, max_depth: of a request; depth is of lists and objects.
        max_replies: prompts times n of one request.
        header_timeout, body_timeout: for a client to send them.
        request_timeout: of a reply, from its beginning to its end.
        send_timeout: how long a client may leave what it was sent unread.
        drain_timeout: how long replies under way may go on after SIGTERM.
        ping_interval: between comments that keep a silent stream open.
        request_metrics: what a reply says of speculation.
        reasoning_content: whether thoughts are sent under their old name as well.
        share_between_keys: whether text of one key may draft for another.
        otlp_traces_endpoint: where a span of each request is sent; to nobody unless it is given.
    """

    model_config = SettingsConfigDict(env_prefix="FOREDRAFT_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    allow_no_key: bool = False
    allowed_hosts: Names = ()
    cors_origins: Names = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    served_model_names: Names = ()

    max_waiting: Annotated[int, Field(ge=0)] = 256
    max_connections: Count = 1024
    max_body_bytes: Count = 4 << 20
    max_header_bytes: Count = 32 << 10
    max_depth: Count = 64
    max_n: Count = 8
    max_replies: Count = 64
    max_messages: Count = 1024
    max_tools: Count = 128
    max_stop: Count = 16
    max_stop_characters: Count = 1024
    max_logit_bias: Count = 300
    max_schema_bytes: Count = 64 << 10

    header_timeout: Positive = 10.0
    body_timeout: Positive = 30.0
    request_timeout: Positive = 600.0
    send_timeout: Positive = 30.0
    drain_timeout: Positive = 30.0
    keep_alive_timeout: Count = 30
    ping_interval: Positive = 15.0

    request_metrics: Literal["none", "summary", "detailed"] = "summary"
    reasoning_content: bool = False
    share_between_keys: bool = False
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine can call."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def address(self, port: int) -> str:
        """Where a browser on this machine finds it.

        Args:
            port: the one that is listened on, which for ``port`` 0 the system has chosen.
        """
        scheme = "https" if self.ssl_certfile else "http"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
