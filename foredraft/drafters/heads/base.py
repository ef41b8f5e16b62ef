"""Base of every trained drafter: a torch module that training and drafting share.

A kind of head is a file of this folder: a `HeadModule` (the trained and saved module), and the code
that makes proposals of its guesses. Training knows modules only through this file; drafting never
imports training.

Positions are counted alike everywhere: the *anchor* ``i`` is the last token that the target has
read, so its hidden states are known, and so is token ``i + 1``, which the target drew from them.
Draft token ``k`` (from 1) is token ``i + 1 + k``.

Shape legend: B texts, L tokens of the longest, E hidden size, V vocabulary, R output rows,
K columns of the output product (E, or more).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from foredraft.core.errors import ConfigError, unknown
from foredraft.drafters.heads.layers import LlamaLayer, RMSNorm
from foredraft.models.base import ModelShape


class HeadSource(Protocol):
    """Source of a head's initial weights: a target's sizes and weights. All tensors are copies."""

    @property
    def shape(self) -> ModelShape: ...

    def embedding(self) -> Tensor:
        """[V, E]."""
        ...

    def head(self) -> Tensor:
        """[V, E]; the embedding itself where the two are tied."""
        ...

    def final_norm(self) -> Tensor:
        """[E]."""
        ...

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """Weights of a layer under the names of `LlamaLayer`; -1 is the last layer."""
        ...


@dataclass(frozen=True)
class TextBatch:
    """Texts with the target's outputs for them.

    Attributes:
        tokens_BL: int64 token ids; padding after a text's end is any id.
        lengths_B: int64 tokens of each text.
        embeddings_BLE: the target's embeddings of the tokens.
        taps: for each layer that the head asks for its output [B, L, E].
    """

    tokens_BL: Tensor
    lengths_B: Tensor
    embeddings_BLE: Tensor
    taps: Mapping[int, Tensor]


@dataclass(frozen=True)
class Prediction:
    """A head's logits for one later token at every anchor, as two factors not yet multiplied.

    There are far more logits than states: losses compute them piece by piece, and only where they
    are needed. A bias by token (a Markov head's, say) is added as further columns of both factors.

    Attributes:
        states_BLK: factor of the output rows; entry ``i`` predicts token ``i + shift``, given all
            tokens before that one. Entries beyond a text's end have no meaning.
        output_RK: the output rows.
        shift: ``depth + 1`` for heads that draft behind an anchor; 1 for one that predicts the
            token right after the one it stands on.
        depth: which draft token that is, from 1: acceptance is counted by it.
    """

    states_BLK: Tensor
    output_RK: Tensor
    shift: int
    depth: int

    @property
    def logits_BLR(self) -> Tensor:
        """All of them: for tests and small texts."""
        return self.states_BLK @ self.output_RK.T


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
        if type(value) is not int or not self.least <= value <= self.most:
            raise ConfigError(
                f"{name} is {value!r:.60}; it must be a whole number, {self.least} to {self.most}"
            )
        return value


class HeadModule(nn.Module, ABC):
    """A head: parameters, and predictions for training.

    It has output rows of its own, usually those of the tokens that the target writes most. The
    embedding is the target's: it is never a parameter of a head. A subclass names its `OPTIONS` and
    takes them as keyword arguments, after the target's shape and ``num_rows`` (R; None: a row for
    every token).

    Args:
        shape: of the target.
        reads: the target's layers it reads.
        config: ``num_rows`` and the options.

    Attributes:
        kind: the registered name of the drafter that uses it.
        OPTIONS: options of training.
        shape: of the target.
        taps: the layers of the target that it reads; ascending.
        output: the output rows [R, E], or a module with them: see `rows`.
        output_ids_R: the token of each output row, ascending, a buffer; None: all of them.
        promise: of a trained one, see `DrafterTraits`.
    """

    kind: ClassVar[str]
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

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        """A new head for a target, as close to useful as copying its weights makes it.

        Args:
            output_ids: the tokens it may name, ascending; None: all.
            options: some of `OPTIONS`; the others get their usual values.

        Raises:
            ConfigError: see `from_config`.
        """
        shape = source.shape
        usual = {name: option.usual_for(shape) for name, option in cls.OPTIONS.items()}
        num_rows = None if output_ids is None else len(output_ids)
        module = cls.from_config(shape, {"num_rows": num_rows, **usual, **options})
        with torch.no_grad():
            rows_VE = source.head()
            if output_ids is not None and module.output_ids_R is not None:
                ids_R = torch.as_tensor(output_ids, device=rows_VE.device)
                module.output_ids_R.copy_(ids_R)
                rows_VE = rows_VE[ids_R]
            module.rows.copy_(rows_VE)
            module.take_layers(source)
        return module

    @abstractmethod
    def take_layers(self, source: HeadSource) -> None:
        """Start all but the output rows from the target's weights."""

    @abstractmethod
    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        """Its predictions for ``depth`` draft tokens behind every anchor.

        The tokens before the one that is predicted are those of the text. Hidden states behind an
        anchor are the head's own, as they will be when it drafts.
        """

    def extra_loss(self, batch: TextBatch, predictions: Sequence[Prediction]) -> Tensor | None:
        """A further term of the loss (a confidence head's, say); usually none."""
        return None

    def calibrate(self, batches: Iterable[TextBatch]) -> list[float]:
        """Set parameters that are not learnt, on held-out text; by default there are none.

        Returns:
            Lines that describe the settings, for display.
        """
        return []


