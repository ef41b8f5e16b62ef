"""A decoding step of one row as one kernel: its phases, its buffers, its compiling and launching.

The kernel is `step.cu`, which says how it works. Here a model's layers become its list of
phases. It is compiled with NVRTC, which torch brings along, for the GPU at hand; no `nvcc` is
needed.

Shape legend: as in `foredraft.models.native.cuda`; S stretches of a context, X width of queries,
keys and values.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.core.errors import ForedraftError
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.cuda import (
    TILE,
    Bucket,
    GridInputs,
    PagedDecoder,
    unusual_layers,
)
from foredraft.models.native.model import EagerDecoder, finished_logits
from foredraft.models.native.weights import DecoderWeights, LayerWeights

SOURCE = Path(__file__).with_name("step.cu")
_STRETCH = 128
_TABLE_BYTES = 64 << 20
"""Of rotations of all positions, at most: those of an 8B of 128 Ki positions."""
_SHARED_BYTES = 227 << 10
"""Of a block, on Hopper."""
_THREADS = 32 * (8 + 4)
_JOIN_LIMIT = 12288
"""Numbers of partial sums of attention that each block reads; more are joined in a phase."""
_MOST_JOINED = 1 << 17
_WORD_LIMIT = 16384
"""More results of a phase than these wait for the barrier."""
_PRODUCT, _ATTEND, _JOIN, _ROTATE = range(4)
_NORM, _GATED, _HEADS, _FLOATS, _TANH, _BEFORE_ATTENTION, _JOINED = (1 << i for i in range(7))
_POINTERS = (
    *("weight", "bias", "norm", "x", "residual", "x_rows", "residual_rows"),
    *("x_words", "residual_words", "out_words", "out", "tap"),
)


class Phase(ctypes.Structure):
    """`Phase` of `step.cu`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("kind", "flags", *_POINTERS, "outputs", "inputs", "first"),
            *("cosines", "sines", "query_norm", "key_norm"),
            *("number", "x_number", "residual_number", "layer", "window"),
        )
    ]


