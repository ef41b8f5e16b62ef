"""`--ray`: commands that run on a cluster, and how large it is to be."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foredraft.core.checks import checked_int, checked_real
from foredraft.core.errors import ConfigError
from foredraft.system.cgroups import available_cpus

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foredraft.options import LoadOptions
    from foredraft.server.settings import ServerSettings


@dataclass(frozen=True)
class ClusterAsked:
    """Options of the command line about a cluster.

    Attributes:
        ray: run on a Ray cluster.
        replicas: engines; 1 by default.
        autoscale: engines, as many as the load asks for: MIN:MAX.
        address: the cluster, such as 'auto'; this machine alone by default.
        engine_timeout: seconds of silence after which an engine counts as frozen; 5 by default.

    Raises:
        ConfigError: it describes a cluster and asks for none, or contradicts itself.
    """

    ray: bool = False
    replicas: int | None = None
    autoscale: str | None = None
    address: str | None = None
    engine_timeout: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if name != "ray"}
        named = [f"--{n.replace('_', '-')}" for n, value in given.items() if value is not None]
        if named and not self.ray:
            raise ConfigError(f"{', '.join(named)}: of no use without --ray")
        if self.replicas is not None and self.autoscale is not None:
            raise ConfigError("give --replicas or --autoscale, not both")
        if self.replicas is not None:
            checked_int("--replicas", self.replicas, 1)
        if self.engine_timeout is not None:
            checked_real("--engine-timeout", self.engine_timeout, 2.0)
        self.sizes()

    def _deploy(self, settings: ServerSettings) -> Any:
        """The module, which imports Ray: it reads its variables then.

        A cluster of this machine alone listens where the server does: on loopback, if it does.
        A client that reaches a port of Ray can run code, so clients need a token as well.
        """
        if self.address is None:
            if settings.is_loopback:  # the name is about other systems, and it works on Linux
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            if "RAY_AUTH_MODE" not in os.environ:
                os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        from foredraft.cluster import deploy

        return deploy

    def _shared(self, load: LoadOptions) -> LoadOptions:
        """Engines of one machine share its cores; one alone takes what is fastest."""
        most = max(self.sizes().get("autoscale", (0, self.replicas or 1)))
        if load.threads is not None or self.address is not None or most == 1:
            return load
        return replace(load, threads=max(1, available_cpus() // most))

    def sizes(self) -> dict[str, Any]:
        """Fields of `ClusterOptions`."""
        given = {} if self.engine_timeout is None else {"engine_timeout": self.engine_timeout}
        if self.autoscale is None:
            return {"replicas": self.replicas or 1, **given}
        fewest, colon, most = self.autoscale.partition(":")
        if not (colon and fewest.isdecimal() and most.isdecimal() and int(fewest) <= int(most) > 0):
            raise ConfigError(f"--autoscale is {self.autoscale!r}; it must be MIN:MAX, such as 1:4")
        return {"autoscale": (int(fewest), int(most)), **given}

    @contextmanager
    def serving(self, load: LoadOptions, settings: ServerSettings) -> Iterator[None]:
        """Gates and engines, until this is left.

        Raises:
            ConfigError: of the API keys; a gate's own error would only be in Ray's logs.
        """
        from foredraft.server.gate import ApiKeys

        ApiKeys.of(settings)
        deploy, load = self._deploy(settings), self._shared(load)
        options = deploy.ClusterOptions(num_cpus=load.threads or 1, **self.sizes())
        load_one = partial(deploy.load_llm, load)
        app = deploy.application(load_one, load.max_batch_size, settings, options)
        with deploy.running(app, self.address, settings):
            yield

    @contextmanager
    def asked_from_here(
        self, load: LoadOptions, settings: ServerSettings
    ) -> Iterator[tuple[Callable[..., FastAPI], int]]:
        """A factory of a server in this process over engines elsewhere, and their capacity."""
        from foredraft.server.app import api_app

        deploy, load = self._deploy(settings), self._shared(load)
        options = deploy.ClusterOptions(num_cpus=load.threads or 1, **self.sizes())
        load_one = partial(deploy.load_llm, load)
        app = deploy.engine_application(load_one, load.max_batch_size, settings, options)
        with deploy.running(app, self.address, None) as engines:
            model = engines.describe.remote().result()
            connect = partial(deploy.connected, engines, model, options.engine_timeout)
            most = options.autoscale[1] if options.autoscale else options.replicas
            yield partial(api_app, connect, settings), most * load.max_batch_size
