"""An adapter for early exit: what the target's first layers say, made readable for output rows.

Kangaroo, F. Liu et al., arXiv 2404.18911. The middle layers of a model that was not trained for it
speak another language than its head; one small layer in between learns to translate. It reads the
very states that the first layers have when they draft, so that drafting is just as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from foredraft.core.errors import ConfigError
from foredraft.drafters.common.causal import CausalHead
from foredraft.drafters.common.head import HeadSource
from foredraft.drafters.common.options import checked_count
from foredraft.drafters.common.rows import num_rows_of, rows_of
from foredraft.models.base import ModelShape


class AdapterModule(CausalHead):
    """See the module docstring.

    Args:
        exit_layer: how many of the target's first layers it stands on.
    """

    kind = "early_exit"

    def __init__(
        self, shape: ModelShape, num_rows: int | None, exit_layer: int, num_layers: int = 1
    ) -> None:
        super().__init__(shape, (exit_layer - 1,), num_rows, num_layers)
        self.exit_layer = exit_layer

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        num_target_layers = source.shape.num_hidden_layers
        counts = {name: checked_count(name, value) for name, value in options.items()}
        counts.setdefault("exit_layer", min(2, num_target_layers - 1))
        if counts["exit_layer"] >= num_target_layers:
            raise ConfigError(
                f"exit_layer is {counts['exit_layer']}; the target has {num_target_layers} layers, "
                f"so it must be 1 to {num_target_layers - 1}"
            )
        module = cls(source.shape, num_rows_of(output_ids), **counts)
        module.take(source, output_ids, [*range(-module.num_layers, 0)])
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        counts = (int(config[name]) for name in ("exit_layer", "num_layers"))
        return cls(shape, rows_of(config), *counts)

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "exit_layer": self.exit_layer}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {
            "exit_layer": "how many of the target's first layers it stands on (2)",
            "num_layers": "layers of its own (1)",
        }

    def inputs(self, embeddings: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.exit_layer - 1].to(self.output.dtype)


MODULE = AdapterModule
