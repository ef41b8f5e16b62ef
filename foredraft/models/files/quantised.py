"""Quantised weights of safetensors files: the hub's formats, and the integers in them.

A linear layer is stored as several tensors: integers packed into words, scales, zero points. Each
such set becomes one tensor called as the plain weight would be. Formats that are not read are
refused by name. Activations are never quantised as a format asks: they keep 16 bits.

Shape legend: R rows (outputs), K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foredraft.models.files.gguf_blocks import FP4
from foredraft.models.files.tensors import PackedPlace, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_INPUTS = 32
"""That share a scale in memory: groups are made of whole ones, or numbers are made of them."""
_WORD = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which half byte of a word each of eight outputs is in."""
_NO_SIGNS = 0x7777777777777777
"""The bits of sixteen floats of 4 bits but their signs."""
_GET_ANOTHER = "get the model in bfloat16, as GGUF, or as GPTQ or AWQ in 4 bits"


@dataclass(frozen=True)
class _Format:
    """Of a config: the layout, bits and group of weights; ``refusal`` says why they are not read.

    Attributes:
        group: -1: a whole row, 0: the file's shapes say it.
        is_symmetric: whether the zero point is the middle of the range.
        is_ordered: whether the groups are of inputs that follow each other.
    """

    layout: str = ""
    bits: int = 0
    group: int = 0
    is_symmetric: bool = True
    is_ordered: bool = True
    refusal: str | None = None


_SUFFIXES = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "gptq_v2": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros"),
    "pack": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "int8": ("weight", "weight_scale"),
    "fp8": ("weight", "weight_scale_inv", "weight_scale"),
    "mlx": ("weight", "scales", "biases"),
    "mxfp4": ("blocks", "scales"),
}
"""The tensors of each layout, those that make one first."""


def why_not_read(config: Any) -> str | None:
    """Why weights that a ``quantization_config`` describes are not read; None: they are."""
    return _format_of(config).refusal if config else None


def _format_of(config: Any) -> _Format:
    try:
        return _described(config)
    except (TypeError, ValueError, AttributeError) as error:
        return _refused(f"its quantization_config says, which is malformed ({error}),")


def _described(config: Mapping[str, Any]) -> _Format:
    method = str(config.get("quant_method", "mlx" if "group_size" in config else ""))
    bits, group = int(config.get("bits", 0)), int(config.get("group_size", 0))
    if method in ("gptq", "awq", "mlx") and bits not in (4, 8):
        return _refused(f"{method} in {bits} bits")
    match method:
        case "gptq":
            version = str(config.get("checkpoint_format", "gptq"))
            if version not in ("gptq", "gptq_v2"):
                return _refused(f"GPTQ in the form {version!r:.40}")
            symmetric, ordered = bool(config.get("sym", True)), not config.get("desc_act")
            return _Format(version, bits, group, symmetric, ordered)
        case "awq":
            version = str(config.get("version", "gemm")).lower()
            if version != "gemm" or bits != 4:
                return _refused(f"AWQ in {bits} bits of version {version!r:.40}")
            return _Format("awq", bits, group, is_symmetric=False)
        case "fp8" | "fbgemm_fp8":
            return _Format("fp8", 8)
        case "compressed-tensors":
            return _compressed(config)
        case "mlx":
            return _Format("mlx", bits, group, is_symmetric=False)
        case "mxfp4":
            return _Format("mxfp4", 4)
    return _refused(repr(method[:40]))


def _refused(named: str) -> _Format:
    return _Format(refusal=f"weights quantised as {named} are not read; {_GET_ANOTHER}")


def _compressed(config: Mapping[str, Any]) -> _Format:
    kind = str(config.get("format"))
    groups = [*dict(config.get("config_groups") or {}).values()]
    schemes = [dict(dict(group).get("weights") or {}) for group in groups]
    layout = {
        "pack-quantized": "pack",
        "int-quantized": "int8",
        "naive-quantized": "int8",
        "float-quantized": "fp8",
    }.get(kind)
    named = f"compressed-tensors in the form {kind!r:.40}"
    if layout is None or len({str(scheme) for scheme in schemes}) != 1:
        return _refused(named)
    scheme = schemes[0]
    bits, is_float = scheme.get("num_bits"), scheme.get("type") == "float"
    if bits not in (4, 8) or is_float != (layout == "fp8") or (layout != "pack" and bits != 8):
        return _refused(f"{named} with {bits!r:.20} bits of type {scheme.get('type')!r:.20}")
    symmetric, ordered = bool(scheme.get("symmetric", True)), not scheme.get("actorder")
    if layout == "int8" and not symmetric:
        return _refused(f"{named} with zero points")
    return _Format(layout, int(bits), 0, symmetric, ordered)


# ---------------------------------------------------------------------------------------- tensors


