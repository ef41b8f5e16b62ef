"""The two tiers as deployments of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import (
        AutoscalingConfig,
        AutoscalingContext,
        AutoscalingPolicy,
        RequestRouterConfig,
    )
    from ray.serve.deployment import Application
    from ray.serve.exceptions import RayServeException
    from ray.serve.handle import DeploymentHandle
except ImportError as error:
    from foredraft.core.errors import ConfigError

    raise ConfigError(f"clusters need Ray: pip install 'foredraft[ray]' ({error})") from error

from foredraft.cluster.remote import RemoteEngine
from foredraft.cluster.replica import EngineReplica, RemoteModel
from foredraft.cluster.watch import EngineWatch, RayActors
from foredraft.core.errors import ConfigError
from foredraft.llm import LLM
from foredraft.options import LoadOptions
from foredraft.server.app import api_app
from foredraft.server.context import ServerContext
from foredraft.server.settings import ServerSettings
from foredraft.system.cgroups import available_cpus
from foredraft.system.ray_paths import close_port

_RING = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_NAME = "foredraft"
_ENGINE = "engine"
_AT_ONCE = 2.0
"""Seconds that a gate waits for an engine before it answers 503."""
_STORE = 200 << 20
"""Bytes of Ray's object store in a cluster of this machine alone."""
_FULL = 0.7
"""Load of an engine that autoscaling targets."""
_GRACE = 15.0
"""Seconds beyond the longest reply that a replica has to shut down."""
_LOOK = 0.25
"""Seconds between two checks whether all replies are finished."""
_log = logging.getLogger("foredraft.cluster")
_OWN_CLUSTER = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "foredraft.system.ray_paths:middlewares",
}
"""Variables that Ray's processes read: engines of our own cluster are not the last that a machine
runs, and what they send passes through fewer threads, which would all ask for the engine's lock.
Where a busy machine starts a proxy slowly, it is waited for. An engine that is not healthy is not
waited for. The proxies' own paths, which know no keys, are closed."""
Count = Annotated[int, Field(ge=1)]


class ClusterOptions(BaseModel):
    """The size of a cluster.

    Attributes:
        replicas: engines.
        autoscale: fewest and most engines, where their number follows the load.
        gates: how many take requests.
        num_cpus, num_gpus: that an engine keeps for itself.
        upscale_delay, downscale_delay: seconds that load must ask for more engines, or for fewer,
            before there are; load is that of the last ``upscale_delay`` seconds.
        engine_timeout: seconds from the last sign of life of a frozen engine until its replies have
            gone on elsewhere; it is ended a second before.
        health_check_period: seconds between two looks of Serve at a replica.
        health_check_timeout: seconds that it has to answer, three times in a row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    replicas: Count = 1
    autoscale: tuple[Annotated[int, Field(ge=0)], Count] | None = None
    gates: Count = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    upscale_delay: Annotated[float, Field(gt=0)] = 30.0
    downscale_delay: Annotated[float, Field(gt=0)] = 600.0
    engine_timeout: Annotated[float, Field(ge=2)] = 5.0
    health_check_period: Annotated[float, Field(gt=0)] = 5.0
    health_check_timeout: Annotated[float, Field(gt=0)] = 10.0


@serve.ingress()
class GateReplica:
    """The server without an engine of its own.

    Args:
        salt: secret that separates tenants in caches; all gates use the same.
        silence: see `ClusterOptions.engine_timeout`.
    """

    def __init__(
        self, engines: DeploymentHandle, settings: ServerSettings, salt: bytes, silence: float
    ) -> None:
        close_port()
        self._engines, self._settings, self._salt = engines, settings, salt
        self._silence = silence

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve when the gate starts. Until there is an engine it answers 503."""
        application = serve.get_replica_context().app_name  # configuration files name their own
        loop, describing = asyncio.get_running_loop(), asyncio.create_task(self._describe())

        async def model() -> RemoteModel:
            return await asyncio.shield(describing)

        def connect(context: ServerContext) -> RemoteEngine:  # on a thread of its own
            found = asyncio.run_coroutine_threadsafe(model(), loop).result()
            engine = connected(self._engines, found, self._silence, context, application)
            loop.call_soon_threadsafe(engine.watch.begin)
            return engine

        await asyncio.wait((describing,), timeout=_AT_ONCE)  # a new gate misses no request
        app = api_app(connect, self._settings, salt=self._salt)
        self._context: ServerContext = app.state.context
        return app

    async def drain(self) -> None:
        """Take no more requests; return when those under way have ended."""
        await self._context.drain()

    async def _describe(self) -> RemoteModel:
        model: RemoteModel = await self._engines.describe.remote()
        return model


def connected(
    engines: DeploymentHandle,
    model: RemoteModel,
    silence: float,
    context: ServerContext,
    application: str = _NAME,
) -> RemoteEngine:
    """The engine of a gate."""
    _ = model.tokenizer  # read now, and not by the first request
    watch = EngineWatch(RayActors(application, _ENGINE), silence)
    patience = context.settings.request_timeout
    return RemoteEngine(engines, model, context.metrics, patience, watch)


