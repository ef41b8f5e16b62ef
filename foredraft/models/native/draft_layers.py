"""The target's ends and a draft head's layers, run with the target's decoder.

A head's layers have cache layers beside the target's. Its input projection joins states and a token
to the first layer's input.

Shape legend: T tokens, N wanted logits, R some rows of the LM head, P joined states, E hidden size,
K inputs of a product (P times E), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.cache.layers import StoredLayers
from foredraft.core.errors import ConfigError
from foredraft.kernels.build import load_library
from foredraft.kernels.interface import declared
from foredraft.models.base import HeadChain, HeadRow, HeadWeights, Join, ModelShape
from foredraft.models.files.kept import KeptFiles, recipe_of
from foredraft.models.native.config import DecoderConfig, RotaryEmbedding
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.cuda import MAX_ROW_TOKENS, PagedDecoder, has_kernels, why_not_paged
from foredraft.models.native.model import Decoder, EagerDecoder, HandedDecoder, layer_norm, rms_norm
from foredraft.models.native.plan import ForwardPlan
from foredraft.models.native.quant import INT8, rows_of
from foredraft.models.native.weights import DecoderWeights, LayerWeights

if TYPE_CHECKING:
    from foredraft.models.native.head_chain import RecordedChain


class NativeParts:
    """See `foredraft.models.base.TargetParts`.

    Args:
        config: of the target.
        weights: of the target.
        logits: the decoder's own product with the head.
        kept: the model's on-disk cache.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        logits: Callable[[Tensor], Tensor],
        kept: KeptFiles,
    ) -> None:
        self._config, self._weights, self._logits = config, weights, logits
        self._kept = kept

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @torch.no_grad()
    def embed(self, token_ids_T: Tensor) -> Tensor:
        return rows_of(self._weights.embedding_VE, token_ids_T, self.dtype)

    @torch.no_grad()
    def norm(self, hidden_TE: Tensor) -> Tensor:
        config, weights = self._config, self._weights
        weight_E, eps = weights.final_norm_E, config.rms_norm_eps
        if config.family.layer_norms:
            return layer_norm(hidden_TE, weight_E, weights.final_norm_bias_E, eps)
        return rms_norm(hidden_TE, weight_E, eps, config.family.norm_offset)

    @torch.no_grad()
    def logits(self, normed_TE: Tensor) -> Tensor:
        return self._logits(normed_TE)

    @torch.no_grad()
    def head_rows(self, token_ids_R: Tensor) -> Tensor:
        rows_RE = rows_of(self._weights.head_VE, token_ids_R, self.dtype)
        scale = self._config.logits_scale
        return rows_RE if scale == 1.0 else rows_RE * scale

    def kept(self, name: str, recipe: str, make: Callable[[], Tensor]) -> Tensor:
        recipe = recipe_of(recipe, self._weights.dtype)
        tensors = self._kept.tensors(name, recipe)
        if tensors is None:
            tensors = {name: make()}
            self._kept.keep(name, recipe, tensors)
        return tensors[name]


NO_LAYERS = DecoderConfig(
    model_type="llama",
    vocab_size=1,
    hidden_size=2,
    intermediate_size=2,
    num_hidden_layers=0,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    max_position_embeddings=2**31 - 1,
    rms_norm_eps=1e-5,
    ropes=(RotaryEmbedding(1e4, 2),),
    tie_word_embeddings=True,
)