def following(x_BLE: Tensor, by: int) -> Tensor:
    """The entry ``by`` tokens later, for every token; beyond the end it has no meaning."""
    return x_BLE.roll(-by, 1) if by else x_BLE


def unrolled(
    batch: TextBatch,
    depth: int,
    output_RE: Tensor,
    state_BLE: Tensor,
    step: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> list[Prediction]:
    """Predictions of a head that drafts token by token from a state that it carries on.

    Args:
        state_BLE: the state at the anchor.
        step: from the number ``k`` of the draft token (from 1), the embeddings of the token before
            it and the state there: the input of the output rows, and the next state.
    """
    predictions = []
    for k in range(1, depth + 1):
        embeddings_BLE = following(batch.embeddings_BLE, k).to(state_BLE.dtype)
        read_BLE, state_BLE = step(k, embeddings_BLE, state_BLE)
        predictions.append(Prediction(read_BLE, output_RE, shift=k + 1, depth=k))
    return predictions


def _usual_taps(shape: ModelShape) -> tuple[int, ...]:
    """A low, a middle and the last layer."""
    num_layers = shape.num_hidden_layers
    return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1}))


TAPS = HeadOption(
    "layers of the target to read, such as 9,19,29 (low, middle, last)", _usual_taps, is_layers=True
)
"""The option of heads that read several layers."""


class CausalHead(HeadModule, ABC):
    """Llama layers, a norm and output rows; a subclass makes their inputs.

    Args:
        shape: of the target, and of the layers.
        reads: the target's layers it reads.
        num_layers: of its own.

    Attributes:
        shift: which token the first prediction is about: see `Prediction`.
    """

    shift: ClassVar[int] = 1

    def __init__(
        self, shape: ModelShape, reads: Sequence[int], num_layers: int, **config: Any
    ) -> None:
        super().__init__(shape, reads, num_layers=num_layers, **config)
        self.num_layers = num_layers
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @abstractmethod
    def inputs(self, embeddings: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """Inputs [..., E] of the first layer for tokens, in the dtype of the weights.

        Args:
            embeddings: of the tokens.
            taps: the target's hidden states of them, by layer.
        """

    def take_from(self, source: HeadSource, layers: Iterable[int]) -> None:
        """Start from these layers of the target and its final norm."""
        self.norm.weight.copy_(source.final_norm())
        for layer, index in zip(self.layers, layers, strict=True):
            layer.load_state_dict(dict(source.layer(index)))

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        """One while it is trained; else all, which are the same states seen from other anchors."""
        x_BLE = self.inputs(batch.embeddings_BLE, batch.taps)
        for layer in self.layers:
            x_BLE = layer(x_BLE)
        states_BLE = self.norm(x_BLE)
        return [
            Prediction(following(states_BLE, k), self.output, shift=self.shift + k, depth=k + 1)
            for k in range(1 if self.training else depth)
        ]