def engine_application(
    load: Callable[[], LLM],
    max_batch_size: int,
    settings: ServerSettings,
    options: ClusterOptions,
) -> Application:
    """Engines without gates, for callers with a handle; see `application`."""
    longest = settings.request_timeout + _GRACE
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.autoscale is not None:
        fewest, most = options.autoscale
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fewest,
                max_replicas=most,
                target_ongoing_requests=_FULL * max_batch_size,
                look_back_period_s=options.upscale_delay,
                upscale_delay_s=options.upscale_delay,
                downscale_delay_s=options.downscale_delay,
                policy=AutoscalingPolicy(policy_function=by_load),
            )
        }
    return serve.deployment(
        EngineReplica,
        name=_ENGINE,
        max_ongoing_requests=max_batch_size,
        max_queued_requests=settings.max_waiting,
        request_router_config=RequestRouterConfig(request_router_class=_RING),
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        graceful_shutdown_timeout_s=longest,
        graceful_shutdown_wait_loop_s=_LOOK,
        health_check_period_s=options.health_check_period,
        health_check_timeout_s=options.health_check_timeout,
        **scaling,
    ).bind(load, settings.max_waiting, settings.give_back_after)


def by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Number of engines that the reported and waiting load would fill to `_FULL`.

    Ray gets this function by value: its controller does not import this module.
    """
    reported = (context.aggregated_metrics or {}).get("load", {})
    waiting = (context.total_queued_requests or 0.0) / context.config.target_ongoing_requests
    return sum(reported.values()) / _FULL + waiting, {}


def application(
    load: Callable[[], LLM],
    max_batch_size: int,
    settings: ServerSettings,
    options: ClusterOptions,
    salt: bytes | None = None,
) -> Application:
    """Gates and engines, to be run by `ray.serve.run`.

    Args:
        load: loads the model, in the process of each engine.
        max_batch_size: replies that an engine takes: further ones go to the next, or wait.
        salt: see `GateReplica`; None: a fresh one. With another, gates are started anew.

    Raises:
        ConfigError: the settings ask for what a cluster does not do.
    """
    if settings.prove_every:
        raise ConfigError("prove_every (--prove-every) proves in one process: not in a cluster")
    engines = engine_application(load, max_batch_size, settings, options)
    gates = serve.deployment(
        GateReplica,
        name="gate",
        num_replicas=options.gates,
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.request_timeout + 2 * _GRACE,
        graceful_shutdown_wait_loop_s=_LOOK,
        health_check_period_s=options.health_check_period,
        health_check_timeout_s=options.health_check_timeout,
    )
    salt = salt or secrets.token_bytes(32)
    return gates.bind(engines, settings, salt, options.engine_timeout)


def app(args: Mapping[str, Any]) -> Application:
    """The application that configuration files of Serve import as ``foredraft.cluster:app``.

    Args:
        args: fields of `ClusterOptions`; ``load`` with options of `LLM.load`, and ``server`` with
            those of `ServerSettings`.
    """
    sizes = dict(args)
    load, server = sizes.pop("load", {}), sizes.pop("server", {})
    asked = LoadOptions.of(**{"max_batch_size": 16} | load)
    try:
        options, settings = ClusterOptions(**sizes), ServerSettings(**server)
    except ValidationError as error:
        raise ConfigError(f"args of foredraft.cluster:app: {error}") from None
    return application(partial(load_llm, asked), asked.max_batch_size, settings, options)


def load_llm(options: LoadOptions) -> LLM:
    """Load the model, in the process of an engine."""
    if options.threads is None:  # Ray's variables allow torch one
        torch.set_num_threads(available_cpus())
    return LLM.load(**vars(options))


@contextmanager
def running(
    application: Application, address: str | None, settings: ServerSettings | None
) -> Iterator[DeploymentHandle]:
    """An application on a cluster, until it is left. Called by the main thread.

    SIGTERM is then the same as Ctrl-C. Ray's own handler prints a stack.

    Args:
        address: of a cluster that runs, as `ray.init` takes it; None: one of this machine alone,
            that ends with this.
        settings: where gates listen; None: it has none.
    """
    before = signal.getsignal(signal.SIGTERM)
    if address is None:
        os.environ.update(_OWN_CLUSTER | os.environ)
        ray.init("local", include_dashboard=False, object_store_memory=_STORE, log_to_driver=False)
    else:
        ray.init(address, log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if settings is None:
            serve.start(proxy_location="Disabled")
        else:
            at = {"host": settings.host, "port": settings.port}  # of Ray's proxies
            for name in ("ssl_certfile", "ssl_keyfile"):
                if (file := getattr(settings, name)) is not None:
                    at[name] = str(file)
            serve.start(proxy_location="EveryNode", http_options=at)
        route = None if settings is None else "/"
        yield serve.run(application, name=_NAME, route_prefix=route)
    finally:
        signal.signal(signal.SIGTERM, before)
        if settings is not None:
            _drain(settings.drain_timeout + _GRACE)
        if address is not None:  # our own cluster ends as it is: then no request finds Ray's 404
            serve.delete(_NAME, _blocking=False)
        ray.shutdown()


def _drain(seconds: float) -> None:
    """Let gates take no more requests and end those under way, as a server of one process does."""
    try:
        serve.get_app_handle(_NAME).broadcast("drain").results(timeout_s=seconds)
    except (RayError, RayServeException, TimeoutError) as error:
        _log.warning("not every gate has ended its replies: %s", error)