class NativeHeadRunner:
    """See `foredraft.models.base.HeadRunner`.

    The matrices are rounded to 8 bits where the fused kernel runs them on a CPU, and where kernels
    of a GPU run large ones: a draft may be a little worse for it, never wrong, and takes little
    more than half the time. Elsewhere a layer whose queries, keys and values are handed in runs in
    plain torch.

    Args:
        config: of a model of the layers.
        weights: of that model.
        layers: cache layers of their entries.
        fused: run them by the fused kernel.
        decoder: runs them; None: one that is made here.

    Attributes:
        chain: its rounds on a GPU, once there are any.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        layers: StoredLayers,
        fused: bool,
        decoder: Decoder | None = None,
    ) -> None:
        self.layers, self._parts = layers, (config, weights)
        self.chain: RecordedChain | None = None
        self._input_dtype = torch.float32 if fused else weights.dtype
        self._device = weights.device
        self._last = config.num_hidden_layers - 1
        new = FusedDecoder if fused else EagerDecoder
        self._decoder: Decoder = decoder or new(config, weights)
        self._norm_E, self._norm_eps = weights.final_norm_E, config.rms_norm_eps

    @classmethod
    def of_head(
        cls, head: HeadWeights, layers: StoredLayers, dtype: torch.dtype, fused: bool
    ) -> NativeHeadRunner:
        """For a trained head.

        Args:
            dtype: of the weights that are not packed.
        """
        config, is_handed = head_config(head), _is_handed(head)
        fused, packs = fused and not is_handed, packs_on_card(head, config, dtype)
        pack = _rounded_on_card if packs else _rounded if fused else None
        weights = _decoder_weights(head, dtype, pack)
        decoder: Decoder | None = None
        if is_handed:
            handed = _HandedOnCard if packs else HandedDecoder
            decoder = handed(config, weights, head.norm_E is not None)
        elif packs:
            decoder = PagedDecoder(config, weights)
        return cls(config, weights, layers, fused, decoder)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        if self._last < 0:
            return self._run_head(inputs_TE)
        inputs_TE = inputs_TE.to(self._device, self._input_dtype).contiguous()
        plan = ForwardPlan(hidden_TE=inputs_TE)
        for row in rows:
            self.layers.begin(row.slot, row.start)
            first, end = row.start + row.num_known, row.start + row.num_text + len(row.tree)
            self.layers.reserve(row.slot, first, end)
            skipped = self.layers.skipped(row.slot)
            _add_row(plan, row, self.layers.first(row.slot) - skipped, skipped)
        logits_NR, tapped = self._decoder.forward(plan, self.layers, (self._last,))
        for row in rows:
            self.layers.hold(row.slot, row.start + row.num_text)
        states_TE = tapped[self._last]
        return states_TE if states_TE.dtype is torch.float32 else states_TE.float(), logits_NR

    def new_chain(self, inputs: Any, ids_R: Tensor, num_taps: int) -> HeadChain | None:
        attends = self._last >= 0 and not self._parts[1].no_attention
        if not attends or why_not_paged(self._parts[0], self._device) is not None:
            return None
        if len(ids_R) > _MOST_LISTED:
            return None
        from foredraft.models.native.head_chain import RecordedChain

        parts = *self._parts, self.layers, inputs, ids_R, num_taps, self._decoder
        self.chain = RecordedChain(*parts)
        return self.chain

    def _run_head(self, inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self._decoder, FusedDecoder):  # with its norm
            inputs_TE = inputs_TE.float().contiguous()
            return inputs_TE, self._decoder.ends(inputs_TE)
        normed_TE = inputs_TE.to(self._device, self._input_dtype)
        normed_TE = rms_norm(normed_TE, self._norm_E, self._norm_eps).to(self._input_dtype)
        return inputs_TE.float(), self._decoder.logits(normed_TE)


_MOST_LISTED = 1 << 20
"""Output rows of a round: see `device_draws.listed`."""
_PACKED_FROM = 1 << 25
"""Numbers of a head on a GPU: smaller ones are read faster than their inputs are prepared."""


class _HandedOnCard(HandedDecoder, PagedDecoder):
    """With matrices in few bits."""


def packs_on_card(head: HeadWeights, config: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether a GPU's kernels run a head in 8 bits: a large one of 16."""
    if not head.layers or not all(map(_attends, head.layers)) or dtype.itemsize > 2:
        return False
    count = sum(x.numel() for layer in head.layers for x in layer.values())
    is_large = count + head.output_RE.numel() >= _PACKED_FROM
    return is_large and why_not_paged(config, head.output_RE.device) is None


def _add_row(plan: ForwardPlan, row: HeadRow, first: int, skipped: int) -> None:
    """Lay out the tokens of a row that are not known yet.

    Args:
        first: the position of its first block; entries are counted from there.
        skipped: entries of that block that come before the first one.
    """
    start = len(plan)
    root = row.start + row.num_text  # entries from here on belong to nodes
    end = root + len(row.tree)
    text = range(row.start + row.num_known, root)
    nodes = range(max(0, row.num_known - row.num_text), len(row.tree))
    depths, paths = row.tree.depths, row.tree.paths
    plan.positions.extend(text)
    plan.positions.extend(root - 1 + depths[node] for node in nodes)
    prefixes = [position + 1 - first for position in text] + [root - first] * len(nodes)
    seen = [range(len(row.tree))] * len(row.tree) if row.is_block else paths
    extras = [()] * len(text) + [tuple(root - first + on for on in seen[node]) for node in nodes]
    if skipped:  # what is not there cannot be in a prefix
        extras = [(*range(skipped, end), *on) for end, on in zip(prefixes, extras, strict=True)]
        prefixes = [0] * len(prefixes)
    plan.prefixes.extend(prefixes)
    plan.extras.extend(extras)
    entries = range(end - first - len(text) - len(nodes), end - first)
    plan.entries.extend(entries)
    plan.token_ids.extend([0] * len(entries))
    plan.slots.extend([row.slot] * len(entries))
    tokens = range(start, len(plan))
    plan.row_wanted.append(range(len(plan.wanted), len(plan.wanted) + row.num_wanted))
    plan.wanted.extend(range(tokens.stop - row.num_wanted, tokens.stop))
    plan.rows.append(tokens)


