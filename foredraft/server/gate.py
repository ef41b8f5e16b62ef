"""Middleware before the routes: API keys, limits of bodies, and the access log."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.core.errors import ConfigError
from foredraft.server.errors import ApiError
from foredraft.server.metrics import Metrics
from foredraft.server.settings import ServerSettings
from foredraft.system.priority import Rests

_MIN_KEY = 8
_NAMED_KEY = re.compile(r"([A-Za-z][\w.-]{0,63}):(\S+)")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_NO_BRACKETS = bytes({*range(256)} - {*b"[]{}"})
_PIECE = 64 << 10
"""Bytes of a body that are looked at in one call."""
_MOST_PARTS = 300_000
"""Strings, fields, lists, objects and fractions of a body: to parse them takes some 60 ms."""
_log = logging.getLogger("foredraft.server.access")
REQUEST_IDS = ("x-request-id", "request-id")
"""Headers with the id of a request: OpenAI's clients read the first, Anthropic's the second."""
_UNKNOWN = "unknown"
_DISCARD_SECONDS = 2.0


class ApiKeys:
    """The keys that open the server, kept as digests under a secret of this process.

    The id of a key is its name, or its number where it has none. So an id in a log reveals nothing
    of the key, and stays the same when the server starts again.

    Args:
        keys: as clients send them, or ``name:key``.

    Raises:
        ConfigError: one is too short to be a secret, or holds characters that no header carries, or
            two have one name.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests: list[bytes] = []
        self._ids: list[str] = []
        for number, line in enumerate(keys, 1):
            named = _NAMED_KEY.fullmatch(line)
            key_id, key = (named[1], named[2]) if named else (f"key-{number}", line)
            if key_id in self._ids:
                raise ConfigError(f"two API keys are named {key_id!r}: give each a name of its own")
            if len(key) < _MIN_KEY or not re.fullmatch(r"[!-~]+", key):
                raise ConfigError(
                    f"API key {number} is no secret that a header can carry: it must have "
                    f"{_MIN_KEY} or more printable ASCII characters"
                )
            self._digests.append(self._digest(key))
            self._ids.append(key_id)

    @classmethod
    def of(cls, settings: ServerSettings) -> ApiKeys:
        """The keys that the file and the environment hold.

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
        """The id of a key; None if the key is not known.

        The key is compared with every known one, each time in constant time.
        """
        digest = self._digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return self._ids[matches.index(True)] if any(matches) else None

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")


class Gate:
    """Middleware that checks the API key, or, without keys, the host name that the client called.

    A web page that points its own name at this machine has no key, so keys make the check of names
    needless: behind a proxy or in a cluster a server has many names. Every path requires a key,
    except where ``is_open`` says otherwise. The id of the key becomes ``key_id`` in the request's
    state.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        settings: ServerSettings,
        is_open: Callable[[str], bool],
    ) -> None:
        self._app, self._keys, self._is_open = app, keys, is_open
        self._max_header_bytes = settings.max_header_bytes
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
            self._check_size(scope)
            if not self._keys:
                self._check_host(headers)
            scope.setdefault("state", {})["key_id"] = self._check_key(scope["path"], headers)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_size(self, scope: Scope) -> None:
        """uvicorn bounds only headers that come in several pieces."""
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise ApiError(
                431,
                f"the headers have {size} bytes; this server allows {self._max_header_bytes}",
                code="headers_too_large",
                headers={"Connection": "close"},
            )

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
        token = token.strip() if scheme.lower() == "bearer" else ""
        key = token or headers.get("x-api-key") or headers.get("api-key", "")  # Azure's
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
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?", host)
    return match[1].strip("[]").lower().rstrip(".") if match else None