class Step(ctypes.Structure):
    """`Step` of `step.cu`."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("phases", "blocks", "offsets", "turns", "starts", "lengths", "paths", "table"),
                *("keys", "values", "query", "attended", "sums", "peaks"),
                *("sum_words", "peak_words", "counters"),
                *("trace", "block_stride"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                *("num_phases", "num_query", "num_kv", "head", "block", "rotated"),
                *("row_tokens", "is_chain", "num_stretches", "most_inputs"),
                *("join_limit", "word_limit", "shared_bytes"),
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "residual_scale", "query_scale")),
    ]


class Launch(Protocol):
    """Runs the kernel with these parameters on the current stream."""

    def __call__(self, step: Step) -> None: ...


class StepDecoder(PagedDecoder):
    """Runs the step of one row of up to 16 tokens as one kernel, and other plans as its base does.

    Args:
        launch: runs the kernel; None: compiled for the weights' GPU when first needed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        launch: Launch | None = None,
    ) -> None:
        EagerDecoder.__init__(self, config, weights)
        self._begin()
        self._launch, self._least = launch, TILE
        self._every: list[tuple[Tensor, Tensor]] | None = None
        if importlib.util.find_spec("triton"):  # several rows need it
            self._packed = importlib.import_module("foredraft.models.native.triton_packed")
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}

    def _sums(self, context: int) -> tuple[Tensor, Tensor]:
        """Room for the sums of stretches of a context, for all recordings: one runs at a time."""
        stretches, config = -(-context // _STRETCH), self._config
        if stretches not in self._partial:
            shape = (TILE, config.num_attention_heads, stretches)
            sums, peaks = (
                torch.zeros((*shape, size), device=self._weights.device)
                for size in (config.head_dim, 2)
            )
            self._partial[stretches] = sums, peaks
        return self._partial[stretches]

    def _all_turns(self) -> list[tuple[Tensor, Tensor]]:
        """Rotations of all positions; empty where they take much memory."""
        if self._every is None:
            count, weights = self._config.max_context, self._weights
            sizes = [count * rope.size for rope in self._config.ropes]
            small = 2 * sum(sizes) * weights.dtype.itemsize <= _TABLE_BYTES
            every = torch.arange(count if small else 0, device=weights.device)
            self._every = self._rotations(every) if small else []
        return self._every

    def _work(
        self, fixed: Tensor, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> Callable[[], dict[int, Tensor]]:
        if bucket.rows > 1 or bucket.tokens != TILE:
            return super()._work(fixed, bucket, cache, logits_NV)
        if self._launch is None:
            self._launch = CompiledStep(self._weights.device, self._config)
        inputs = GridInputs.of(fixed, bucket)
        tables = self._all_turns()
        turns = tables or self._rotations(torch.zeros_like(inputs.positions))
        partial = self._sums(bucket.context)
        given = _Given(inputs, bucket, cache, logits_NV, turns, bool(tables), partial)
        program = _Program(self._config, self._weights, given)
        launch = self._launch

        def work() -> dict[int, Tensor]:
            if program.hidden_is_given:
                program.hidden_NE.copy_(self.embed(inputs.token_ids))
            if not tables:
                for kept, made in zip(turns, self._rotations(inputs.positions), strict=True):
                    kept[0].copy_(made[0])
                    kept[1].copy_(made[1])
            launch(program.step)
            if self._config.logits_scale != 1.0 or self._config.logits_cap is not None:
                logits_NV.copy_(finished_logits(logits_NV, self._config))
            return program.taps

        return work


class _Given(NamedTuple):
    """What a program works on.

    Attributes:
        turns: cosines and signed sines, row after row of positions or of tokens.
        has_tables: of positions.
        partial: sums and peaks of stretches.
    """

    inputs: GridInputs
    bucket: Bucket
    cache: KVCache
    logits_NV: Tensor
    turns: Sequence[tuple[Tensor, Tensor]]
    has_tables: bool
    partial: tuple[Tensor, Tensor]


class _Program:
    """The phases of a model's step and the memory that they use.

    Attributes:
        step: the kernel's parameters.
        hidden_NE: what the layers add to.
        hidden_is_given: whether it holds the embeddings before each launch; else the kernel
            looks them up.
        taps: outputs of the bucket's layers.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, given: _Given) -> None:
        self._config, self._weights, self._given = config, weights, given
        self._units, self._phases = 0, list[Phase]()
        query = config.num_attention_heads * config.head_dim
        width = query + 2 * config.num_key_value_heads * config.head_dim
        self.hidden_NE = self._buffer(TILE, config.hidden_size)
        self._qkv_NX = self._buffer(TILE, width)
        self._query_NX, self._attended_NX = self._buffer(TILE, query), self._buffer(TILE, query)
        self._activated_NF = self._buffer(TILE, config.intermediate_size)
        self._qkv_words = self._buffer(TILE, width // 2, dtype=torch.int64)
        hidden, inner = config.hidden_size // 2, config.intermediate_size // 2
        self._hidden_words = self._buffer(TILE, hidden, dtype=torch.int64)
        self._activated_words = self._buffer(TILE, inner, dtype=torch.int64)
        self.taps = {i: self._buffer(TILE, config.hidden_size) for i in given.bucket.taps}
        table = weights.embedding_VE
        self.hidden_is_given = not (
            isinstance(table, Tensor)
            and config.embedding_scale == 1.0
            and (table.dtype, table.device) == (weights.dtype, weights.device)
        )
        self._state = {"x": _address(self.hidden_NE)}
        if not self.hidden_is_given:
            self._state = {"x": _address(table), "x_rows": _address(given.inputs.token_ids)}
        for index, layer in enumerate(weights.layers):
            self._add_layer(index, layer)
        self._product(
            *(weights.head_VE, _NORM | _FLOATS),
            norm=_address(weights.final_norm_E),
            out=_address(given.logits_NV),
            **(self._state | {"x_rows": _address(given.inputs.wanted)}),
        )
        self.step = self._parameters()

    def _buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._weights.dtype
        return torch.zeros(shape, dtype=dtype, device=self._weights.device)

    def _add_layer(self, index: int, layer: LayerWeights) -> None:
        if index not in self._weights.no_attention:
            self._add_attention(index, layer)
            self._added(
                *(layer.output_weight, _JOINED),
                x=_address(self._attended_NX),
                x_number=len(self._phases) - 1,
                bias=_address(layer.output_bias),
                window=layer.kind.window or 0,
            )
        self._product(
            layer.gate_up_weight,
            _NORM | _GATED | (0 if self._config.activation == "silu" else _TANH),
            norm=_address(layer.mlp_norm_E),
            out=_address(self._activated_NF),
            out_words=_address(self._activated_words),
            **self._state,
        )
        self._added(
            *(layer.down_weight, 0),
            x=_address(self._activated_NF),
            x_words=_address(self._activated_words),
            x_number=len(self._phases),
            tap=_address(self.taps.get(index)),
        )

    def _add_attention(self, index: int, layer: LayerWeights) -> None:
        kind, store = layer.kind, self._given.cache.store
        place = {"layer": index * store.keys.stride(1), "window": kind.window or 0}
        if kind.rope is not None:
            place["cosines"], place["sines"] = map(_address, self._given.turns[kind.rope])
        separate = layer.query_norm_D is not None or not _pairs_fit(self._config)
        self._product(
            layer.qkv_weight,
            _NORM | _BEFORE_ATTENTION | (0 if separate else _HEADS),
            norm=_address(layer.attention_norm_E),
            bias=_address(layer.qkv_bias),
            out=_address(self._qkv_NX),
            out_words=0 if separate else _address(self._qkv_words),
            **self._state,
            **place,
        )
        made: dict[str, int] = {}
        if not separate:
            words, width = _address(self._qkv_words), self._qkv_NX.shape[1]
            made = {"x_words": words, "x_number": len(self._phases), "inputs": width}
        if separate:
            norms = {
                "query_norm": _address(layer.query_norm_D),
                "key_norm": _address(layer.key_norm_D),
            }
            self._phases.append(Phase(kind=_ROTATE, x=_address(self._qkv_NX), **norms, **place))
        number = len(self._phases) + 1
        self._phases.append(Phase(kind=_ATTEND, number=number, **made, **place))
        self._phases.append(Phase(kind=_JOIN, **place))

    def _added(self, weight: Any, flags: int, **fields: int) -> None:
        """A product that is added to the hidden states."""
        words, state = _address(self._hidden_words), self._state
        self._product(
            *(weight, flags),
            residual=state["x"],
            residual_rows=state.get("x_rows", 0),
            residual_words=state.get("x_words", 0),
            residual_number=state.get("x_number", 0),
            out=_address(self.hidden_NE),
            out_words=words,
            **fields,
        )
        number = len(self._phases)
        self._state = {"x": _address(self.hidden_NE), "x_words": words, "x_number": number}

    def _product(self, weight: Any, flags: int, **fields: int) -> None:
        outputs = len(weight) // (2 if flags & _GATED else 1)
        address, first = _address(weight), self._units
        sizes = {"outputs": outputs, "inputs": weight.shape[1], "first": first}
        fields["number"] = len(self._phases) + 1
        self._phases.append(Phase(kind=_PRODUCT, flags=flags, weight=address, **sizes, **fields))
        self._units += outputs // 8 if flags & _GATED else -(-outputs // 16)

    def _parameters(self) -> Step:
        config, inputs, bucket = self._config, self._given.inputs, self._given.bucket
        store, (sums, peaks) = self._given.cache.store, self._given.partial
        packed = b"".join(bytes(phase) for phase in self._phases)
        numbers = torch.frombuffer(bytearray(packed), dtype=torch.int64)
        rows = torch.arange(TILE, device=self._weights.device)
        heads, size = config.num_attention_heads, config.head_dim
        self._kept = (
            numbers.to(self._weights.device),
            self._buffer(_MOST_JOINED, dtype=torch.int64),
            self._buffer(_MOST_JOINED, dtype=torch.int64),
            self._buffer(3, dtype=torch.int32),
            inputs.positions if self._given.has_tables else rows,
        )
        phases, sum_words, peak_words, counters, turns = self._kept
        return Step(
            **{name: _address(getattr(inputs, name)) for name in _SHARED_NAMES},
            phases=_address(phases),
            turns=_address(turns),
            table=_address(inputs.tables),
            keys=_address(store.keys),
            values=_address(store.values),
            query=_address(self._query_NX),
            attended=_address(self._attended_NX),
            sums=_address(sums),
            peaks=_address(peaks),
            sum_words=_address(sum_words),
            peak_words=_address(peak_words),
            counters=_address(counters),
            block_stride=store.keys.stride(0),
            num_phases=len(self._phases),
            num_query=heads,
            num_kv=config.num_key_value_heads,
            head=size,
            block=store.block_size,
            rotated=config.ropes[0].size if config.ropes else 0,
            row_tokens=bucket.tokens,
            is_chain=bucket.is_chain,
            num_stretches=sums.shape[2],
            most_inputs=max(config.hidden_size, config.intermediate_size, heads * size),
            join_limit=_JOIN_LIMIT,
            word_limit=_WORD_LIMIT,
            shared_bytes=_SHARED_BYTES,
            eps=config.rms_norm_eps,
            residual_scale=config.residual_scale,
            query_scale=config.query_scale or size**-0.5,
        )


_SHARED_NAMES = ("blocks", "offsets", "starts", "lengths", "paths")


def _address(tensor: Any) -> int:
    if tensor is None:
        return 0
    assert isinstance(tensor, Tensor)
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _pairs_fit(config: DecoderConfig) -> bool:
    """Whether units of 16 outputs of a head can hold the pairs that are rotated together."""
    sizes = {rope.size for rope in config.ropes}
    return config.head_dim % 16 == 0 and all(size % 16 == 0 for size in sizes)


def why_not_step(config: DecoderConfig, weights: DecoderWeights) -> str | None:
    """What of a model the kernel does not know; None: nothing."""
    if config.experts:
        return "mixtures of experts"
    if (found := unusual_layers(config)) is not None:
        return found
    if any(size != config.head_dim for size in config.head_norm_sizes()):
        return "norms of all heads together"
    matrices = (weights.head_VE, *(layer.gate_up_weight for layer in weights.layers))
    if not all(isinstance(matrix, Tensor) for matrix in matrices):
        return "weights in few bits"
    if weights.dtype != torch.bfloat16:
        return f"weights of {weights.dtype}"
    for layer in weights.layers:
        if layer.attention_post_norm_E is not None or layer.mlp_post_norm_E is not None:
            return "norms behind a product"
        if layer.attention_norm_E is None or layer.mlp_norm_E is None:
            return "layers without norms"
        if layer.output_bias is not None and config.residual_scale != 1.0:
            return "a scaled bias"
        if (layer.query_norm_D is None) != (layer.key_norm_D is None):
            return "norms of only queries or keys"
    if len({rope.size for rope in config.ropes}) > 1:
        return "rotations of several sizes"
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_dim,
    )
    if config.attention_cap is not None:
        return "a cap on scores"
    if config.family.norm_offset:
        return "norms with an offset"
    if config.hidden_size > 16384:
        return "norms of more than 16384 numbers"
    if any(size % 16 for size in sizes) or config.head_dim % 8 or config.head_dim > 256:
        return "sizes that are no multiple of 16"
    return None


class CompiledStep:
    """The kernel, compiled for a GPU.

    Args:
        device: the GPU.
        config: of the model; None: of any, slower.
        code: machine code for it; None: it is compiled.
        blocks: at most one for each multiprocessor; None: as many.

    Raises:
        ForedraftError: it cannot be compiled, or the driver refuses it.
    """

    def __init__(
        self,
        device: torch.device,
        config: DecoderConfig | None,
        code: bytes | None = None,
        blocks: int | None = None,
    ) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._blocks = blocks or torch.cuda.get_device_properties(device).multi_processor_count
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # a context is there
            major, minor = torch.cuda.get_device_capability(device)
            options = _sizes(config) if config else ()
            code = code or compile_step(f"sm_{major}{minor}a", options)
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), code))
            name = b"step_kernel"
            self._check(
                self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name)
            )
            most_dynamic_shared = 8
            self._check(
                self._driver.cuFuncSetAttribute(self._function, most_dynamic_shared, _SHARED_BYTES)
            )

    def __call__(self, step: Step) -> None:
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(step))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (self._blocks, 1, 1, _THREADS, 1, 1, step.shared_bytes)
        self._check(
            self._driver.cuLaunchCooperativeKernel(self._function, *sizes, stream, arguments)
        )

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise ForedraftError(f"the kernel of a step: {(text.value or b'?').decode()} ({code})")


def _sizes(config: DecoderConfig) -> tuple[str, ...]:
    """What is known of a model when its kernel is compiled."""
    shared = config.num_attention_heads // config.num_key_value_heads
    return f"-DHEAD={config.head_dim}", f"-DSHARED={shared}"


def compile_step(architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code of `step.cu` for a GPU such as "sm_90a"."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
    given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"step.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), given)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ForedraftError(f"the kernel of a step is not compiled: {log.value.decode()[:2000]}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _nvrtc() -> ctypes.CDLL:
    """The one that torch was built with: loaded already, on the path, or in its package."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    found = [name]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += map(str, Path(folder).glob(f"*/lib/{name}"))
    for path in found:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise ForedraftError(f"{name} is not found; install torch with CUDA, which brings it along")
