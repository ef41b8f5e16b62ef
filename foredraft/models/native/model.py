"""The decoder in plain torch: the reference that faster paths must equal, on any device.

`Decoder` is the interface of all of them. `HandedDecoder` runs the layer of a draft head that
builds queries, keys and values from several inputs. `FixedShapeDecoder` has bits that do not depend
on the rest of the forward: stock libraries choose another kernel, and with it another order of
additions, for another number of rows. So its linear layers take blocks of a fixed number of tokens,
and its attention one token at a time over a padded number of entries. No library guarantees that
this is enough, so `probe` tries it.

Shape legend: T tokens of the forward, R tokens of one row, H query heads, G key-value heads,
C cache entries a row sees, D head size, P rotated numbers of a head, S query heads that share keys,
E hidden size, X experts, V vocabulary, N wanted logits, Q columns of queries, keys and values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foredraft.cache.states import RowStates
from foredraft.cache.store import BlockStore, Entries
from foredraft.core.choices import LIKELIEST, DrawKey
from foredraft.core.draws import draw_array
from foredraft.core.errors import CapabilityError
from foredraft.core.sampling import Law, drawn_laws
from foredraft.core.tree import TokenTree
from foredraft.models.base import ScoreRow, Scores, Target
from foredraft.models.native.config import DecoderConfig, Experts
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.quant import Matrix, PackedMatrix, Stack, as_tensor, rows_of
from foredraft.models.native.recurrent import RecurrentLayer, open_rows, states_of
from foredraft.models.native.weights import DecoderWeights, LayerWeights


class Decoder(Protocol):
    """Something that runs a forward plan: the eager reference or a faster equal.

    Attributes:
        is_fused: whether it is compiled code, which draws (`ForwardPlan.draws`) and for which heads
            and copies in few bits save time.
    """

    is_fused: bool

    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]: ...

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head alone: float32 logits [T, V] of normed states."""


DecoderFactory = Callable[[DecoderConfig, DecoderWeights], Decoder]


class Run(Protocol):
    """The state of one forward, shared by all layers.

    Attributes:
        states: of recurrent layers, with the tokens of each row.
        rotations: of each rotary embedding cosines [T, P], and sines whose first half is negated
            (see `rotate`).
        inputs: per-layer embeddings of the tokens, [T, P] for each layer; empty: none.
    """

    @property
    def states(self) -> Sequence[tuple[range, RowStates]]: ...

    @property
    def rotations(self) -> Sequence[tuple[Tensor, Tensor]]: ...

    @property
    def inputs(self) -> Sequence[Tensor]: ...

    def attend(
        self, index: int, layer: LayerWeights, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor
    ) -> Tensor:
        """Store a layer's keys and values, and attend to what each token sees; [T, H D].

        Args:
            index: number of the layer (`DecoderConfig.numbers`).
            layer: one that reads another's entries has no heads G.
        """


class SeenEntries(NamedTuple):
    """The entries that one row attends to.

    Attributes:
        mask_RC: where each of its tokens sees one; None: all see all.
        sinks_H: scores of something without a value that each token sees, too; None: no.
    """

    keys_GCD: Tensor
    values_GCD: Tensor
    mask_RC: Tensor | None
    sinks_H: Tensor | None = None