def _is_address(name: str) -> bool:
    """Whether a host is an IP address: unlike a name, it cannot be made to point elsewhere."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class BodyLimits:
    """Middleware that reads the whole body and bounds its size, depth and time.

    The content type must be JSON: a web page can send text to any server without a preflight, but
    not JSON.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            try:
                body = await self._read(request)
            except ApiError:
                await _discard(request, 4 * self._settings.max_body_bytes)
                raise
            await self._check(request.headers, body)
        except ClientDisconnect:
            return
        except ApiError as error:
            error.headers["Connection"] = "close"
            await error.response(scope["path"])(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    async def _read(self, request: Request) -> bytes:
        limit, chunks, size = self._settings.max_body_bytes, list[bytes](), 0
        named = request.headers.get("content-length", "")
        if named and "transfer-encoding" in request.headers:  # RFC 9112, 6.1: it may be smuggled
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
        if named.isdecimal() and int(named[:20]) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="body_timeout") from None
        return b"".join(chunks)

    async def _check(self, headers: Headers, body: bytes) -> None:
        """Refuse a body that has come and is no JSON within bounds."""
        if not body:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"content-type is {kind!r:.100}; it must be application/json")
        if b"\0" in body or not _is_utf8(body):  # UTF-16 has zeros; in JSON they are escaped
            raise ApiError(400, "the body must be JSON in UTF-8", code="not_utf8")
        await asyncio.to_thread(_check_structure, body, self._settings.max_depth)


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


async def _discard(request: Request, most: int) -> None:
    """Read the rest of a body up to ``most`` bytes: a client that still sends reads no answer."""
    size = 0
    # A stream that was read to its end, in the chunk that was too much, is none (RuntimeError).
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size >= most:
                    return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _check_structure(body: bytes, max_depth: int) -> None:
    """Refuse JSON that would be costly to parse. It is not parsed: only what stands outside of its
    strings is looked at.
    """
    num_quotes = num_parts = depth = 0
    rest = Rests()
    for count, plain in _outside_of_strings(body):
        rest()
        num_quotes += count
        num_parts += sum(map(plain.count, (b":", b"[", b"{", b".", b"e", b"E")))
        if num_parts + num_quotes // 2 > _MOST_PARTS:
            raise ApiError(
                413,
                f"the body has more than {_MOST_PARTS} strings, fields, lists, objects and "
                "fractions, which are the most",
                code="too_many_parts",
            )
        for bracket in plain.translate(None, _NO_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            if depth > max_depth:
                raise ApiError(
                    400,
                    f"the body nests lists and objects deeper than {max_depth}",
                    code="too_deep",
                )
            if depth < 0:  # no JSON, which the parser says at once
                return


def _outside_of_strings(body: bytes) -> Iterator[tuple[int, bytes]]:
    """By piece of some JSON its number of quotes, and all that stands outside of strings."""
    start, is_string = 0, False
    while piece := body[start : start + _PIECE]:
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it would cut an escape
            piece = body[start : start + _PIECE + 1]
        start += len(piece)
        texts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield len(texts) - 1, b"".join(texts[is_string::2])
        is_string ^= len(texts) % 2 == 0


class AccessLog:
    """Middleware that logs and counts answers by route, and gives each request an id.

    The id is the client's ``x-request-id``, or a new one. The answer and the line of the log carry
    it. Otherwise the log never holds text of a client. That includes paths that are no route.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        given = Headers(scope=scope).get("x-request-id", "")
        is_usable = _REQUEST_ID.fullmatch(given)
        request_id = given if is_usable else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_id=request_id, arrived=began)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in REQUEST_IDS:
                    headers[name] = request_id
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", _UNKNOWN)
            self._metrics.add_response(route, status)
            if _log.isEnabledFor(logging.INFO):
                _log.info(json.dumps(_line(scope, route, status, time.perf_counter() - began)))


def _line(scope: Scope, route: str, status: int, seconds: float) -> dict[str, Any]:
    return {
        "method": scope["method"] if scope["method"].isalpha() else _UNKNOWN,
        "route": route,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "client": (scope.get("client") or (None,))[0],
        "key": scope.get("state", {}).get("key_id"),
        "request_id": scope.get("state", {}).get("request_id"),
    }