def head_config(head: HeadWeights) -> DecoderConfig:
    """The layers as a model of their own.

    Raises:
        ConfigError: the shapes of the weights do not fit each other.
    """
    shape = head.shape
    for layer in head.layers:
        _check_shapes(layer, shape)
    if _is_handed(head) and len(head.layers) > 1:
        raise ConfigError("a head whose queries, keys and values are handed in has one layer")
    if head.norm_E is None and not _is_handed(head):
        raise ConfigError("a head of this kind needs a final norm")
    norm_shape = (shape.hidden_size,) if head.norm_E is None else tuple(head.norm_E.shape)
    if not head.output_RE.shape[1:] == norm_shape == (shape.hidden_size,):
        raise ConfigError(
            f"output rows {[*head.output_RE.shape]} and norm {[*norm_shape]} do not fit a "
            f"hidden size of {shape.hidden_size}"
        )
    own = {"vocab_size": len(head.output_RE), "num_hidden_layers": len(head.layers)}
    sizes = {name: size for name, size in vars(shape).items() if name != "rope_theta"} | own
    rope = RotaryEmbedding(shape.rope_theta, shape.head_dim)
    return replace(NO_LAYERS, **sizes, ropes=(rope,))


def _check_shapes(layer: Mapping[str, Tensor], shape: ModelShape) -> None:
    hidden, feed = shape.hidden_size, shape.intermediate_size
    query = shape.num_attention_heads * shape.head_dim
    key_value = shape.num_key_value_heads * shape.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "mlp_norm.weight": (hidden,),
        "gate_up.weight": (2 * feed, hidden),
        "down.weight": (hidden, feed),
    }
    if "qkv.weight" in layer:
        expected["attention_norm.weight"] = (hidden,)
        expected["qkv.weight"] = (query + 2 * key_value, hidden)
    if _attends(layer):
        expected["output.weight"] = (hidden, query)
    for name, wanted in expected.items():
        if name not in layer or tuple(layer[name].shape) != wanted:
            found = [*layer[name].shape] if name in layer else "missing"
            raise ConfigError(f"{name} of the head is {found}; its shape asks for {[*wanted]}")


def _attends(layer: Mapping[str, Tensor]) -> bool:
    return "output.weight" in layer


def _is_handed(head: HeadWeights) -> bool:
    """Whether queries, keys and values are handed in."""
    return any(_attends(layer) and "qkv.weight" not in layer for layer in head.layers)


def _rounded(weight: Tensor, num_parts: int) -> Any:
    return INT8.of_weight(weight.float(), num_parts)


def _rounded_on_card(weight: Tensor, _: int) -> Any:
    from foredraft.models.native.triton_packed import CardMatrix

    return CardMatrix.rounded(INT8, weight)


def _decoder_weights(
    head: HeadWeights, dtype: torch.dtype, pack: Callable[[Tensor, int], Any] | None
) -> DecoderWeights:
    """Args: pack: brings a matrix of some parts into few bits; None: they stay as they are."""

    def matrix(weight: Tensor, num_parts: int = 1) -> Any:
        return pack(weight, num_parts) if pack else weight.to(dtype)

    nothing = torch.empty(0, 0, dtype=dtype, device=head.output_RE.device)
    layers = tuple(
        LayerWeights(
            attention_norm_E=layer.get("attention_norm.weight", nothing.flatten()).to(dtype),
            qkv_weight=matrix(layer["qkv.weight"]) if "qkv.weight" in layer else nothing,
            output_weight=matrix(layer["output.weight"]) if _attends(layer) else nothing,
            mlp_norm_E=layer["mlp_norm.weight"].to(dtype),
            gate_up_weight=matrix(layer["gate_up.weight"], 2),
            down_weight=matrix(layer["down.weight"]),
        )
        for layer in head.layers
    )
    output_RE = head.output_RE.to(dtype)
    without = frozenset(i for i, layer in enumerate(head.layers) if not _attends(layer))
    norm_E = output_RE.new_ones(head.shape.hidden_size) if head.norm_E is None else head.norm_E
    return DecoderWeights(
        output_RE, layers, norm_E.to(dtype), matrix(output_RE), no_attention=without
    )