class EagerDecoder:
    """Runs a `ForwardPlan` layer by layer."""

    is_fused = False

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self._config, self._weights = config, weights
        self._inv_freqs = [rope.inverse_frequencies().to(weights.device) for rope in config.ropes]
        self._numbers = config.numbers()
        self._groups_heads = weights.device.type == "cuda"

    # Not inference_mode: its tensors could not be compacted or used in place outside of it.
    @torch.no_grad()
    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Write the plan's tokens into the cache and score the wanted ones.

        Returns:
            float32 logits [N, V], and for each tap the output [T, E] of that layer.

        Raises:
            ConfigError: the cache is of another model, or of another dtype than the weights.
        """
        cache.store.check_fits(self._config.kv_shape, self._weights.dtype)
        run, hidden_TE = self.run_of(plan, cache), plan.hidden_TE
        if hidden_TE is None:
            hidden_TE = self.embed(plan.token_ids_T)
        layers = range(len(self._weights.layers))
        with masked_attention(self._weights.device):
            hidden_TE, tapped = self._run_layers(run, hidden_TE, layers, taps)
        logits_NV = self._head(hidden_TE[plan.wanted])
        if run.states:
            states_of(cache).close_states([states for _, states in run.states])
        return logits_NV, tapped

    def run_of(self, plan: ForwardPlan, cache: Entries) -> Run:
        """The state of a forward: masks, rotations, recurrent states, per-layer embeddings."""
        device = self._weights.device
        masks = {
            window: [_to(plan.mask(row, window), device) for row in plan.rows]
            for window in (None, *self._config.windows)
        }
        rotations = self._rotations(plan.positions_T.to(device))
        states = list[tuple[range, RowStates]]()
        if self._config.recurrent:
            states = [*zip(plan.rows, open_rows(plan, states_of(cache)), strict=True)]
        inputs = self._inputs(plan.token_ids_T) if self._config.input_size else ()
        return _RowRun(plan, cache, rotations, masks, self._attend, states, inputs)

    def _inputs(self, token_ids_T: Tensor) -> list[Tensor]:
        """Per-layer embeddings [T, P]: each layer's table, plus a projection of the embeddings."""
        weights, embedded_TE, size = self._weights, self.embed(token_ids_T), self._config.input_size
        assert weights.inputs_VW is not None
        rows_TW = rows_of(weights.inputs_VW, token_ids_T.to(weights.device), weights.dtype)
        found = []
        for layer, row_TP in zip(weights.layers, torch.split(rows_TW, size, -1), strict=False):
            assert layer.input_weight is not None
            own_TP = self._linear(embedded_TE, layer.input_weight) * embedded_TE.shape[-1] ** -0.5
            own_TP = self._norm(own_TP, weights.input_norm_P)
            found.append((own_TP + row_TP * size**0.5) * 0.5**0.5)
        return found

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Token embeddings [T, E], scaled: the first layer's input."""
        weights = self._weights
        hidden_TE = rows_of(weights.embedding_VE, token_ids_T.to(weights.device), weights.dtype)
        scale = self._config.embedding_scale
        return hidden_TE if scale == 1.0 else hidden_TE * scale

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head alone: float32 logits [T, V] of normed states."""
        return finished_logits(head_logits(normed_TE, self._weights.head_VE), self._config)

    def _run_layers(
        self, run: Run, hidden_TE: Tensor, layers: Iterable[int], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last layer's output [T, E], and that of the tapped ones."""
        tapped: dict[int, Tensor] = {}
        for index in layers:
            layer, input_TE = self._weights.layers[index], hidden_TE
            if layer.kind.mixes and index not in self._weights.no_attention:
                mix = self._recurrent if layer.kind.is_recurrent else self._attention
                part_TE = mix(run, self._numbers[index], layer, hidden_TE)
                if layer.kind.mixes_beside:
                    part_TE = part_TE + self._recurrent(run, self._numbers[index], layer, hidden_TE)
                hidden_TE = self._add(hidden_TE, part_TE, layer.attention_post_norm_E)
            if layer.kind.feeds:
                input_TE = input_TE if self._config.family.is_parallel else hidden_TE
                part_TE = self._mlp(layer, input_TE)
                hidden_TE = self._add(hidden_TE, part_TE, layer.mlp_post_norm_E)
            if layer.input_gate is not None and layer.input_output is not None:
                gate_TP = self._linear(hidden_TE, layer.input_gate)
                gated_TP = gated(self._config.activation, gate_TP, run.inputs[index])
                part_TE = self._linear(gated_TP, layer.input_output)
                hidden_TE = self._add(hidden_TE, part_TE, layer.input_norm_E)
            if layer.factor_1 is not None:
                hidden_TE = hidden_TE * layer.factor_1
            if index in taps:
                tapped[index] = hidden_TE
        return hidden_TE, tapped

    def _add(self, hidden_TE: Tensor, part_TE: Tensor, post_norm_E: Tensor | None) -> Tensor:
        part_TE, scale = self._norm(part_TE, post_norm_E), self._config.residual_scale
        return hidden_TE + (part_TE if scale == 1.0 else part_TE * scale)

    def _head(self, hidden_NE: Tensor) -> Tensor:
        """Float32 logits [N, V] of the last layer's output."""
        weights = self._weights
        return self.logits(self._norm(hidden_NE, weights.final_norm_E, weights.final_norm_bias_E))

    def _rotations(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and signed sines [T, P] for `rotate`, in the weights' dtype."""
        found, dtype = [], self._weights.dtype
        for rope, inv_freq in zip(self._config.ropes, self._inv_freqs, strict=True):
            angles_TF = torch.outer(positions_T.to(torch.float32), inv_freq)
            cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
            if rope.amplitude != 1.0:
                cos_TF, sin_TF = cos_TF * rope.amplitude, sin_TF * rope.amplitude
            cos_TF, sin_TF = cos_TF.to(dtype), sin_TF.to(dtype)
            found.append((torch.cat((cos_TF, cos_TF), 1), torch.cat((-sin_TF, sin_TF), 1)))
        return found

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """Without a weight there is no norm."""
        if weight is None:
            return x
        eps = eps or self._config.rms_norm_eps
        if self._config.family.layer_norms:
            return layer_norm(x, weight, bias, eps)
        return rms_norm(x, weight, eps, self._config.family.norm_offset)

    def _head_norm(self, x_THD: Tensor, weight: Tensor | None) -> Tensor:
        """Of each head, or of all heads together, as the weight has it."""
        if weight is None or len(weight) == x_THD.shape[-1]:
            return self._norm(x_THD, weight)
        return self._norm(x_THD.flatten(1), weight).view(x_THD.shape)

    def _attention(self, run: Run, index: int, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        normed_TE = self._attention_input(layer, hidden_TE)
        qkv = self._linear(normed_TE, layer.qkv_weight, layer.qkv_bias)
        if layer.key_weight is not None:
            return self._attended_latents(run, index, layer, qkv)
        return self._attended(run, index, layer, qkv)

    def _attended_latents(
        self, run: Run, index: int, layer: LayerWeights, inputs_TX: Tensor
    ) -> Tensor:
        """All of attention [T, E] to latents, behind queries, or what these are made of, and
        entries [T, . + D]."""
        config, size = self._config, self._config.head_dim
        query, entry_TD = inputs_TX[:, :-size], inputs_TX[:, -size:]
        if layer.query_weight is not None:
            query = self._norm(query, layer.query_norm_D, eps=LATENT_EPS)
            query = self._linear(query, layer.query_weight)
        query_THX = query.reshape(len(query), config.num_attention_heads, -1)
        turned = config.ropes[0].size
        still_THC = self._of_heads(query_THX[..., turned:], layer.key_weight)
        query_THD = torch.cat((query_THX[..., :turned], still_THC), -1)
        latent_TC = self._norm(entry_TD[:, turned:], layer.key_norm_D, eps=LATENT_EPS)
        entry_T1D = torch.cat((entry_TD[:, :turned], latent_TC), -1)[:, None]
        query_THD, entry_T1D = (rotate(x, *run.rotations[0]) for x in (query_THD, entry_T1D))
        attended = run.attend(index, layer, query_THD, entry_T1D, entry_T1D)
        attended_THC = attended.view(query_THD.shape)[..., turned:]
        value_THV = self._of_heads(attended_THC, layer.value_weight)
        return self._linear(value_THV.flatten(1), layer.output_weight, layer.output_bias)

    def _of_heads(self, x_THK: Tensor, weight: Matrix | None) -> Tensor:
        """Of each head the product with its own matrix, which lie one below the other."""
        assert weight is not None
        parts: Sequence[Matrix] = weight.parts if isinstance(weight, PackedMatrix) else ()
        if isinstance(weight, Tensor):
            parts = weight.chunk(x_THK.shape[1])
        return torch.stack([self._linear(x_THK[:, i], part) for i, part in enumerate(parts)], 1)

    def _attention_input(self, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        return self._norm(hidden_TE, layer.attention_norm_E, layer.attention_norm_bias_E)

    def _recurrent(self, run: Run, number: int, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        """The output [T, E] of recurrent layer ``number``."""
        mixer, sizes = layer.mixer, self._config.recurrent
        assert mixer is not None
        assert sizes is not None
        normed_TE = self._attention_input(layer, hidden_TE)
        beside = layer.beside_in, layer.beside_out
        read, written = (layer.qkv_weight, layer.output_weight) if None in beside else beside
        assert read is not None
        assert written is not None
        inputs_TI = self._linear(normed_TE, read)
        gates_TG = None if mixer.gates_GE is None else self._linear(normed_TE, mixer.gates_GE)
        recurrent = RecurrentLayer(sizes, number, mixer, self._config.rms_norm_eps)
        return self._linear(recurrent.mixed(inputs_TI, gates_TG, run.states), written)

    def _attended(self, run: Run, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """All of attention [T, E] behind queries, keys and values [T, (H + 2G) D].

        Gates of queries lie behind each head's.
        """
        config, gates_TX = self._config, None
        num_query, (num_kv, size) = config.num_attention_heads, config.heads(layer.kind)
        if config.family.gates_attention:
            query_rows = config.qkv_rows(layer.kind)[0]
            both, key_value = qkv[:, :query_rows], qkv[:, query_rows:]
            query, gates = both.reshape(len(qkv), num_query, 2, size).unbind(2)
            qkv, gates_TX = torch.cat((query.flatten(1), key_value), -1), gates.flatten(1)
        heads = qkv.view(len(qkv), -1, size)
        # There are no keys and values of a layer that reads another's.
        turned, value_TGD = heads[:, : num_query + num_kv], heads[:, num_query + num_kv :]
        if config.family.norms_values and value_TGD.numel():
            value_TGD = self._norm(value_TGD, torch.ones_like(value_TGD[0, 0]))
        if layer.kind.rope is not None and config.family.norms_rotated:
            turned = rotate(turned, *run.rotations[layer.kind.rope])
        if layer.query_norm_D is not None:
            query_THD, key_TGD = turned[:, :num_query], turned[:, num_query:]
            normed = (
                self._head_norm(query_THD, layer.query_norm_D),
                self._head_norm(key_TGD, layer.key_norm_D),
            )
            turned = torch.cat(normed, 1)
        if layer.kind.rope is not None and not config.family.norms_rotated:
            turned = rotate(turned, *run.rotations[layer.kind.rope])
        query_THD, key_TGD = turned[:, :num_query], turned[:, num_query:]
        attended = run.attend(index, layer, query_THD, key_TGD, value_TGD)
        if gates_TX is not None:
            attended = attended * gates_TX.sigmoid()
        return self._linear(attended, layer.output_weight, layer.output_bias)

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, as_tensor(weight, x.dtype), bias)

    def _attend(self, query_RHD: Tensor, seen: SeenEntries) -> Tensor:
        """Attention of one row's tokens; [R, H, D].

        On a GPU the S query heads that share keys are laid behind one another as if they were
        further tokens: keys are then read once for all of them, by the library's kernels for masked
        attention, which know no shared keys. Others would hold all scores of a prompt in memory.
        """
        if not self._groups_heads or seen.sinks_H is not None:
            return self._sees(query_RHD.transpose(0, 1), seen).transpose(0, 1)
        (rows, _, size), groups = query_RHD.shape, len(seen.keys_GCD)
        query_GSRD = query_RHD.view(rows, groups, -1, size).permute(1, 2, 0, 3)
        if seen.mask_RC is not None:
            seen = seen._replace(mask_RC=seen.mask_RC.repeat(query_GSRD.shape[1], 1))
        attended = self._sees(query_GSRD.reshape(groups, -1, size), seen)
        return attended.view(query_GSRD.shape).permute(2, 0, 1, 3).reshape(rows, -1, size)

    def _sees(self, query_HRD: Tensor, seen: SeenEntries) -> Tensor:
        """Values by the softmax of scores; [H, R, D]."""
        cap, scale = self._config.attention_cap, self._config.query_scale
        keys_GCD, values_GCD, mask_RC, sinks_H = seen
        if cap is None and sinks_H is None:
            return F.scaled_dot_product_attention(
                *(query_HRD[None], keys_GCD[None], values_GCD[None]),
                attn_mask=mask_RC,
                scale=scale,
                enable_gqa=len(query_HRD) > len(keys_GCD),
            )[0]
        shared = len(query_HRD) // len(keys_GCD)
        keys, values = (x.repeat_interleave(shared, 0) for x in (keys_GCD, values_GCD))
        return capped_attention(query_HRD, keys, values, mask_RC, scale, cap, sinks_H)

    def _mlp(self, layer: LayerWeights, hidden_TE: Tensor) -> Tensor:
        normed_TE = self._norm(hidden_TE, layer.mlp_norm_E, layer.mlp_norm_bias_E)
        if layer.dense_gate_up is not None:
            return self._with_experts(layer, hidden_TE, normed_TE)
        if layer.router_XE is not None:
            return self._mixture(layer, layer.router_XE, normed_TE, normed_TE)
        return self._feed_forward(
            normed_TE,
            *(layer.gate_up_weight, layer.gate_up_bias, layer.down_weight, layer.down_bias),
            layer.activation_4,
        )

    def _feed_forward(
        self,
        normed_TE: Tensor,
        gate_up_weight: Stack,
        gate_up_bias: Tensor | None,
        down_weight: Stack,
        down_bias: Tensor | None,
        activation_4: Tensor | None = None,
    ) -> Tensor:
        gates = self._linear(normed_TE, gate_up_weight, gate_up_bias)
        if self._config.family.is_gated:
            gate, up = gates.chunk(2, dim=-1)
            activated = gated(self._config.activation, gate, up)
        elif activation_4 is not None:
            activated = xielu(gates, *xielu_numbers(activation_4))
        else:
            activated = activate(self._config.activation, gates)
        return self._linear(activated, down_weight, down_bias)

    def _with_experts(self, layer: LayerWeights, hidden_TE: Tensor, normed_TE: Tensor) -> Tensor:
        """The output of a dense feed-forward part, plus that of experts beside it."""
        assert layer.dense_gate_up is not None
        assert layer.dense_down is not None
        assert layer.router_XE is not None
        dense_TE = self._feed_forward(normed_TE, layer.dense_gate_up, None, layer.dense_down, None)
        routed_TE = self._norm(hidden_TE, layer.router_norm_E) * hidden_TE.shape[-1] ** -0.5
        normed_TE = self._norm(hidden_TE, layer.experts_norm_E)
        mixed_TE = self._mixture(layer, layer.router_XE, normed_TE, routed_TE)
        dense_TE = self._norm(dense_TE, layer.dense_post_norm_E)
        return dense_TE + self._norm(mixed_TE, layer.experts_post_norm_E)

    def _mixture(
        self, layer: LayerWeights, router_XE: Tensor, normed_TE: Tensor, routed_TE: Tensor
    ) -> Tensor:
        """Mixture of experts: each token's top experts, weighted by the router's probabilities.

        They are added in the order of experts.

        Args:
            routed_TE: the router's input.
        """
        experts, none = self._config.experts, [None] * layer.num_experts
        assert experts is not None
        chances_TK, chosen_TK = self._chosen(layer, self._linear(routed_TE, router_XE).float())
        chances_TK = chances_TK.to(normed_TE.dtype)
        gate_up, down = (
            as_tensor(weight, normed_TE.dtype).chunk(experts.count)
            for weight in (layer.gate_up_weight, layer.down_weight)
        )
        gate_up_bias, down_bias = (
            none if bias is None else bias.chunk(experts.count)
            for bias in (layer.gate_up_bias, layer.down_bias)
        )
        sums_TE = torch.zeros_like(normed_TE)
        for expert in sorted({*chosen_TK.flatten().tolist()}):
            tokens, places = (chosen_TK == expert).nonzero(as_tuple=True)
            part = self._feed_forward(
                normed_TE[tokens],
                *(gate_up[expert], gate_up_bias[expert], down[expert], down_bias[expert]),
            )
            sums_TE.index_add_(0, tokens, part * chances_TK[tokens, places, None])
        return sums_TE

    def _chosen(self, layer: LayerWeights, logits_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, K] and numbers of each token's experts."""
        experts, family, bias_X = self._config.experts, self._config.family, layer.router_bias_X
        assert experts is not None
        count = experts.count - experts.num_shared
        own_TX, gate_T1 = logits_TX[:, :count], logits_TX[:, count:].sigmoid()
        if family.chances == "sigmoid":
            chances_TX = ranked_TX = own_TX.sigmoid()
            if bias_X is not None:
                ranked_TX = chances_TX + bias_X.float()
        else:
            biased_TX = own_TX if bias_X is None else own_TX + bias_X.float()
            chances_TX = ranked_TX = biased_TX.softmax(-1)
        if experts.groups > 1:
            ranked_TX = self._of_best_groups(experts, ranked_TX)
        chosen_TK = ranked_TX.topk(experts.per_token - experts.num_shared).indices
        chances_TK = chances_TX.gather(1, chosen_TK)
        if experts.normalised:
            chances_TK = chances_TK / (chances_TK.sum(-1, keepdim=True) + family.chance_floor)
        chances_TK = chances_TK * experts.scale
        if layer.expert_factors_X is not None:
            chances_TK = chances_TK * layer.expert_factors_X.float()[chosen_TK]
        if experts.num_shared:
            if not experts.shared_gate:
                gate_T1 = torch.ones_like(chances_TK[:, :1])
            shared_S = torch.arange(count, experts.count, device=chosen_TK.device)
            chances_TK = torch.cat((chances_TK, gate_T1.expand(-1, len(shared_S))), 1)
            chosen_TK = torch.cat((chosen_TK, shared_S.expand(len(chosen_TK), -1)), 1)
        return chances_TK, chosen_TK

    def _of_best_groups(self, experts: Experts, ranked_TX: Tensor) -> Tensor:
        """Ranks of experts, -inf outside of the groups whose best ones rank highest together: two
        where chances are sigmoids, else one."""
        ranked_TGN = ranked_TX.view(len(ranked_TX), experts.groups, -1)
        num_best = 2 if self._config.family.chances == "sigmoid" else 1
        groups_TG = ranked_TGN.topk(num_best).values.sum(-1)
        chosen_TK = groups_TG.topk(experts.chosen_groups).indices
        is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, chosen_TK, False)
        return ranked_TGN.masked_fill(is_out_TG[..., None], -torch.inf).view(ranked_TX.shape)


class _RowRun:
    """A forward that attends row by row. See `Run`."""

    def __init__(
        self,
        plan: ForwardPlan,
        cache: Entries,
        rotations: Sequence[tuple[Tensor, Tensor]],
        masks: Mapping[int | None, list[Tensor | None]],
        attend_row: Callable[[Tensor, SeenEntries], Tensor],
        states: Sequence[tuple[range, RowStates]],
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self.rotations, self.states, self.inputs = rotations, states, inputs
        self._plan, self._masks = plan, masks
        blocks, size = list[int](), cache.store.block_size
        for row in plan.rows:
            table = cache.table(plan.slot(row))
            blocks.extend(table[entry // size] for entry in plan.entries[_slice(row)])
        offsets = [entry % size for entry in plan.entries]
        self._written = torch.tensor([blocks, offsets], dtype=torch.int64).to(cache.store.device)
        self._stores = {
            is_wide: (store, [_rows_of(store, cache, plan, row) for row in plan.rows])
            for is_wide, store in enumerate((cache.store, cache.store.wide))
            if store
        }
        self._attend_row = attend_row
        self._num_nodes = [sum(map(bool, plan.extras[_slice(row)])) for row in plan.rows]

    def attend(
        self, index: int, layer: LayerWeights, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor
    ) -> Tensor:
        outputs, kind = [], layer.kind
        blocks_T, offsets_T = self._written
        store, rows_of_all = self._stores[kind.is_wide]
        if kind.source is None:
            store.keys[:, index][blocks_T, :, offsets_T] = key_TGD
            store.values[:, index][blocks_T, :, offsets_T] = value_TGD
        masks = self._masks[kind.window]
        rows = zip(self._plan.rows, rows_of_all, masks, self._num_nodes, strict=True)
        for row, rows_R, mask, num_nodes in rows:
            end = self._plan.end(row)
            keys_GCD, values_GCD = (x[:, :end] for x in store.gather(index, rows_R))
            if num_nodes:
                _make_finite(keys_GCD[:, end - num_nodes :])
                _make_finite(values_GCD[:, end - num_nodes :])
            seen = SeenEntries(keys_GCD, values_GCD, mask, layer.sinks_H)
            outputs.append(self._attend_row(query_THD[_slice(row)], seen).flatten(1))
        return torch.cat(outputs)


def _rows_of(store: BlockStore, cache: Entries, plan: ForwardPlan, row: range) -> Tensor:
    """Where the blocks lie that hold a row's entries; see `BlockStore.rows`."""
    num_blocks = -(-plan.end(row) // store.block_size)
    return store.rows(cache.table(plan.slot(row))[:num_blocks])


_CHOICE = threading.RLock()
"""Held while attention kernels are chosen: torch has one choice for the process."""


@contextmanager
def masked_attention(device: torch.device) -> Iterator[None]:
    """On a GPU, attention by kernels whose choice does not fall otherwise from run to run.

    cuDNN's are left out: they build a plan for each new length of a prompt, 45 ms on an H200.
    """
    if device.type != "cuda":
        yield
        return
    with _CHOICE, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def capped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    cap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention [..., R, D] whose scores s become c tanh(s / c).

    Args:
        mask: where what is seen is True; None: all is seen.
        scale: None: 1 / root of D.
        cap: c; None: scores stay.
        sinks_H: a score that each token has beside, of something without a value.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ keys.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks_H is None:
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    sinks = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(values.dtype) @ values


def finished_logits(logits_NV: Tensor, config: DecoderConfig) -> Tensor:
    """Logits after the LM head's product: scaled, capped, and -inf for ids without a token."""
    if config.logits_scale != 1.0:
        logits_NV = logits_NV * config.logits_scale
    if config.logits_cap is not None:
        logits_NV = config.logits_cap * torch.tanh(logits_NV / config.logits_cap)
    if config.num_ids is not None:
        logits_NV[:, config.num_ids :] = -torch.inf
    return logits_NV


def activate(name: str, x: Tensor) -> Tensor:
    """One of `foredraft.models.native.config.ACTIVATIONS`."""
    if name == "relu2":
        return F.relu(x).square()
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh")


def gated(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """The activated gate times ``up``, as in SwiGLU; gpt-oss clips both."""
    if name != "clipped_silu":
        return activate(name, gate) * up
    gate, up = gate.clamp(max=CLIP), up.clamp(-CLIP, CLIP)
    return (up + 1) * (gate * torch.sigmoid(gate * CLIPPED_STEEPNESS))


def xielu_numbers(activation_4: Tensor) -> list[float]:
    """The arguments of `xielu` from a layer's learned parameters."""
    above, below, slope, least = activation_4.float().tolist()
    return [_softplus(above), slope + _softplus(below), slope, least]


def xielu(x: Tensor, above: float, below: float, slope: float, least: float) -> Tensor:
    """arXiv 2411.13010: a parabola above 0, a bent exponential below, and a slope."""
    bent = (torch.expm1(x.clamp(max=least)) - x) * below
    return torch.where(x > 0, above * x * x, bent) + slope * x


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x))


CLIP, CLIPPED_STEEPNESS = 7.0, 1.702
"""Of gpt-oss."""
LATENT_EPS = 1e-6
"""Of the norms of latents, whatever a model's others have."""


def _make_finite(entries_GND: Tensor) -> None:
    """Replace NaN in tree nodes by 0: a masked entry has weight 0, but 0 times NaN is NaN.

    So a node with NaN spoils no sibling and no token before it. Its own output stays NaN, and no
    draft is accepted behind it. The entries that attention reads change, not the cache.
    """
    torch.nan_to_num(entries_GND, 0.0, 0.0, 0.0, out=entries_GND)


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


def _to(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None else mask.to(device)


_ROWS_AT_ONCE = 512
"""Rows that are converted at once on CPUs: they stay in the core's cache until multiplied."""


def head_logits(normed_NE: Tensor, head_VE: Matrix) -> Tensor:
    """Float32 logits [N, V].

    GPUs multiply what is stored and add up in float32. CPUs have no such product: there the head is
    converted piece by piece, which for 49k rows takes 6 ms where a rounded product takes 2.5.
    """
    if not isinstance(head_VE, Tensor):
        return normed_NE.float() @ as_tensor(head_VE, torch.float32).T
    if head_VE.dtype == torch.float32:
        return normed_NE @ head_VE.T
    if head_VE.device.type in ("cuda", "meta"):
        return torch.mm(normed_NE, head_VE.T, out_dtype=torch.float32)
    inputs_NE = normed_NE.float()
    logits_NV = torch.empty((len(normed_NE), len(head_VE)), device=head_VE.device)
    for first in range(0, len(head_VE), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        torch.mm(inputs_NE, head_VE[rows].float().T, out=logits_NV[:, rows])
    return logits_NV


class HandedDecoder(EagerDecoder):
    """Runs one layer on inputs [T, E + Q]: the residual input beside queries, keys and values.

    Args:
        config: of the layer.
        weights: of the layer and the head; those of queries, keys and values are not looked at.
        has_norm: whether there is a final norm.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, has_norm: bool) -> None:
        super().__init__(config, weights)
        self.has_norm = has_norm

    def _run_layers(
        self, run: Run, hidden_TE: Tensor, layers: Iterable[int], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        size = self._config.hidden_size
        hidden_TE, qkv = hidden_TE[:, :size], hidden_TE[:, size:]
        (index,) = layers
        layer = self._weights.layers[index]
        hidden_TE = hidden_TE + self._attended(run, index, layer, qkv)
        hidden_TE = hidden_TE + self._mlp(layer, hidden_TE)
        return hidden_TE, {index: hidden_TE}

    def _head(self, hidden_NE: Tensor) -> Tensor:
        return super()._head(hidden_NE) if self.has_norm else self.logits(hidden_NE)


_TOKENS = 4
"""Tokens of a block; on CPUs four bfloat16 rows cost about what one costs."""
_ENTRIES = 128
"""Attention runs over a multiple of this many entries."""


class FixedShapeDecoder(EagerDecoder):
    """Runs a `ForwardPlan` layer by layer, in blocks of fixed shape."""

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        norm = super()._norm
        if weight is None:
            return x
        return _in_blocks(x, lambda block: norm(block, weight, bias, eps))

    def _linear(self, x: Tensor, weight: Stack, bias: Tensor | None = None) -> Tensor:
        weight = as_tensor(weight, x.dtype)
        return _in_blocks(x, lambda block: F.linear(block, weight, bias))

    def logits(self, normed_TE: Tensor) -> Tensor:
        return _in_blocks(normed_TE, super().logits)

    def _attend(self, query_RHD: Tensor, seen: SeenEntries) -> Tensor:
        keys_GCD, values_GCD, mask_RC, sinks_H = seen
        rows = []
        for i, query_HD in enumerate(query_RHD):
            own = slice(None) if mask_RC is None else mask_RC[i].nonzero()[:, 0]
            own_keys_GND = keys_GCD[:, own]
            keys_GND, values_GND = _padded(own_keys_GND), _padded(values_GCD[:, own])
            entries_N = torch.arange(keys_GND.shape[1], device=query_HD.device)
            mask_1N = (entries_N < own_keys_GND.shape[1])[None]
            padded = SeenEntries(keys_GND, values_GND, mask_1N, sinks_H)
            rows.append(self._sees(query_HD[:, None], padded)[:, 0])
        return torch.stack(rows)


def _in_blocks(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """``run`` over blocks of exactly ``_TOKENS`` along the first dimension, joined."""
    count = x.shape[0]
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -count % _TOKENS))
    return torch.cat([run(block) for block in torch.split(padded, _TOKENS)])[:count]


def _padded(states_GND: Tensor) -> Tensor:
    return F.pad(states_GND, (0, 0, 0, -states_GND.shape[1] % _ENTRIES))


def probe(target: Target) -> None:
    """Score one text in several ways and compare the logits bit for bit.

    Token by token, in chains of several lengths, beside trees of other rows, and as a prompt.

    Raises:
        CapabilityError: they differ, so this machine's libraries cannot keep the promise.
    """
    text = [(i * 37 + 11) % min(target.vocab_size, 500) for i in range(24)]
    alone = _scored(target, text, [1] * len(text))
    others = [
        *(_scored(target, text, sizes) for sizes in ([24], [1, 3, 8, 12])),
        _scored(target, text, [5, 7, 2, 10], num_others=2),
        _scored(target, text, [24], as_prompt=True),
    ]
    if not all(torch.equal(alone[-len(found) :], found) for found in others):
        raise CapabilityError(
            "exact=True cannot be kept here: this machine's libraries give other bits in other "
            "company, also in blocks of fixed shape. On CPU, install a C++ compiler (apt "
            "install g++) for the fused kernel, which keeps it by construction"
        )


def _scored(
    target: Target,
    text: list[int],
    sizes: list[int],
    num_others: int = 0,
    as_prompt: bool = False,
) -> Tensor:
    """Logits [tokens, V] after each token, scored as chains of these sizes beside so many rows.

    Of a prompt there are those after the last token alone.
    """
    cache, parts, start = target.cache, [], 0
    slots = [cache.allocate() for _ in range(num_others + 1)]
    branches = TokenTree(tuple(text[:3]), (-1, -1, 0))
    try:
        for size in sizes:
            part = text[start : start + size]
            own = ScoreRow(slots[-1], part[:1], TokenTree.chain(part[1:]))
            rows = [ScoreRow(slot, [text[start + 1]], branches) for slot in slots[:-1]]
            rows.append(ScoreRow(slots[-1], part) if as_prompt else own)
            parts.append(target.score(rows)[-1].logits_NV)
            for slot in slots[:-1]:
                cache.keep(slot, 1, ())
            cache.keep(slots[-1], *((size, ()) if as_prompt else (1, range(size - 1))))
            start += size
    finally:
        for slot in slots:
            cache.free(slot)
    return torch.cat(parts)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Computed in float32, rounded to the dtype of ``x`` before the weight and after it.

    Args:
        offset: added to the weight; such norms are rounded only after the product.
    """
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if offset:
        return (scaled * (offset + weight.float())).to(x.dtype)
    return (weight * scaled.to(x.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computed in float32; the mean is subtracted first."""
    x_mean = x.float() - x.float().mean(-1, keepdim=True)
    scaled = weight.float() * (x_mean * torch.rsqrt(x_mean.square().mean(-1, keepdim=True) + eps))
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate the first P numbers of every head.

    ``cos`` repeats its half, ``sin`` too, with its first half negated.
    """
    size = cos_TP.shape[-1]
    turned, rest = x_THD[..., :size], x_THD[..., size:]
    swapped = torch.roll(turned, size // 2, -1)
    turned = turned * cos_TP[:, None] + swapped * sin_TP[:, None]
    return turned if not rest.shape[-1] else torch.cat((turned, rest), -1)


def draws_behind_all(rows: Sequence[ScoreRow], plan: ForwardPlan) -> list[tuple[int, DrawKey]]:
    """Draws from all wanted logits, of the likeliest where a row has no key.

    Of a head in two steps these tokens have its own logits, and others estimates.
    """
    return [
        (logits_row, (row.draw or LIKELIEST).ahead(depth))
        for row, wanted in zip(rows, plan.row_wanted, strict=True)
        for depth, logits_row in enumerate(wanted)
    ]


def scored(
    decoder: Decoder,
    plan: ForwardPlan,
    cache: Entries,
    wanted: Sequence[tuple[int, DrawKey]],
    taps: Sequence[int] = (),
) -> Scores:
    """Run a plan, and draw what is wanted where the decoder does that."""
    if decoder.is_fused and wanted:
        plan.draws = draw_array([(row, key[:3]) for row, key in wanted])
    logits_NV, tapped = decoder.forward(plan, cache, taps)
    drawn: list[Law | None] | None = None
    if plan.draws:
        drawn = [None] * len(plan.wanted)
        for (logits_row, _), law in zip(wanted, drawn_laws(logits_NV, plan.draws), strict=True):
            drawn[logits_row] = law
    row_wanted, rows = tuple(plan.row_wanted), tuple(plan.rows)
    return Scores(logits_NV, row_wanted, tapped, rows, drawn, is_short=bool(plan.shortlists))
