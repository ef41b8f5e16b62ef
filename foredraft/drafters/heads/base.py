"""Base of every trained drafter: a torch module that training and drafting share.

A kind of head is a file of this folder: a `HeadModule` (the trained and saved parameters), and the
code that makes proposals of its guesses. How it learns is in `foredraft.train.heads`, which
drafting never imports.

Shape legend: E hidden size, V vocabulary, R output rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from foredraft.core.checks import checked_int
from foredraft.core.errors import ConfigError, unknown
from foredraft.models.base import ModelShape

LARGEST_SIZE = 1 << 24
"""No size of a head is larger."""


@dataclass(frozen=True)
class HeadOption:
    """An option of training a kind of head, and a field of its config.

    A value is a whole number, a list of the target's layers, or one of a few words.

    Attributes:
        help: one line of help text.
        usual: the default, or a function that makes it of the target's shape.
        words: the allowed words; empty: the value is not a word.
        is_layers: whether the value lists layers of the target, ascending.
        least, most: bounds of a number.
    """

    help: str
    usual: Any
    words: Sequence[str] = ()
    is_layers: bool = False
    least: int = 1
    most: int = 64

    def usual_for(self, shape: ModelShape) -> Any:
        return self.usual(shape) if callable(self.usual) else self.usual

    def parsed(self, name: str, value: object) -> Any:
        """The value of a command: layers as a list, others as they are.

        Args:
            value: of layers, also one number or text such as ``5,14,29``.

        Raises:
            ConfigError: layers are no numbers.
        """
        if not self.is_layers:
            return value
        items = value.split(",") if isinstance(value, str) else value
        try:
            listed: Any = [items] if isinstance(items, int) else items
            return [int(item) for item in listed if item != ""]
        except (TypeError, ValueError):
            raise ConfigError(f"{name} is {value!r:.60}; write layers such as 9,19,29") from None

    def checked(self, name: str, value: object, shape: ModelShape) -> Any:
        """The value as it goes into a config, layers ascending.

        Args:
            value: see `parsed`.

        Raises:
            ConfigError: it is none that the option takes.
        """
        if self.is_layers:
            layers, last = sorted({*self.parsed(name, value)}), shape.num_hidden_layers - 1
            if not layers or not 0 <= layers[0] <= layers[-1] <= last:
                raise ConfigError(f"{name} is {value!r:.60}; the target has layers 0 to {last}")
            return layers
        if self.words:
            if value not in self.words:
                raise unknown(f"value of {name}", str(value), self.words)
            return value
        return checked_int(name, value, self.least, self.most)


class HeadModule(nn.Module):
    """The parameters of a head.

    It has output rows of its own, usually those of the tokens that the target writes most. The
    embedding is the target's: it is never a parameter of a head. A subclass names its `OPTIONS` and
    takes them as keyword arguments, after the target's shape and ``num_rows`` (R; None: a row for
    every token).

    Args:
        reads: the target's layers it reads.
        config: ``num_rows`` and the options.

    Attributes:
        kind: the registered name of the drafter that uses it.
        training_file: the module whose ``TRAINING`` is the `HeadTraining` of the kind.
        OPTIONS: options of training.
        shape: of the target.
        taps: the layers of the target that it reads; ascending.
        output: the output rows [R, E], or a module with them: see `rows`.
        output_ids_R: the token of each output row, ascending, a buffer; None: all of them.
        promise: of a trained one, see `DrafterTraits`.
    """

    kind: ClassVar[str]
    training_file: ClassVar[str]
    OPTIONS: ClassVar[Mapping[str, HeadOption]] = {}
    shape: ModelShape
    taps: tuple[int, ...]
    output: Any
    output_ids_R: Tensor | None
    promise: tuple[float, float] | None = None

    def __init__(self, shape: ModelShape, reads: Sequence[int], **config: Any) -> None:
        super().__init__()
        self.shape, self.taps, self._config = shape, tuple(reads), config
        num_rows: int | None = config["num_rows"]
        # On the meta device arange imports a second's worth of torch, and no values are wanted.
        is_meta = torch.get_default_device().type == "meta"
        new_ids = partial(torch.empty, dtype=torch.int64) if is_meta else torch.arange
        ids_R = None if num_rows is None else new_ids(num_rows)
        self.register_buffer("output_ids_R", ids_R)
        self.output = self.new_output(num_rows or shape.vocab_size, shape.hidden_size)

    @staticmethod
    def new_output(num_rows: int, hidden_size: int) -> nn.Parameter | nn.Linear:
        """The output rows, not trained yet."""
        return nn.Parameter(torch.randn(num_rows, hidden_size) * hidden_size**-0.5)

    @property
    def rows(self) -> Tensor:
        """The output rows [R, E]."""
        rows: Tensor = self.output
        return rows

    @property
    def config(self) -> dict[str, Any]:
        """All that `from_config` needs, as JSON values; without the shape."""
        return dict(self._config)

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        """The module that `config` describes, its weights to be loaded.

        Raises:
            ConfigError: an option is unknown, missing, or has a value that it may not have.
        """
        known = {"num_rows", *cls.OPTIONS}
        for name in config.keys() - known:
            raise unknown(f"option of {cls.kind!r}", name, cls.OPTIONS)
        for name in known - config.keys():
            raise ConfigError(f"{name} is missing")
        num_rows = config["num_rows"]
        if num_rows is not None and (
            type(num_rows) is not int or not 1 <= num_rows <= shape.vocab_size
        ):
            raise ConfigError(
                f"num_rows is {num_rows!r:.60}; it must be 1 to {shape.vocab_size}, or null"
            )
        options = {
            name: option.checked(name, config[name], shape) for name, option in cls.OPTIONS.items()
        }
        new: Callable[..., Self] = cls  # subclasses take their options by name
        return new(shape, num_rows, **options)


def _usual_taps(shape: ModelShape) -> tuple[int, ...]:
    """A low, a middle and the last layer."""
    num_layers = shape.num_hidden_layers
    return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1}))


TAPS = HeadOption(
    "layers of the target to read, such as 9,19,29 (low, middle, last)", _usual_taps, is_layers=True
)
"""The option of heads that read several layers."""