def native_join(
    weight_EK: Tensor, table_VE: Tensor | None, eps: float, dtype: torch.dtype, fused: bool
) -> Join:
    """See `foredraft.models.base.HeadTarget.join`."""
    on_card = not fused and has_kernels(weight_EK.device)
    new = FusedJoin if fused else CardJoin if on_card else PlainJoin
    return new(weight_EK.detach().to(dtype), table_VE, eps)


class PlainJoin:
    """By torch, where the weights are."""

    def __init__(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> None:
        self._weight_EK, self._table_VE, self._eps = weight_EK.contiguous(), table_VE, eps
        self._ones_K = weight_EK.new_ones(weight_EK.shape[1])

    @torch.no_grad()
    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        device = self._weight_EK.device
        x_TPE = torch.stack([*states], 1).to(device).float()
        x_TPE = F.rms_norm(x_TPE, x_TPE.shape[-1:], eps=self._eps)
        joined_TE = F.linear(x_TPE.flatten(1).to(self._weight_EK.dtype), self._weight_EK).float()
        if self._table_VE is None:
            return joined_TE
        return joined_TE + self._table_VE[torch.as_tensor(tokens, device=device)].float()


class CardJoin(PlainJoin):
    """Of one state of each of a few tokens by one kernel, norm and all, in the weights' dtype."""

    @torch.no_grad()
    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        if len(states) > 1 or len(states[0]) > MAX_ROW_TOKENS:
            return super().__call__(states, tokens)
        from foredraft.models.native.triton_ops import Norm, linear

        weight_EK, table_VE, parts_TE = self._weight_EK, self._table_VE, None
        if table_VE is not None:
            parts_TE = F.embedding(torch.as_tensor(tokens, device=weight_EK.device), table_VE)
        return linear(
            states[0].to(weight_EK).contiguous(),
            weight_EK,
            norm=Norm(self._ones_K, self._eps),
            residual_NM=parts_TE,
        )


class FusedJoin:
    """By the fused kernel, in 8 bits and on one thread.

    Waking another thread takes longer than a small product does.
    """

    def __init__(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> None:
        num_rows, num_inputs = weight_EK.shape
        config = replace(NO_LAYERS, vocab_size=num_rows, hidden_size=num_inputs, rms_norm_eps=eps)
        packed = INT8.of_weight(weight_EK.float())
        no_embedding = torch.empty(1, num_inputs, dtype=weight_EK.dtype)
        weights = DecoderWeights(no_embedding, (), torch.ones(num_inputs), packed)
        self._product = FusedDecoder(config, weights, num_threads=1)
        self._library = declared(load_library("heads"), "heads")
        self._num_inputs, self._eps = num_inputs, eps
        self._table_VE = None if table_VE is None else table_VE.bfloat16().contiguous()

    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        # The product's own norm brings a row to 1; several states are brought there each alone.
        alone = len(states) == 1
        x_TK = states[0].float().contiguous() if alone else self._unit_rows(states)
        joined_TE = self._product.ends(x_TK)
        if self._table_VE is not None:
            count, width = joined_TE.shape
            self._library.foredraft_add_rows(
                self._table_VE.data_ptr(),
                (c_int64 * count)(*tokens),
                count,
                width,
                joined_TE.data_ptr(),
            )
        return joined_TE

    def _unit_rows(self, states: Sequence[Tensor]) -> Tensor:
        count, size = states[0].shape
        x_TK = torch.empty(count, self._num_inputs)
        for i, x_TE in enumerate(states):
            if x_TE.dtype not in (torch.bfloat16, torch.float32) or x_TE.stride(1) != 1:
                x_TE = x_TE.float().contiguous()
            self._library.foredraft_unit_rows(
                x_TE.data_ptr(),
                x_TE.dtype == torch.bfloat16,
                count,
                x_TE.stride(0),
                size,
                self._eps,
                x_TK.data_ptr() + i * size * x_TK.itemsize,
                self._num_inputs,
            )
        return x_TK
