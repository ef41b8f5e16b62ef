"""The C interface of the compiled libraries: structures and functions, for ctypes.

Structures are those of ``interface.h``, which is read. Those of draws and noise are in
`foredraft.core`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

FORM_PLAIN, FORM_PACKED, FORM_TILED = range(3)
"""``ForedraftForm``."""
NOT_PACKED = -1
"""Of ``ForedraftFormat``."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "clipped_silu": 3, "xielu": 4}
"""``ForedraftActivation``."""

_HEADER = re.sub(r"//.*", "", Path(__file__).with_name("interface.h").read_text(encoding="utf-8"))
_NUMBERS: Mapping[str, type[Any]] = {"int64_t": c_int64, "double": c_double}


def _members(structure: str, **others: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    """Names and types of a structure's members; each pointer is an address.

    Args:
        others: structures among them, by their names.
    """
    types = {**_NUMBERS, **{f"Foredraft{name}": kind for name, kind in others.items()}}
    (body,) = re.findall(rf"struct Foredraft{structure} {{(.*?)}};", _HEADER, re.DOTALL)
    for declaration in filter(None, map(str.strip, body.split(";"))):
        if "*" in declaration:
            yield declaration.split()[-1], c_void_p
            continue
        kind, names = declaration.split(maxsplit=1)
        for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            yield name, types[kind] * int(count) if count else types[kind]


class Matrix(ctypes.Structure):
    _fields_ = [*_members("Matrix")]


class Layer(ctypes.Structure):
    _fields_ = [*_members("Layer", Matrix=Matrix)]


class Heads(ctypes.Structure):
    _fields_ = [*_members("Heads")]


class RecurrentSizes(ctypes.Structure):
    _fields_ = [*_members("Recurrent")]


class LatentSizes(ctypes.Structure):
    _fields_ = [*_members("Latent")]


class Model(ctypes.Structure):
    _fields_ = [
        *_members("Model", Matrix=Matrix, Heads=Heads, Recurrent=RecurrentSizes, Latent=LatentSizes)
    ]


class Store(ctypes.Structure):
    _fields_ = [*_members("Store")]


class Save(ctypes.Structure):
    _fields_ = [*_members("Save")]


class StatesOfRow(ctypes.Structure):
    _fields_ = [*_members("States")]


class Forward(ctypes.Structure):
    _fields_ = [*_members("Forward", Store=Store)]


_SIZES = POINTER(Model), *[c_int64] * 4
FUNCTIONS: Mapping[str, Mapping[str, tuple[Any, Sequence[Any]]]] = {
    "decoder": {
        "forward": (c_int64, (POINTER(Model), POINTER(Forward))),
        "workspace_size": (c_int64, _SIZES),
        "use_huge_pages": (None, (c_void_p, c_int64)),
        "has_tiles": (c_int64, ()),
    },
    "heads": {
        "unit_rows": (None, (c_void_p, *[c_int64] * 4, c_double, c_void_p, c_int64)),
        "add_rows": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
        "candidates": (None, (c_void_p, *[c_int64] * 3, *[c_double] * 2, *[c_void_p] * 4)),
    },
}
"""Result and arguments of each library's functions ``foredraft_*``."""


def declared(library: ctypes.CDLL, name: str) -> ctypes.CDLL:
    """The library of this name, with its functions declared."""
    for function, (result, arguments) in FUNCTIONS[name].items():
        found = getattr(library, f"foredraft_{function}")
        found.restype, found.argtypes = result, arguments
    return library
