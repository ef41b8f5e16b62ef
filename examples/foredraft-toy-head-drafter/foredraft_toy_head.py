"""A drafter with a state: one attention layer that stands on the target, with random weights.

It shows the seam that a trained head needs (EAGLE, arXiv 2401.15077, is built like this): the
target's hidden states, its embedding, norm and head, cache layers beside the target's own, and the
noise that the target draws with. Its guesses are worth nothing: it is not trained.

Position i has an entry made of the target's hidden state there and the embedding of the *next*
token; from it the head guesses the token after that one.

Shape legend: T tokens, E hidden size of the target, D size of a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.base import KVShape
from foredraft.core.errors import ConfigError
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import ROOT
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import Target, offered

_KEY_SIZE = 16


@dataclass
class _Request:
    """The state of a request beside its entries.

    Attributes:
        length: positions that have an entry.
        newest_E: what the last entry was made of; None before anything was observed.
    """

    slot: int
    length: int
    newest_E: Tensor | None = None


class ToyHeadDrafter(BaseDrafter):
    """See the module docstring.

    Args:
        target: has the capabilities ``parts`` and ``cache_layers``.
        tap: the layer whose output is the hidden state; the last one when None.
        seed: of the weights.
    """

    look_ahead = 1  # an entry holds the token after its own

    def __init__(self, target: Target, tap: int | None = None, seed: int = 0) -> None:
        self._parts = offered(target.capabilities.parts)
        last = target.capabilities.taps.stop - 1
        self.taps = (last if tap is None else tap,)
        self._entries = target.cache.add_layers(KVShape(1, 1, _KEY_SIZE), self._parts.dtype)
        self.layers = (self._entries,)
        self._requests: dict[int, _Request] = {}
        hidden, generator = self._parts.hidden_size, torch.Generator().manual_seed(seed)
        self._input_EF = self._random(generator, hidden, 2 * hidden)
        self._qkv_DE = self._random(generator, 3 * _KEY_SIZE, hidden)
        self._output_ED = self._random(generator, hidden, _KEY_SIZE)

    def begin(self, row: DraftRow) -> None:
        # The entries of an earlier turn are in the slot already.
        self._requests[row.request_id] = _Request(row.slot, row.num_cached)

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            request = self._requests[seen.request_id]
            following = seen.tokens[seen.context + 1 : seen.end + 1]
            if not following:  # the step ended the request before it committed anything
                continue
            hidden_TE = seen.hidden(self.taps[0])[: len(following)]
            x_TE = self._inputs(following, hidden_TE)
            self._write(request.slot, seen.context, x_TE)
            request.length, request.newest_E = seen.context + len(following), x_TE[-1]

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._draft(row) for row in rows]

    def end(self, request_id: int) -> None:
        del self._requests[request_id]

    def _draft(self, row: DraftRow) -> Proposal:
        request = self._requests[row.request_id]
        x_E = request.newest_E
        if x_E is None or request.length != len(row.tokens) - 1:  # there is a prompt to read first
            return NOT_READY
        draft, node = row.draft(), ROOT
        first = request.length - 1
        for position in range(first, first + row.budget):
            hidden_E = self._attend(request.slot, position, x_E)
            logits_V = self._parts.logits(self._parts.norm(hidden_E[None]))[0]
            nodes = draft.extend(node, logits_V)
            if not nodes:
                break
            (node,) = nodes
            # From here on the head's own output stands in for the target's hidden state.
            x_E = self._inputs([draft.tokens[node]], hidden_E[None])[0]
        return draft.build()

    def _inputs(self, next_tokens: Sequence[int], hidden_TE: Tensor) -> Tensor:
        embedded_TE = self._parts.embed(torch.tensor(next_tokens))
        return F.linear(torch.cat((embedded_TE, hidden_TE.to(embedded_TE)), -1), self._input_EF)

    def _write(self, slot: int, start: int, x_TE: Tensor) -> None:
        _, keys_TD, values_TD = F.linear(x_TE, self._qkv_DE).split(_KEY_SIZE, -1)
        self._entries.write(0, slot, start, keys_TD[None], values_TD[None])

    def _attend(self, slot: int, position: int, x_E: Tensor) -> Tensor:
        self._write(slot, position, x_E[None])  # a guess, if it is behind the text
        keys_HTD, values_HTD = self._entries.read(0, slot, position + 1)
        query_D = F.linear(x_E, self._qkv_DE[:_KEY_SIZE])
        weights_T = torch.softmax(keys_HTD[0] @ query_D / _KEY_SIZE**0.5, -1)
        return x_E + F.linear(weights_T @ values_HTD[0], self._output_ED)

    def _random(self, generator: torch.Generator, rows: int, columns: int) -> Tensor:
        weights = torch.randn(rows, columns, generator=generator) / columns**0.5
        return weights.to(self._parts.device, self._parts.dtype)


def _build(context: DrafterContext) -> ToyHeadDrafter:
    for name, value in context.options.items():
        if type(value) is not int:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    return ToyHeadDrafter(context.target, **context.options)


DRAFTER = DrafterSpec(
    build=_build,
    summary="a head with random weights, to copy from",
    options={"tap": "layer whose output it stands on (the last)", "seed": "of its weights (0)"},
    num_draft_tokens=4,
    needs=("parts", "cache_layers"),
)
