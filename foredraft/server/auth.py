"""Who may call: API keys, and the names by which the server may be called."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.core.errors import ConfigError
from foredraft.server.errors import ApiError
from foredraft.server.settings import ServerSettings

_MIN_KEY = 8
_ID_DIGITS = 12


class ApiKeys:
    """The keys that open the server, kept as digests.

    Args:
        keys: as clients send them.

    Raises:
        ConfigError: one is too short to be a secret, or holds characters that no header carries.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: list[bytes] = []
        for number, key in enumerate(keys, 1):
            if len(key) < _MIN_KEY or not re.fullmatch(r"[!-~]+", key):
                raise ConfigError(
                    f"API key {number} is no secret that a header can carry: it must have "
                    f"{_MIN_KEY} or more printable ASCII characters"
                )
            self._digests.append(_digest(key))

    @classmethod
    def of(cls, settings: ServerSettings) -> ApiKeys:
        """The keys of file and environment.

        Raises:
            ConfigError: the file cannot be read, a key is unusable, or the server is open to other
                machines without any.
        """
        keys: list[str] = []
        if settings.api_key is not None:
            keys += [key.strip() for key in settings.api_key.get_secret_value().split(",")]
        if settings.api_key_file is not None:
            try:
                lines = settings.api_key_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the API keys {settings.api_key_file}: {error}") from error
            named = [line.strip() for line in lines if not line.lstrip().startswith("#")]
            keys += [key for key in named if key]
            if not any(named):
                raise ConfigError(f"{settings.api_key_file} holds no API key")
        if not (keys or settings.is_loopback or settings.allow_no_key):
            raise ConfigError(
                f"host {settings.host} can be reached from other machines: give --api-key-file, or "
                "--allow-no-key if anybody may use it"
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def id_of(self, key: str) -> str | None:
        """A name for the key, from which it cannot be told; None if it opens nothing.

        Every digest is compared, and each in constant time.
        """
        asked = _digest(key)
        matches = [hmac.compare_digest(asked, digest) for digest in self._digests]
        return asked.hex()[:_ID_DIGITS] if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Gate:
    """Middleware that lets nobody in without a key, and no web page that goes by another name.

    Every path wants a key but those that ``is_open`` names. The key's id goes into the request's
    state as ``key_id``.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        settings: ServerSettings,
        is_open: Callable[[str], bool],
    ) -> None:
        self._app, self._keys, self._is_open = app, keys, is_open
        self._hosts = {host.lower() for host in settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            scope.setdefault("state", {})["key_id"] = self._check_key(scope["path"], headers)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not (name == "localhost" or name in self._hosts or _is_address(name)):
            called = f"is not called {name!r:.100}" if name else "must be called by one name"
            raise ApiError(
                403,
                f"the server {called}: use its address, or start it with --allowed-host",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: Headers) -> str | None:
        if not self._keys:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        key_id = self._keys.id_of(key) if key else None
        if key_id is None and not self._is_open(path):
            what = "the API key is not known here" if key else "an API key is needed"
            raise ApiError(
                401,
                f"{what}: send it as 'Authorization: Bearer …'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key_id


def _host_name(host: str) -> str | None:
    """The name in a Host header, without its port."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?", host)
    return found[1].strip("[]").lower().rstrip(".") if found else None


def _is_address(name: str) -> bool:
    """Names can be made to point anywhere; an address is where the client really went."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