def with_packed(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """The tensors of a checkpoint, each set of packed ones as the weight that it makes."""
    described = config.get("quantization_config") or config.get("quantization")
    found = _format_of(described) if described else None
    if found is None or found.refusal:
        return tensors
    suffixes, dot = _SUFFIXES[found.layout], "_" if found.layout == "mxfp4" else "."
    plain, packed = dict(tensors), dict[str, StoredTensor]()
    for name in tensors:
        stem, _, last = name.rpartition(dot)
        names = {suffix: f"{stem}{dot}{suffix}" for suffix in suffixes}
        there = {suffix: own for suffix, own in names.items() if own in tensors}
        if last != suffixes[0] or not any("scale" in suffix for suffix in there):
            continue
        parts = {suffix: replace(tensors[own], name=own) for suffix, own in there.items()}
        packed[stem if dot == "_" else f"{stem}.weight"] = _made_of(found, parts)
        for own in there.values():
            del plain[own]
    return plain | packed


def _made_of(found: _Format, parts: Mapping[str, StoredTensor]) -> StoredTensor:
    """The weight that some tensors make."""
    first = parts[_SUFFIXES[found.layout][0]]
    if found.layout == "mxfp4" and len(first.shape) == 4:
        experts, rows, groups, half = first.shape
        place = PackedPlace("mxfp4", parts, 4, 2 * half, keeps=2 * half == _INPUTS)
        return StoredTensor(first.file, "MXFP4", (experts, groups * 2 * half, rows), packed=place)
    rows, words = first.shape[0], first.shape[-1]
    each = _WORD // found.bits
    shape = {
        "gptq": (words, rows * each),
        "gptq_v2": (words, rows * each),
        "awq": (words * each, rows),
        "pack": (rows, words * each),
        "mlx": (rows, words * each),
    }.get(found.layout, first.shape)
    group = _group(found, parts, shape[-1])
    is_even = group % _INPUTS == 0 and shape[-1] % group == 0
    name, keeps = _name(found)
    place = PackedPlace(found.layout, parts, found.bits, group, keeps and is_even)
    return StoredTensor(first.file, name, tuple(shape), packed=place)


def _group(found: _Format, parts: Mapping[str, StoredTensor], inputs: int) -> int:
    if found.group > 0:
        return found.group
    scales = parts.get("weight_scale") or parts.get("scales")
    if found.group == 0 and scales is not None and len(scales.shape) == 2:
        return max(inputs // max(scales.shape[1], 1), 1)
    return inputs


def _name(found: _Format) -> tuple[str, bool]:
    """Name of a format, for people and the table of forms, and whether it has such a form."""
    if found.layout == "fp8":
        return "FP8", False
    if not found.is_ordered:
        return f"{found.layout.partition('_')[0].upper()} in order of activations", False
    if found.layout == "mlx":
        return f"MLX {found.bits} bits", found.bits == 4
    return f"{'int' if found.is_symmetric else 'uint'}{found.bits}", (
        found.is_symmetric or found.bits == 4
    )


# ---------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Grouped:
    """Some rows of a weight: integers [R, K] times scales [R, G], plus minima where there are any.

    Attributes:
        group_K: the group of each input.
    """

    integers_RK: Tensor
    scales_RG: Tensor
    group_K: Tensor
    minima_RG: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Float32 [R, K], each product and each sum rounded once."""
        numbers = self.integers_RK.float() * self.scales_RG.float()[:, self.group_K]
        if self.minima_RG is None:
            return numbers
        return numbers + self.minima_RG.float()[:, self.group_K]


class PackedReader:
    """Rows of a packed weight, whose tensors are read once.

    Args:
        parts: the tensors of ``place``.
        num_inputs: K.

    Raises:
        ValueError: groups are not of inputs that follow each other, where their order counts.
    """

    def __init__(self, place: PackedPlace, parts: Mapping[str, Tensor], num_inputs: int) -> None:
        import torch

        self._place, self._parts = place, parts
        if place.layout == "mxfp4":
            num_inputs = place.group * parts["blocks"].shape[2]
        in_order_K = torch.arange(num_inputs) // place.group
        self._group_K = parts.get("g_idx", parts.get("weight_g_idx", in_order_K)).long()
        if place.keeps and not torch.equal(self._group_K, in_order_K):
            raise ValueError("inputs of a group do not follow each other")

    def rows(self, rows: slice | Tensor) -> Grouped:
        """Some of them; of experts those of all, one below the other.

        Raises:
            KeyError: a tensor is missing.
        """
        layout = "gptq" if self._place.layout.startswith("gptq") else self._place.layout
        found: Grouped = getattr(self, f"_{layout}")(rows)
        return found

    def dequantised(self, rows: slice) -> Tensor:
        """The numbers of some rows, float32 [R, K]; of some experts [X, K, R]."""
        if self._place.layout == "mxfp4":
            count = self._parts["blocks"].shape[1]
            numbers = self._mxfp4(slice(count * rows.start, count * rows.stop)).dequantised()
            return numbers.view(-1, count, numbers.shape[1]).transpose(1, 2)
        return self._fp8(rows) if self._place.layout == "fp8" else self.rows(rows).dequantised()

    def _gptq(self, rows: slice | Tensor) -> Grouped:
        """Words [K / 8, R], zero points [G, R / 8] less 1 but in version 2, scales [G, R]."""
        bits, zeros = self._place.bits, self._parts["qzeros"]
        if self._place.layout == "gptq":  # one more in each field: as they overflowed, they go back
            zeros = (zeros.long() + sum(1 << at for at in range(0, _WORD, bits))).int()
        zeros_RG = _fields(zeros, bits).T[rows]
        integers_RK = _fields(self._parts["qweight"][:, rows].T.contiguous(), bits)
        return self._centred(integers_RK, zeros_RG, self._parts["scales"].T[rows])

    def _awq(self, rows: slice | Tensor) -> Grouped:
        """Words [K, R / 8], outputs in their own order; zero points [G, R / 8], scales [G, R]."""
        import torch

        indices = torch.arange(8 * self._parts["qweight"].shape[1])[rows]
        first, end = int(indices.min()) // 8, int(indices.max()) // 8 + 1
        inner = indices - 8 * first

        def unpacked(words: Tensor) -> Tensor:
            fields = _fields(words[:, first:end].contiguous(), 4)
            ordered = fields.view(len(fields), -1, 8)[:, :, list(_AWQ_ORDER)]
            return ordered.flatten(1).T[inner]

        integers_RK, zeros_RG = unpacked(self._parts["qweight"]), unpacked(self._parts["qzeros"])
        return self._centred(integers_RK, zeros_RG, self._parts["scales"].T[rows])

    def _pack(self, rows: slice | Tensor) -> Grouped:
        """Words [R, K / 8], scales [R, G]; zero points [R / 8, G]."""
        import torch

        bits, half = self._place.bits, 1 << self._place.bits - 1
        integers_RK = _fields(self._parts["weight_packed"][rows], bits)
        scales_RG = self._parts["weight_scale"][rows]
        zeros_RG = torch.full_like(scales_RG, half, dtype=torch.int16)
        if (packed := self._parts.get("weight_zero_point")) is not None:
            zeros_RG = _fields(packed.T.contiguous(), bits).T[rows]
        return self._centred(integers_RK, zeros_RG, scales_RG)

    def _centred(self, integers_RK: Tensor, zeros_RG: Tensor, scales_RG: Tensor) -> Grouped:
        return Grouped(integers_RK - zeros_RG[:, self._group_K], scales_RG, self._group_K)

    def _int8(self, rows: slice | Tensor) -> Grouped:
        scales_RG = self._parts["weight_scale"].reshape(-1, 1)
        weight = self._parts["weight"]
        if self._parts["weight_scale"].dim() == 2:
            scales_RG = self._parts["weight_scale"]
        scales_RG = scales_RG.expand(len(weight), -1)
        return Grouped(weight[rows].short(), scales_RG[rows], self._group_K)

    def _mlx(self, rows: slice | Tensor) -> Grouped:
        """Words [R, K / 8], scales and minima [R, G]."""
        import torch

        words = self._parts["weight"][rows].view(torch.int32)
        scales, minima = self._parts["scales"][rows], self._parts["biases"][rows]
        return Grouped(_fields(words, self._place.bits), scales, self._group_K, minima)

    def _mxfp4(self, rows: slice | Tensor) -> Grouped:
        """Half bytes [X, R, G, 16] and exponents [X, R, G], of which blocks of zeros need none."""
        import torch

        both = self._parts["blocks"].flatten(0, 1)[rows]
        pairs = torch.tensor([(FP4[i & 15], FP4[i >> 4]) for i in range(256)], dtype=torch.int8)
        found = pairs.view(torch.int16).flatten()[both.flatten().int()].view(torch.int8)
        exponents = self._parts["scales"].flatten(0, 1)[rows].int()
        first, last = both.view(torch.int64).unbind(-1)
        is_used = ((first | last) & _NO_SIGNS) != 0
        powers = (exponents << 23).view(torch.float32) / 2 * is_used
        return Grouped(found.view(len(both), -1), powers, self._group_K)

    def _fp8(self, rows: slice) -> Tensor:
        """Floats of 8 bits [R, K]; a scale for a matrix, a row, or blocks of equal sides."""
        weight = self._parts["weight"]
        scales = self._parts.get("weight_scale_inv", self._parts.get("weight_scale"))
        assert scales is not None
        scales = scales.float().reshape(*scales.shape, *(1,) * (2 - scales.dim()))
        for dim in (0, 1):
            side = -(-weight.shape[dim] // scales.shape[dim])
            if 1 < scales.shape[dim] < weight.shape[dim]:
                side = 1 << (side - 1).bit_length()  # the last block may be cut
            scales = scales.repeat_interleave(side, dim).narrow(dim, 0, weight.shape[dim])
        return weight[rows].float() * scales[rows]


def _fields(words: Tensor, bits: int) -> Tensor:
    """Of words [..., n] the numbers in their bits, the lowest first: int16 [..., n * 32 / bits]."""
    import torch

    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    numbers = words[..., None] >> shifts & (1 << bits) - 1
    return numbers.to(torch.int16).flatten(-2)
