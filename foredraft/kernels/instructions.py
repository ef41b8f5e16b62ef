"""Instruction sets that the kernels can be compiled for, and which of them this CPU has.

The sources choose their paths by the compiler's own macros (``__AVX512F__`` and the like), so an
instruction set is a row of compiler flags. A new path of the kernels needs no more than a row here
that switches its macro on.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SWITCH = "FOREDRAFT_KERNELS"
"""Environment variable: the name of an instruction set, or "off" for no compiled kernels."""

OFF = "off"


class KernelUnavailable(Exception):  # noqa: N818 - a state of the machine, not a mistake
    """The kernels cannot run here. The message is one line: why, and what would help."""


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that the compiler may use.

    Attributes:
        name: as in ``FOREDRAFT_KERNELS``. Of several with one name the first that the CPU has
            counts: the same paths on other widths.
        summary: for people.
        machines: `platform.machine()` of the CPUs that can have it; none: all.
        needs: what the CPU must have, in the words of /proc/cpuinfo.
        flags: for the compiler.
        automatic: whether it may be chosen without being asked for.
    """

    name: str
    summary: str
    machines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    automatic: bool = True

    def runs_on(self, machine: str, features: frozenset[str]) -> bool:
        return (not self.machines or machine in self.machines) and features.issuperset(self.needs)


_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_FLAGS = {
    "bmi1": "-mbmi",
    "avx512vl": "-mavx512vl -mprefer-vector-width=512",
    **{f"amx_{kind}": f"-mamx-{kind}" for kind in ("tile", "bf16", "int8")},
}
"""Of the compiler, where they are not the words of /proc/cpuinfo without an underscore."""
_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_ARM_DOT = "-march=armv8.2-a+dotprod"


def _x86(name: str, summary: str, *needs: str, automatic: bool = True) -> InstructionSet:
    flags = " ".join(_FLAGS.get(need, f"-m{need.replace('_', '')}") for need in needs)
    return InstructionSet(name, summary, _X86, needs, tuple(flags.split()), automatic)


INSTRUCTION_SETS = (
    _x86(
        *("amx", "AVX-512 with integer dot products, and AMX tiles"),
        *(*_AVX512, "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    _x86(
        *("bf16dot", "AVX-512 with integer and bfloat16 dot products"),
        *(*_AVX512, "avx512_vnni", "avx512_bf16"),
        automatic=False,
    ),
    _x86("vnni", "AVX-512 with integer dot products", *_AVX512, "avx512_vnni"),
    _x86("avx512", "AVX-512", *_AVX512),
    _x86("vnni", "AVX2 with integer dot products", *_AVX2, "avx_vnni"),
    _x86("avx2", "AVX2 with FMA", *_AVX2),
    InstructionSet(
        "bf16dot",
        "NEON with integer and bfloat16 dot products",
        _ARM,
        ("asimd", "asimddp", "bf16"),
        (f"{_ARM_DOT}+bf16",),
        automatic=False,
    ),
    InstructionSet(
        "dotprod",
        "NEON with integer dot products",
        _ARM,
        ("asimd", "asimddp"),
        (_ARM_DOT,),
    ),
    InstructionSet("portable", "what every CPU of this kind has"),
)
"""The best first."""

_NEVER_USED = {
    "avx512_fp16": "AVX512-FP16",
    "i8mm": "I8MM",
    "sve": "SVE",
}
"""Features of CPUs that no instruction set above uses, by their words in /proc/cpuinfo."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """This CPU's features, in the words of /proc/cpuinfo; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = [line.partition(":") for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(found[0][2].split()) if found else frozenset()


def available(
    machine: str | None = None, features: frozenset[str] | None = None
) -> tuple[InstructionSet, ...]:
    """The instruction sets that run here, one of each name, the best first."""
    machine = platform.machine() if machine is None else machine
    features = cpu_features() if features is None else features
    runnable: dict[str, InstructionSet] = {}
    for one in INSTRUCTION_SETS:
        if one.runs_on(machine, features):
            runnable.setdefault(one.name, one)
    return tuple(runnable.values())


def choose(
    name: str | None = None,
    environment: Mapping[str, str] = os.environ,
    among: tuple[InstructionSet, ...] | None = None,
) -> InstructionSet:
    """The instruction set to compile for.

    Args:
        name: the one wanted; None: what the environment says, else the best automatic one.
        among: those that run here; None: `available`.

    Raises:
        KernelUnavailable: kernels are switched off, or this CPU has no such instructions.
    """
    among = available() if among is None else among
    asked = (name or environment.get(SWITCH, "")).strip().lower()
    if not asked:
        return next(one for one in among if one.automatic)
    if asked == OFF:
        raise KernelUnavailable(f"switched off by {SWITCH}=off")
    for one in among:
        if one.name == asked:
            return one
    here = ", ".join(one.name for one in among)
    known = list(dict.fromkeys(one.name for one in INSTRUCTION_SETS))
    if asked in known:
        raise KernelUnavailable(f"this CPU has no {asked} instructions ({SWITCH} may be: {here})")
    near = difflib.get_close_matches(asked, [*known, OFF], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise KernelUnavailable(f"{SWITCH} is {asked!r}{hint} (here it may be: {here}, {OFF})")


def unused_instructions(
    chosen: InstructionSet,
    among: tuple[InstructionSet, ...] | None = None,
    features: frozenset[str] | None = None,
) -> list[str]:
    """Names of this CPU's instructions that ``chosen`` does not use, for people."""
    names = [one.name for one in (available() if among is None else among)]
    features = cpu_features() if features is None else features
    better = names[: names.index(chosen.name)]
    return [*better, *(word for flag, word in _NEVER_USED.items() if flag in features)]
