"""`--ray`: commands that run on a cluster, and how large it is to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foredraft.options import LoadOptions
    from foredraft.server.settings import ServerSettings

_PANEL = "Cluster"
Ray = Annotated[
    bool,
    typer.Option("--ray", help="Run on a Ray cluster.", rich_help_panel=_PANEL, hidden=True),
]
Replicas = Annotated[
    int | None,
    typer.Option(min=1, help="Engines; 1 by default.", rich_help_panel=_PANEL, hidden=True),
]
Autoscale = Annotated[
    str | None,
    typer.Option(
        metavar="MIN:MAX",
        help="Engines, as many as the load asks for.",
        rich_help_panel=_PANEL,
        hidden=True,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="The cluster, such as 'auto'; this machine alone by default.",
        rich_help_panel=_PANEL,
        hidden=True,
    ),
]


@dataclass(frozen=True)
class ClusterAsked:
    """Options of the command line about a cluster.

    Raises:
        ConfigError: it describes a cluster and asks for none, or contradicts itself.
    """

    ray: bool
    replicas: int | None = None
    autoscale: str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        given = {
            "--replicas": self.replicas,
            "--autoscale": self.autoscale,
            "--address": self.address,
        }
        named = [name for name, value in given.items() if value is not None]
        if named and not self.ray:
            raise ConfigError(f"{', '.join(named)}: of no use without --ray")
        if self.replicas is not None and self.autoscale is not None:
            raise ConfigError("give --replicas or --autoscale, not both")
        self.sizes()

    def sizes(self) -> dict[str, Any]:
        """Fields of `ClusterOptions`."""
        if self.autoscale is None:
            return {"replicas": self.replicas or 1}
        fewest, colon, most = self.autoscale.partition(":")
        if not (colon and fewest.isdecimal() and most.isdecimal() and int(fewest) <= int(most) > 0):
            raise ConfigError(f"--autoscale is {self.autoscale!r}; it must be MIN:MAX, such as 1:4")
        return {"autoscale": (int(fewest), int(most))}

    @contextmanager
    def serving(self, load: LoadOptions, settings: ServerSettings) -> Iterator[None]:
        """Gates and engines, until this is left.

        Raises:
            ConfigError: of the API keys; a gate's own error would only be in Ray's logs.
        """
        from foredraft.cluster import deploy
        from foredraft.server.gate import ApiKeys

        ApiKeys.of(settings)
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
        from foredraft.cluster import deploy
        from foredraft.server.app import api_app

        options = deploy.ClusterOptions(num_cpus=load.threads or 1, **self.sizes())
        load_one = partial(deploy.load_llm, load)
        app = deploy.engine_application(load_one, load.max_batch_size, settings, options)
        with deploy.running(app, self.address, None) as engines:
            model = engines.describe.remote().result().model()
            connect = partial(deploy.connected, engines, model)
            most = options.autoscale[1] if options.autoscale else options.replicas
            yield partial(api_app, connect, settings), most * load.max_batch_size
