"""The fused CPU decoder: one call into compiled code runs a whole forward.

A token's logits do not depend on what else is in the forward: they are equal bit for bit whether
it is scored alone, in a chain, as a tree node, in a batch or in a prefill chunk, with any number
of threads. `foredraft.models.native.model.EagerDecoder` says what is computed; here activations
are float32 throughout, while weights and cache keep their dtype.

The kernel reads a description that is made once and filled in for each forward. A round of drafting
is a forward of a few tokens right after one of the target, whose weights have swept everything else
out of the caches: a description that is made anew takes longer there than a head's kernel does.

Shape legend: T tokens of the forward, N wanted logits, R rows of a forward or of a head, L layers,
E hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof, c_double, c_int32, c_int64
from dataclasses import astuple
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.states import RowStates
from foredraft.cache.store import BlockStore, Entries
from foredraft.core.errors import ConfigError
from foredraft.kernels import interface
from foredraft.kernels.build import KernelUnavailable, load_library
from foredraft.kernels.threads import ThreadChooser, check_threads, forward_size
from foredraft.models.base import Shortlist
from foredraft.models.native.config import DecoderConfig, LayerKind
from foredraft.models.native.model import finished_logits, xielu_numbers
from foredraft.models.native.plan import ForwardPlan, plan_head
from foredraft.models.native.quant import (
    GROUP_ROWS,
    TILES,
    Matrix,
    PackedMatrix,
    Stack,
    StackedMatrix,
    tensor_of,
)
from foredraft.models.native.recurrent import MixerWeights, open_rows, states_of
from foredraft.models.native.weights import DecoderWeights, LayerWeights
from foredraft.system.cgroups import available_cpus

PHASES = ("linear", "attention", "head", "other")
"""Parts of a forward's time: matrix products of the layers, attention, the LM head, and all else
(embedding and norms). Each includes the wait for its slowest thread."""

_CLOSE_BYTES = 1 << 16
"""Weights this close to each other share huge pages; what lies between may become resident."""
_HEADS_TOGETHER = 8
"""Query heads that one thread attends with to the same latents, at most."""


class FusedDecoder:
    """Runs a `ForwardPlan` in compiled code. One forward at a time; others wait.

    Args:
        config: the model's shape.
        weights: its weights, on CPU, bfloat16 or float32, in one of the forms of `quant`, tiles
            where there are such (`has_tiles`); read in place, never copied.
        num_threads: threads of a forward; None follows what is fastest, up to torch's number.

    Raises:
        ConfigError: the weights are on another device, of another dtype or in a form that these
            kernels do not read, or the machine offers fewer threads.
        KernelUnavailable: the kernel cannot be compiled here (see `kernels.build`).
    """

    is_fused = True

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, num_threads: int | None = None
    ) -> None:
        _check(config, weights)
        if num_threads is not None:
            check_threads(num_threads)
        self._config, self._weights = config, weights
        self._norm_offset = config.family.norm_offset
        self._num_outputs = weights.head_VE.shape[0]
        self._num_threads, self._numbers = num_threads, config.numbers()
        self._views = _views(layer.kind for layer in weights.layers)
        self._most_threads = num_threads or min(torch.get_num_threads(), available_cpus())
        self._chooser = ThreadChooser(self._most_threads)
        self._kept: list[Tensor] = []  # what the pointers of `_model` point to
        self._beside: list[interface.Layer] = []
        library = self._library = interface.declared(load_library(), "decoder")
        layers = [self._layer(i, layer) for i, layer in enumerate(weights.layers)]
        self._layers = (interface.Layer * len(layers))(*layers)
        self._model = self._describe_model()
        # Logits by themselves: finished behind the kernel (see `logits`).
        self._unnormed = self._describe_model()
        self._unnormed.final_norm = self._vector(torch.ones_like(weights.final_norm_E))
        self._unnormed.logits_scale, self._unnormed.logits_cap = 1.0, 0.0
        self._unnormed.layer_norms, self._unnormed.final_norm_bias = 0, None
        self._workspace = torch.empty(0)
        self._phase_seconds = (c_double * len(PHASES))()
        self._described = _Description(self._phase_seconds)
        self._num_states: int | None = None  # where the head alone is described
        self._process, self._lock = os.getpid(), threading.Lock()
        self._forward = library.foredraft_forward
        self._workspace_size = library.foredraft_workspace_size
        for begin, end in _memory_ranges(self._kept):
            library.foredraft_use_huge_pages(begin, end - begin)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of the last forward by what was computed; Python around it is not in them."""
        return dict(zip(PHASES, self._phase_seconds, strict=True))

    def forward(
        self, plan: ForwardPlan, cache: Entries, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Write the plan's tokens into the cache and score the wanted ones.

        Returns:
            float32 logits [N, V], and for each tap the output [T, E] of that layer, in the
            weights' dtype (float32 if the plan begins with hidden states).

        Raises:
            IndexError: a token id outside the vocabulary, or an entry outside the cache.
            ConfigError: the cache is of another model, or of another dtype than the weights.
        """
        if not 0 <= min(plan.token_ids) <= max(plan.token_ids) < self._config.vocab_size:
            raise IndexError(
                f"token ids {min(plan.token_ids)} to {max(plan.token_ids)} do not fit a "
                f"vocabulary of {self._config.vocab_size}"
            )
        logits_NV = torch.empty(len(plan.wanted), sum(plan.shortlist_sizes) or self._num_outputs)
        hidden = self._config.hidden_size
        # Rounded by the kernel: torch's threads would take its cores for a while.
        precision = self._weights.dtype if plan.hidden_TE is None else torch.float32
        tapped = {i: torch.empty(len(plan), hidden, dtype=precision) for i in taps}
        with self._lock_here():
            if self._described.is_elsewhere(cache.store):
                cache.store.check_fits(self._config.kv_shape, self._weights.dtype, torch.int8)
                self._described.point_to_store(cache.store)
            tables = self._described.tables(plan, cache)
            states = open_rows(plan, states_of(cache)) if self._config.recurrent else []
            work = self._point_to_states(states) if states else []
            self._describe(plan, tables, tapped)
            self._run(self._model, logits_NV)
            if work:
                states_of(cache).close_states(states)
        return logits_NV, tapped

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head alone: float32 logits [T, V] of normed states.

        The kernel's last step normalises and multiplies. With weights of one its norm only scales,
        which is undone: that costs the last bit.
        """
        self._lock_here()  # before torch computes anything
        inputs_TE = normed_TE.float().contiguous()
        scale_T1 = (inputs_TE.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt()
        logits_TV = self.ends(inputs_TE, self._unnormed)
        return finished_logits(logits_TV.mul_(scale_T1), self._config)

    def ends(self, states_TE: Tensor, model: interface.Model | None = None) -> Tensor:
        """Norm and head alone: float32 logits [T, V] of contiguous float32 states.

        Args:
            model: described with another norm.
        """
        logits_TV = torch.empty(len(states_TE), self._num_outputs)
        with self._lock_here():
            if self._num_states != len(states_TE):  # else all is said but where they lie
                self._describe(plan_head(len(states_TE)))
                self._described.forward.first_layer = len(self._layers)
                self._num_states = len(states_TE)
            self._described.forward.hidden = states_TE.data_ptr()
            self._run(model or self._model, logits_TV)
        return logits_TV

    def leaves_out(self, shortlist: Shortlist | None) -> bool:
        """Whether forwards can leave out all other tokens: only a head in two steps does that."""
        if shortlist is None or self._weights.screen_VE is None:
            return False
        return max((shortlist.num_first, *shortlist.others)) < self._num_outputs

    def _describe(
        self,
        plan: ForwardPlan,
        tables: Sequence[int] = (),
        tapped: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Say all of a forward but where its logits go.

        Args:
            tables: addresses, of each token's blocks one.
        """
        self._num_states, taps = None, [0] * len(self._layers)
        for i, tap_TE in (tapped or {}).items():
            taps[i] = tap_TE.data_ptr()
        self._described.fill(plan, tables, taps)
        described = self._described.forward
        described.max_entries = max(plan.entries, default=0) + 1
        amounts = described.num_tokens, described.num_wanted, described.max_entries
        described.workspace = self._work_memory(*amounts)

    def _run(self, model: interface.Model, logits_NV: Tensor) -> None:
        """Run the forward that is described, with as many threads as are best."""
        described = self._described.forward
        described.logits = logits_NV.data_ptr()
        num_layers = described.end_layer - described.first_layer
        size = forward_size(
            described.num_tokens, described.max_entries, described.num_wanted, num_layers
        )
        described.num_threads = self._num_threads or self._chooser.choose(size)
        started = time.perf_counter()
        _check_outcome(self._forward(model, described), described.num_threads)
        self._chooser.observe(size, time.perf_counter() - started)

    def _lock_here(self) -> threading.Lock:
        """The lock around a run of the kernel; a new one after fork().

        A thread that the child process does not have may hold the parent's lock. The kernel starts
        its threads anew in the child. torch would wait for its parent's threads for ever in any
        operation that it splits, so it is left with one thread.
        """
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
            torch.set_num_threads(1)
        return self._lock

    def _work_memory(self, *sizes: int) -> int:
        """Address of enough work memory; it only ever grows."""
        needed = self._workspace_size(self._model, *sizes, self._most_threads)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed, dtype=torch.float32)
        return self._workspace.data_ptr()

    def _describe_model(self) -> interface.Model:
        config, weights, experts = self._config, self._weights, self._config.experts
        sizes = [rope.size for rope in config.ropes]
        speeds = torch.zeros(len(sizes), max(size for _, size in config.each_heads) // 2)
        for row, rope in zip(speeds, config.ropes, strict=True):
            row[: rope.size // 2] = rope.inverse_frequencies()
        table_VW = weights.inputs_VW
        width = {} if table_VW is None else {"input_width": table_VW.shape[1]}
        return interface.Model(
            **_sizes(config) | width,
            num_layers=len(weights.layers),
            vocab=self._num_outputs,
            is_bf16=weights.dtype == torch.bfloat16,
            form=self._form(),
            int8_activations=weights.activation_bits == 8,
            norm_eps=config.rms_norm_eps,
            layers=addressof(self._layers),
            embedding=self._matrix(weights.embedding_VE),
            head=self._matrix(weights.head_VE),
            final_norm=self._vector_of_norm(weights.final_norm_E),
            screen=self._matrix(weights.screen_VE),
            num_ropes=len(sizes),
            inv_freq=self._vector(speeds),
            rope_sizes=self._address(torch.tensor(sizes)),
            amplitudes=self._vector(torch.tensor([rope.amplitude for rope in config.ropes])),
            num_views=len(self._views),
            windows=self._address(torch.tensor([window for window, _ in self._views])),
            view_kinds=self._address(torch.tensor([int(is_wide) for _, is_wide in self._views])),
            norms_all_heads=config.family.head_norms == "all",
            activation=interface.ACTIVATIONS[config.activation],
            normalises_chances=experts is not None and experts.normalised,
            shared_experts=experts.num_shared if experts else 0,
            shared_gate=experts is not None and experts.shared_gate,
            sigmoid_chances=config.family.chances == "sigmoid",
            chance_floor=config.family.chance_floor,
            chance_scale=experts.scale if experts else 1.0,
            layer_norms=config.family.layer_norms,
            final_norm_bias=self._vector(weights.final_norm_bias_E),
            norms_rotated=config.family.norms_rotated,
            query_scale=config.query_scale or 0.0,
            logits_cap=config.logits_cap or 0.0,
            logits_scale=config.logits_scale,
            embedding_scale=config.embedding_scale,
            residual_scale=config.residual_scale,
            inputs=self._matrix(table_VW),
            input_norm=self._vector(weights.input_norm_P),
            num_ids=self._num_outputs if config.num_ids is None else config.num_ids,
            expert_groups=experts.groups if experts else 1,
            chosen_groups=experts.chosen_groups if experts else 1,
        )

    def _point_to_states(self, rows: Sequence[RowStates]) -> list[Any]:
        """Say what recurrent layers have of each row; returns the memory that this points to."""
        sizes = self._config.recurrent
        assert sizes is not None
        counts = [row.num_elements for row in rows]
        elements = torch.empty(sum(counts) if sizes.num_gates else 0, sizes.states(1).entry_size)
        matrices = torch.empty(self._most_threads, 2, sizes.key_size * sizes.value_size)
        found = (interface.StatesOfRow * len(rows))()
        kept: list[Any] = [elements, matrices, found]
        first = 0
        for one, row, count in zip(found, rows, counts, strict=True):
            saves = [
                interface.Save(row.num_before(save), save.values_LS.data_ptr())
                for save in row.saves
            ]
            parents = (c_int32 * len(row.parents))(*row.parents)
            kept += [parents, (interface.Save * len(saves))(*saves)]
            one.state, one.old_log = row.state.values_LS.data_ptr(), row.old_LTW.data_ptr()
            one.new_log = row.new_LTW.data_ptr()
            one.parents, one.saves = map(addressof, kept[-2:])
            one.elements = elements[first:].data_ptr()
            one.num_old, one.first_logged, one.num_saves = row.num_old, row.first_logged, len(saves)
            one.old_stride, one.new_stride = row.old_LTW.stride(0), row.new_LTW.stride(0)
            first += count
        described = self._described.forward
        described.states, described.matrices = addressof(found), matrices.data_ptr()
        return kept

    def _form(self) -> int:
        """A ``ForedraftForm``."""
        head_VE = self._weights.head_VE
        if isinstance(head_VE, PackedMatrix) and head_VE.form is TILES:
            if not self._library.foredraft_has_tiles() or self._weights.dtype != torch.bfloat16:
                raise ConfigError(
                    "these weights are laid out for tiles (AMX), which take bfloat16 weights and "
                    "kernels that use them; load the weights as they are"
                )
            if not self._config.fits_tiles:
                raise ConfigError(
                    "these weights are laid out for tiles (AMX), and attention on tiles knows no "
                    "windows and no capped scores; load the weights as they are"
                )
            return interface.FORM_TILED
        return interface.FORM_PLAIN if isinstance(head_VE, Tensor) else interface.FORM_PACKED

    def _layer(self, index: int, layer: LayerWeights) -> interface.Layer:
        described = interface.Layer(
            attention_norm=self._vector_of_norm(layer.attention_norm_E),
            qkv_bias=self._vector(layer.qkv_bias),
            query_norm=self._vector_of_norm(layer.query_norm_D),
            key_norm=self._vector_of_norm(layer.key_norm_D),
            output=self._matrix(layer.output_weight),
            output_bias=self._vector(layer.output_bias),
            mlp_norm=self._vector_of_norm(layer.mlp_norm_E),
            down=self._matrix(layer.down_weight, _bytes_of(layer.down_weight) // layer.num_experts),
            attention_post_norm=self._vector_of_norm(layer.attention_post_norm_E),
            mlp_post_norm=self._vector_of_norm(layer.mlp_post_norm_E),
            router=None if layer.router_XE is None else self._router(layer.router_XE),
            router_bias=self._vector(layer.router_bias_X),
            attention_norm_bias=self._vector(layer.attention_norm_bias_E),
            mlp_norm_bias=self._vector(layer.mlp_norm_bias_E),
            sinks=self._vector(layer.sinks_H),
            down_bias=self._vector(layer.down_bias),
            activation=None
            if layer.activation_4 is None
            else self._vector(torch.tensor(xielu_numbers(layer.activation_4))),
            rope=-1 if layer.kind.rope is None else layer.kind.rope,
            view=self._views.index((layer.kind.window or 0, layer.kind.is_wide)),
            number=self._numbers[index],
            kind=layer.kind.is_wide,
            is_reader=layer.kind.source is not None,
            feed_forward=layer.gate_up_weight.shape[0] // layer.num_gate_parts,
            factor=1.0 if layer.factor_1 is None else layer.factor_1.item(),
            input=self._matrix(layer.input_weight),
            input_gate=self._matrix(layer.input_gate),
            input_output=self._matrix(layer.input_output),
            input_norm=self._vector_of_norm(layer.input_norm_E),
            query=self._matrix(layer.query_weight),
            key_of_head=self._of_heads(layer.key_weight, layer.num_heads),
            value_of_head=self._of_heads(layer.value_weight, layer.num_heads),
        )
        if layer.dense_gate_up is not None:
            self._describe_dense(described, layer)
        if self._config.family.norms_values:
            described.value_norm = self._vector(torch.ones(self._config.heads(layer.kind)[1]))
        if layer.mixer is not None:
            self._describe_mixer(self._mixing(described, layer), layer.mixer)
        if index not in self._weights.no_attention:
            for number, part in enumerate(_qkv_parts(layer.qkv_weight)):
                described.qkv[number] = self._matrix(part)
                described.qkv_rows[number] = part.shape[0]
        described.gate, described.up = self._gate_up(layer.gate_up_weight, layer.num_experts)
        if layer.gate_up_bias is not None:
            begin = self._vector(layer.gate_up_bias)
            assert begin is not None
            described.gate_bias = described.up_bias = begin
            if described.gate.data:
                described.up_bias = begin + 4 * (len(layer.gate_up_bias) // layer.num_gate_parts)
            else:
                described.gate_bias = None
        return described

    def _mixing(self, described: interface.Layer, layer: LayerWeights) -> interface.Layer:
        """Where a recurrent part is described: a layer by itself where it lies beside attention."""
        if layer.beside_in is None or layer.beside_out is None:
            return described
        beside = interface.Layer(
            attention_norm=described.attention_norm,
            output=self._matrix(layer.beside_out),
            number=described.number,
        )
        for number, part in enumerate(_qkv_parts(layer.beside_in)):
            beside.qkv[number], beside.qkv_rows[number] = self._matrix(part), part.shape[0]
        self._beside.append(beside)
        described.beside = addressof(beside)
        return beside

    def _describe_mixer(self, described: interface.Layer, mixer: MixerWeights) -> None:
        described.convolution = self._vector(mixer.conv_C1K[:, 0].T)
        described.convolution_bias = self._vector(mixer.bias_C)
        described.skips = self._vector(mixer.skips_H)
        if mixer.gates_GE is None:
            return
        assert mixer.log_decay_H is not None
        described.gates = self._router(mixer.gates_GE)
        described.decay_rates = self._vector(mixer.log_decay_H.float().exp())
        described.step_bias = self._vector(mixer.step_bias_H)
        described.value_norm = self._vector(mixer.norm_V)

    def _describe_dense(self, described: interface.Layer, layer: LayerWeights) -> None:
        """A part that all tokens read beside experts, as a layer by itself."""
        assert layer.dense_gate_up is not None
        assert layer.dense_down is not None
        assert layer.router_norm_E is not None
        dense = interface.Layer(
            mlp_norm=described.mlp_norm,
            mlp_post_norm=self._vector_of_norm(layer.dense_post_norm_E),
            down=self._matrix(layer.dense_down),
            feed_forward=self._config.dense_beside,
        )
        dense.gate, dense.up = self._gate_up(layer.dense_gate_up, 1)
        self._beside.append(dense)
        described.dense = addressof(dense)
        described.mlp_norm = self._vector_of_norm(layer.experts_norm_E)
        described.experts_post_norm = self._vector_of_norm(layer.experts_post_norm_E)
        scale = self._config.hidden_size**-0.5
        described.router_norm = self._vector(layer.router_norm_E.float() * scale)
        described.expert_factors = self._vector(layer.expert_factors_X)

    def _gate_up(self, weight: Stack, count: int) -> tuple[interface.Matrix, interface.Matrix]:
        """Gate and up, which lie one below the other, of one expert behind those of another."""
        each = 1 + self._config.family.is_gated
        if isinstance(weight, Tensor):
            parts: Sequence[Matrix] = weight.chunk(each * count)
        else:
            parts = weight.parts
        step = 0 if isinstance(weight, StackedMatrix) else each * _bytes_of(parts[0])
        gate = self._matrix(parts[0], step) if each > 1 else interface.Matrix()
        return gate, self._matrix(parts[each - 1], step)

    def _of_heads(self, weight: Matrix | None, count: int) -> interface.Matrix:
        return self._matrix(weight, _bytes_of(weight) // count if weight is not None else 0)

    def _router(self, router_XE: Tensor) -> int:
        """In the type whose order activations are in (``Order`` of products.h)."""
        is_plain = self._form() == interface.FORM_PLAIN
        return self._address(router_XE.to(self._weights.dtype if is_plain else torch.float32))

    def _vector_of_norm(self, weight: Tensor | None) -> int | None:
        """The factors of a norm, its offset added."""
        return None if weight is None else self._vector(weight.float() + self._norm_offset)

    def _matrix(self, matrix: Matrix | None, step: int = 0) -> interface.Matrix:
        """One matrix, or the first of some that begin so many bytes one behind the other."""
        if matrix is None or not matrix.shape[0]:
            return interface.Matrix()
        code = matrix.form.code if isinstance(matrix, PackedMatrix) else interface.NOT_PACKED
        return interface.Matrix(self._address(tensor_of(matrix)), code, step)

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _vector(self, tensor: Tensor | None) -> int | None:
        """Vectors are small: a float32 copy spares the kernel a second type."""
        if tensor is None:
            return None
        self._kept.append(tensor.to(torch.float32).contiguous())
        return self._kept[-1].data_ptr()


class _Description:
    """A forward as the kernel reads it, in memory that stays and grows.

    Args:
        phase_seconds: where the kernel says how long it took.
    """

    def __init__(self, phase_seconds: ctypes.Array[c_double]) -> None:
        self.forward = interface.Forward(phase_seconds=addressof(phase_seconds))
        self._lists: dict[str, ctypes.Array[Any]] = {}
        self._tables: list[array[int]] = []
        self._keys: weakref.ref[Tensor] | None = None

    def fill(self, plan: ForwardPlan, tables: Sequence[int], taps: Sequence[int]) -> None:
        """Say all of a plan.

        Args:
            tables, taps: addresses, of each token's blocks and of each layer's output; 0: unwanted.
        """
        forward, (num_first, num_others) = self.forward, plan.shortlist_sizes
        missing, put = [-1] * num_others, self._put
        put("token_ids", plan.token_ids)
        put("positions", plan.positions)
        put("entries", plan.entries)
        put("prefixes", plan.prefixes)
        put("extra_starts", [0, *accumulate(map(len, plan.extras))])
        put("extras", [*chain.from_iterable(plan.extras)])
        put("wanted", plan.wanted)
        put("rows", [token for row in plan.rows for token in (row.start, row.stop)], c_int64)
        put("tables", tables, c_int64)
        put("taps", taps, c_int64)
        if num_others:
            put(
                "others",
                [i for one in plan.shortlists for i in (*one.others, *missing)[:num_others]],
            )
        forward.num_tokens, forward.num_rows = len(plan), len(plan.rows)
        forward.num_wanted, forward.num_draws = len(plan.wanted), len(plan.draws or ())
        forward.first_layer, forward.end_layer = 0, len(taps)
        forward.hidden = None if plan.hidden_TE is None else plan.hidden_TE.data_ptr()
        forward.rounds_taps = plan.hidden_TE is None
        forward.draws = None if plan.draws is None else addressof(plan.draws)
        forward.num_first, forward.num_others = num_first, num_others

    def tables(self, plan: ForwardPlan, cache: Entries) -> list[int]:
        """Where the blocks of each token's slot are listed.

        Raises:
            IndexError: a token's entry lies outside of them.
        """
        size, addresses = cache.store.block_size, list[int]()
        self._tables = [cache.table(plan.slot(row)) for row in plan.rows]  # some are new
        for row, table in zip(plan.rows, self._tables, strict=True):
            address, num_blocks = table.buffer_info()
            if plan.end(row) > num_blocks * size:
                raise IndexError(
                    f"entry {plan.end(row) - 1} of slot {plan.slot(row)} lies outside its blocks, "
                    f"which hold {num_blocks * size} entries; reserve it first"
                )
            addresses += [address] * len(row)
        return addresses

    def is_elsewhere(self, store: BlockStore) -> bool:
        """Whether blocks are not where the last forward's were: they move when they grow."""
        return self._keys is None or self._keys() is not store.keys

    def point_to_store(self, store: BlockStore) -> None:
        """Say where the blocks lie, and what they hold."""
        self.forward.block_entries = store.block_size
        self.forward.int8_entries = store.dtype == torch.int8
        for place, one in zip(self.forward.stores, (store, store.wide), strict=True):
            if one is not None:
                place.keys, place.values = one.keys.data_ptr(), one.values.data_ptr()
                place.block_stride, place.layer_stride, place.head_stride, _, _ = one.keys.stride()
                if one.shape.keys_are_values:  # all heads that are said to be there are one
                    place.head_stride = 0
        self._keys = weakref.ref(store.keys)  # last: where Ctrl-C comes before it, all is said anew

    def _put(self, name: str, values: Sequence[int], kind: type[Any] = c_int32) -> None:
        """Write a list where the kernel reads it."""
        kept = self._lists.get(name)
        if kept is None or len(kept) < len(values):
            self._lists.pop(name, None)  # where Ctrl-C comes before all is said, there is no list
            kept = (kind * (2 * len(values) + 8))()
            setattr(self.forward, name, addressof(kept))
            self._lists[name] = kept
        kept[: len(values)] = values


def work_bytes(config: DecoderConfig, is_bf16: bool, form: int, num_tokens: int) -> int:
    """Work memory of a forward that reads so many tokens of one text.

    Args:
        is_bf16: whether the cache, and matrices that are no packed ones, are bfloat16.
        form: a ``ForedraftForm``.
    """
    size = interface.declared(load_library(), "decoder").foredraft_workspace_size
    views, names = _views(config.kinds), config.family.names
    windows = (c_int64 * len(views))(*[window for window, _ in views])
    layer = interface.Layer(attention_post_norm=1 if names.attention_post_norm else None)
    model = interface.Model(
        **_sizes(config),
        num_layers=1,
        layers=addressof(layer),
        is_bf16=is_bf16,
        form=form,
        num_ropes=len(config.ropes),
        num_views=len(windows),
        windows=addressof(windows),
    )
    num_threads = min(torch.get_num_threads(), available_cpus())
    floats: int = size(model, num_tokens, 1, num_tokens, num_threads)
    return floats * torch.float32.itemsize


def _views(kinds: Iterable[LayerKind]) -> list[tuple[int, bool]]:
    """Windows of layers, or 0 where they see all, and whether these are wide."""
    views = [*dict.fromkeys((kind.window or 0, kind.is_wide) for kind in kinds)]
    return views or [(0, False)]


def _sizes(config: DecoderConfig) -> dict[str, Any]:
    """The sizes that work memory depends on."""
    recurrent, sizes = config.recurrent, dict[str, int]()
    if recurrent and config.num_recurrent_layers:
        names = ("window", "channels", "key_heads", "value_heads", "key_size", "value_size")
        sizes = {name: getattr(recurrent, name) for name in (*names, "is_tiled")}
        sizes["is_mamba"] = recurrent.kind == "mamba2"
    return {
        "hidden": config.hidden_size,
        "feed_forward": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "heads": (interface.Heads * 2)(*(interface.Heads(*one) for one in _heads(config))),
        "latent": interface.LatentSizes(*(astuple(config.latent) if config.latent else ())),
        "num_experts": config.experts.count if config.experts else 0,
        "chosen_experts": config.experts.per_token if config.experts else 0,
        "dense_feed_forward": max(
            *(config.feed_forward(index)[1] for index in range(config.num_hidden_layers)),
            *(0, config.dense_beside),
        ),
        "is_parallel": config.family.is_parallel,
        "keeps_inputs": config.family.is_parallel
        or config.family.mixes_beside
        or config.input_size + config.dense_beside > 0,
        "input_size": config.input_size,
        "input_width": config.input_size * config.num_hidden_layers,
        "attention_cap": config.attention_cap or 0.0,
        "gates_attention": config.family.gates_attention,
        "recurrent": interface.RecurrentSizes(**sizes),
    }


def _heads(config: DecoderConfig) -> Sequence[tuple[int, int]]:
    """Heads as threads share them out: latents are one, which some query heads read at a time."""
    if config.latent is None:
        return config.each_heads
    count = config.num_attention_heads
    together = max(n for n in range(1, min(count, _HEADS_TOGETHER) + 1) if count % n == 0)
    return [(count // together, config.head_dim)] * 2


def has_tiles() -> bool:
    """Whether the kernels chosen here multiply bfloat16 weights on tiles (`quant.TILES`)."""
    try:
        return bool(load_library().foredraft_has_tiles())
    except KernelUnavailable:
        return False


def _qkv_parts(matrix: Stack) -> tuple[Matrix, ...]:
    """Matrices that the kernel multiplies one after the other: each begins with a whole group."""
    if not isinstance(matrix, StackedMatrix):
        return (matrix,)
    for part in matrix.parts[:-1]:
        if part.shape[0] % GROUP_ROWS:
            raise ConfigError(
                f"queries, keys and values of formats of their own have {part.shape[0]} rows, no "
                f"multiple of {GROUP_ROWS}; load the weights as bf16"
            )
    return matrix.parts


def _bytes_of(matrix: Matrix) -> int:
    tensor = tensor_of(matrix)
    return tensor.numel() * tensor.dtype.itemsize


def _memory_ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Where tensors lie, as [begin, end) addresses; close neighbours make one range."""
    ranges: list[tuple[int, int]] = []
    for begin, size in sorted((t.data_ptr(), t.numel() * t.dtype.itemsize) for t in tensors):
        end = begin + size
        if ranges and begin - ranges[-1][1] <= _CLOSE_BYTES:
            begin, previous_end = ranges.pop()
            end = max(end, previous_end)
        ranges.append((begin, end))
    return ranges


def _check_outcome(outcome: int, num_threads: int) -> None:
    """``Outcome`` of entry.h."""
    if outcome == 1:
        raise RuntimeError(
            "two forwards of one decoder at the same time; this is a bug of foredraft"
        )
    if outcome == 2:
        raise RuntimeError(
            f"the system starts no {num_threads} threads for this process; ask for fewer (threads)"
        )


def _check(config: DecoderConfig, weights: DecoderWeights) -> None:
    if weights.device.type != "cpu":
        raise ConfigError(f"the fused decoder runs on cpu, and the weights are on {weights.device}")
    if weights.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"the fused decoder takes bfloat16 or float32, not {weights.dtype}")
    # The type of these does not matter.
    routers = {id(layer.router_XE) for layer in weights.layers}
    routers |= {
        id(one) for layer in weights.layers if layer.mixer for one in layer.mixer.tensors().values()
    }
    for tensor in weights.matrices():
        if tensor.dtype not in (weights.dtype, torch.uint8) and id(tensor) not in routers:
            raise ConfigError(
                f"the fused decoder takes weights of one dtype, not {tensor.dtype} beside "
                f"{weights.dtype}"
            )
    for num_kv, size in config.each_heads:
        if size % 2 or config.num_attention_heads % num_kv:
            raise ConfigError(
                f"head_dim {size} must be even, and {config.num_attention_heads} heads a multiple "
                f"of {num_kv} key-value heads"
            )
