"""A head with output rows of its own: usually those of the tokens that the target writes most.

Shape legend: B texts, L tokens, E hidden size, R output rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.drafters.common.head import HeadModule, HeadSource, output_rows
from foredraft.models.base import ModelShape


class NamingHead(HeadModule, ABC):
    """What heads that name some tokens have in common: which tokens their output rows stand for.

    Args:
        shape: of the target.
        taps: the layers it reads.
        num_rows: R; None: a row for every token.
    """

    def __init__(self, shape: ModelShape, taps: Sequence[int], num_rows: int | None) -> None:
        super().__init__()
        self.shape, self.taps = shape, tuple(taps)
        ids_R = None if num_rows is None else torch.arange(num_rows)
        self.register_buffer("output_ids_R", ids_R)

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The output rows [R, E]."""

    @property
    def num_rows(self) -> int | None:
        """R, as `config` has it."""
        return None if self.output_ids_R is None else len(self.output_ids_R)

    @torch.no_grad()
    def take_output(self, source: HeadSource, output_ids: Sequence[int] | None) -> None:
        """Start from the target's own rows for these tokens."""
        self.rows.copy_(output_rows(source.head(), output_ids))
        if self.output_ids_R is not None and output_ids is not None:
            self.output_ids_R.copy_(torch.as_tensor(output_ids))


class RowsHead(NamingHead, ABC):
    """A `NamingHead` with rows of its own.

    Attributes:
        output: the output rows [R, E].
    """

    def __init__(self, shape: ModelShape, taps: Sequence[int], num_rows: int | None) -> None:
        super().__init__(shape, taps, num_rows)
        size = (num_rows or shape.vocab_size, shape.hidden_size)
        self.output = nn.Parameter(torch.randn(size) * shape.hidden_size**-0.5)

    @property
    def rows(self) -> Tensor:
        return self.output


def num_rows_of(output_ids: Sequence[int] | None) -> int | None:
    return None if output_ids is None else len(output_ids)


def rows_of(config: Mapping[str, Any]) -> int | None:
    """``num_rows`` of a config."""
    num_rows = config.get("num_rows")
    return None if num_rows is None else int(num_rows)


def following(x_BLE: Tensor, by: int) -> Tensor:
    """What stands ``by`` tokens later, for every token; behind the end something meaningless."""
    return x_BLE.roll(-by, 1) if by else x_BLE
