"""Recurrent layers: their sizes, their weights, and what they compute, in torch.

Three kinds. A short convolution (LFM2) sees the last few tokens, channel by channel, between two
gates. A gated delta net (Qwen3-Next, arXiv 2412.06464) convolves queries, keys and values likewise
and keeps a matrix for each head: S <- decay S + k (beta (v - decay S'k))', of which q reads S'q.
Mamba-2 (arXiv 2405.21060) does so without the correction: S <- decay S + k (beta v)', with its C, B
and x as q, k and v and its step as beta; what is read has a share of v added.

All run token by token, so that the order of additions does not depend on what is read together
(see `foredraft.cache.states`).

Shape legend: T tokens of the forward, R tokens of a row, N elements of a row (logged tokens, then
its own), W numbers of a log entry, C convolved channels, K inputs of the convolution, G key heads,
H value heads, D key size, V value size, M outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.states import RowStates, StateCache, StateShape
from foredraft.cache.store import Entries
from foredraft.core.errors import ConfigError
from foredraft.models.native.plan import ForwardPlan

RecurrentKind = Literal["short_conv", "delta_net", "mamba2"]
_TINY = 1e-6
"""Added to the squares of queries and keys before they are brought to length 1."""


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a model, which are all alike.

    Attributes:
        window: K.
        width: C of a short convolution.
        key_heads, value_heads, key_size, value_size: G, H, D, V; 0 of short convolutions.
        is_tiled: value heads h, h + G, h + 2 G ... share a key head, and not neighbours.
        has_bias: of the convolution.
        has_norm: of outputs.
    """

    kind: RecurrentKind
    window: int
    width: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    is_tiled: bool = False
    has_bias: bool = False
    has_norm: bool = True

    @property
    def channels(self) -> int:
        """C."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return self.width or 2 * keys + values

    @property
    def num_inputs(self) -> int:
        """Rows of the input projection: also two gates of a convolution, or the one of values."""
        if self.kind == "short_conv":
            return 3 * self.channels
        return self.channels + self.num_outputs

    @property
    def num_outputs(self) -> int:
        """M, which the output projection multiplies."""
        return self.value_heads * self.value_size or self.channels

    @property
    def num_gates(self) -> int:
        """Numbers that a token has beside its channels: a beta and a decay of each head."""
        return 2 * self.value_heads

    @property
    def norm_size(self) -> int:
        """Of the norm of outputs: of each head, or of all."""
        if not self.has_norm:
            return 0
        return self.num_outputs if self.kind == "mamba2" else self.value_size

    def states(self, num_layers: int) -> StateShape:
        """The numbers that so many layers keep."""
        matrices = self.value_heads * self.key_size * self.value_size
        state_size = (self.window - 1) * self.channels + matrices
        return StateShape(num_layers, state_size, self.channels + self.num_gates)


@dataclass(frozen=True)
class MixerWeights:
    """Small weights of a recurrent layer, beside its input and output projection.

    Attributes:
        conv_C1K: of the convolution, the last one for the token itself.
        gates_GE: [2 H, E] of a delta net, beta's rows first; [H, E] of Mamba-2.
        log_decay_H: logarithm of the decay's factor.
        step_bias_H: added to the decay's input.
        norm_V: of each head's output; [M] of Mamba-2.
        bias_C: of the convolution.
        skips_H: the share of a head's value that is added to what it reads.
    """

    conv_C1K: Tensor
    gates_GE: Tensor | None = None
    log_decay_H: Tensor | None = None
    step_bias_H: Tensor | None = None
    norm_V: Tensor | None = None
    bias_C: Tensor | None = None
    skips_H: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def states_of(cache: Entries) -> StateCache:
    """The states beside a cache's entries.

    Raises:
        ConfigError: it has none.
    """
    states = getattr(cache, "states", None)
    if not isinstance(states, StateCache):
        raise ConfigError("a model with recurrent layers needs a cache with their states")
    return states


def open_rows(plan: ForwardPlan, cache: StateCache) -> list[RowStates]:
    """The states and logs that each row of a forward starts from, see `StateCache.open_states`."""
    rows = []
    for row in plan.rows:
        num_pending = next((i for i, t in enumerate(row) if plan.extras[t]), len(row))
        root = plan.entries[row.start] + num_pending
        paths = (plan.extras[token] for token in row[num_pending:])
        parents = [path[-2] - root if len(path) > 1 else -1 for path in paths]
        start = plan.positions[row.start]
        rows.append(cache.open_states(plan.slot(row), start, num_pending, parents))
    return rows


def _window(window_KC: Tensor, elements_NC: Tensor, count: int) -> Tensor:
    """The last inputs behind so many elements."""
    return torch.cat((window_KC, elements_NC[:count]))[count:]


def _convolved(
    window_KC: Tensor, elements_NC: Tensor, states: RowStates, weights: MixerWeights
) -> Tensor:
    """Each element with those before it, along its path; [N, C]."""
    size = len(window_KC)
    before = [*range(-1, states.num_old - 1), *states.parents]
    places = []
    for element in range(len(elements_NC)):
        path = [element]
        for _ in range(size):
            path.append(before[path[-1]] if path[-1] >= 0 else path[-1] - 1)
        places.append([size + at for at in reversed(path)])
    seen_NKC = torch.cat((window_KC, elements_NC))[torch.tensor(places, device=window_KC.device)]
    sum_NC = (seen_NKC * weights.conv_C1K[:, 0].float().T).sum(1)
    return sum_NC if weights.bias_C is None else sum_NC + weights.bias_C.float()


@dataclass(frozen=True)
class RecurrentLayer:
    """A recurrent layer of a model.

    Attributes:
        number: of the layer among the recurrent ones.
        eps: of its norm.
    """

    sizes: Recurrent
    number: int
    weights: MixerWeights
    eps: float

    def mixed(
        self, inputs_TI: Tensor, gates_TG: Tensor | None, rows: Sequence[tuple[range, RowStates]]
    ) -> Tensor:
        """The output [T, M]; writes log and states of the rows.

        Args:
            inputs_TI: of the input projection.
            gates_TG: of a delta net, or of Mamba-2.
        """
        found = []
        for row, states in rows:
            inputs_RI = inputs_TI[row.start : row.stop].float()
            if gates_TG is None:
                found.append(self._short_conv(inputs_RI, states))
            else:
                gates_RG = gates_TG[row.start : row.stop].float()
                found.append(self._delta_net(inputs_RI, gates_RG, states))
        return torch.cat(found).to(inputs_TI.dtype)

    @property
    def _is_mamba(self) -> bool:
        return self.sizes.kind == "mamba2"

    def _short_conv(self, inputs_RI: Tensor, states: RowStates) -> Tensor:
        number, window = self.number, self.sizes.window - 1
        before_RC, behind_RC, values_RC = inputs_RI.chunk(3, -1)
        own_RC = before_RC * values_RC
        states.new_LTW[number] = own_RC[states.first_logged :]
        elements_NC = torch.cat((states.old_LTW[number], own_RC))
        window_KC = states.state.values_LS[number].view(window, -1)
        for save in states.saves:
            behind = _window(window_KC, elements_NC, states.num_before(save))
            save.values_LS[number] = behind.flatten()
        convolved_NC = _convolved(window_KC, elements_NC, states, self.weights)
        return behind_RC * convolved_NC[states.num_old :]

    def _delta_net(self, inputs_RI: Tensor, gates_RG: Tensor, states: RowStates) -> Tensor:
        sizes, number = self.sizes, self.number
        channels = sizes.channels
        assert self.weights.log_decay_H is not None
        assert self.weights.step_bias_H is not None
        own_RC, outer_RM = inputs_RI[:, :channels], inputs_RI[:, channels:]
        step_RH = gates_RG[:, -sizes.value_heads :] + self.weights.step_bias_H.float()
        step_RH = F.softplus(step_RH)
        decay_RH = (-self.weights.log_decay_H.float().exp() * step_RH).exp()
        beta_RH = step_RH if self._is_mamba else gates_RG[:, : sizes.value_heads].sigmoid()
        own_RW = torch.cat((own_RC, beta_RH, decay_RH), -1)
        states.new_LTW[number] = own_RW[states.first_logged :]
        elements_NW = torch.cat((states.old_LTW[number], own_RW))
        values_S = states.state.values_LS[number]
        cut = (sizes.window - 1) * channels
        window_KC = values_S[:cut].view(-1, channels)
        convolved_NC = F.silu(
            _convolved(window_KC, elements_NW[:, :channels], states, self.weights)
        )
        for save in states.saves:
            window = _window(window_KC, elements_NW[:, :channels], states.num_before(save))
            save.values_LS[number, :cut] = window.flatten()
        shape = (sizes.value_heads, sizes.key_size, sizes.value_size)
        read_RHV = self._through(values_S[cut:].view(shape), convolved_NC, elements_NW, states)
        return self._finished(read_RHV, outer_RM)

    def _through(
        self, matrix_HDV: Tensor, convolved_NC: Tensor, elements_NW: Tensor, states: RowStates
    ) -> Tensor:
        """The recurrence: each new token's output; saves states on the way."""
        sizes = self.sizes
        query_NHD, key_NHD, value_NHV = self._heads(convolved_NC)
        beta_NH1, decay_NH1 = elements_NW[:, sizes.channels :, None].chunk(2, 1)
        saves = {states.num_before(save): save for save in states.saves}
        before = [*range(-1, states.num_old - 1), *states.parents]
        is_chain = len(set(before)) == len(before)
        left = {-1: matrix_HDV}
        read = []
        for element, parent in enumerate(before):
            matrix_HDV = left[parent] * decay_NH1[element, :, :, None]
            key_HD1, delta_HV = key_NHD[element, :, :, None], value_NHV[element]
            if not self._is_mamba:
                delta_HV = delta_HV - (matrix_HDV * key_HD1).sum(1)
            delta_HV = delta_HV * beta_NH1[element]
            matrix_HDV = matrix_HDV + key_HD1 * delta_HV[:, None]
            if is_chain and element == parent + 1:
                left.pop(parent)  # a chain: no other element continues from there
            left[element] = matrix_HDV
            if element >= states.num_old:
                read_HV = (matrix_HDV * query_NHD[element, :, :, None]).sum(1)
                if self.weights.skips_H is not None:
                    read_HV += self.weights.skips_H.float()[:, None] * value_NHV[element]
                read.append(read_HV)
            if (save := saves.get(element + 1)) is not None:
                save.values_LS[self.number, -matrix_HDV.numel() :] = matrix_HDV.flatten()
        return torch.stack(read)

    def _heads(self, convolved_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [N, H, D], and values [N, H, V].

        Those of a delta net are brought to length 1, and the former scaled.
        """
        sizes = self.sizes
        keys = sizes.key_heads * sizes.key_size
        parts = [keys, keys, sizes.channels - 2 * keys]
        query, key, value = torch.split(convolved_NC, parts, -1)
        shared = sizes.value_heads // sizes.key_heads

        def by_heads(x: Tensor, scale: float = 1.0) -> Tensor:
            x_NGD = x.view(len(x), sizes.key_heads, sizes.key_size)
            if not self._is_mamba:
                x_NGD = x_NGD * (x_NGD.square().sum(-1, keepdim=True) + _TINY).rsqrt() * scale
            if sizes.is_tiled:
                return x_NGD.repeat(1, shared, 1)
            return x_NGD.repeat_interleave(shared, 1)

        query_NHD = by_heads(query, sizes.key_size**-0.5)
        return query_NHD, by_heads(key), value.view(len(value), -1, sizes.value_size)

    def _finished(self, read_RHV: Tensor, outer_RM: Tensor) -> Tensor:
        """Normed by head, and gated; [R, M]. Mamba-2 gates first, and norms by group."""
        if self._is_mamba:
            gated_RM = read_RHV.flatten(1) * F.silu(outer_RM)
            if self.weights.norm_V is None:
                return gated_RM
            by_group = gated_RM.view(len(gated_RM), self.sizes.key_heads, -1)
            scale = (by_group.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            return (by_group * scale).flatten(1) * self.weights.norm_V.float()
        assert self.weights.norm_V is not None
        scale = (read_RHV.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        normed_RHV = read_RHV * scale * self.weights.norm_V.float()
        return normed_RHV.flatten(1) * F.silu(outer_RM)
