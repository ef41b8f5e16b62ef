"""Which instructions the kernels are compiled for."""

from __future__ import annotations

import pytest

from foredraft.kernels.instructions import (
    INSTRUCTION_SETS,
    KernelUnavailable,
    available,
    choose,
    unused_instructions,
)

AVX2 = {"sse2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "popcnt"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN4 = AVX512 | {"avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN4 | {"amx_tile", "amx_bf16", "amx_int8"}
ALDER_LAKE = AVX2 | {"avx_vnni"}


def names(features: set[str], machine: str = "x86_64") -> list[str]:
    return [one.name for one in available(machine, frozenset(features))]


def test_a_cpu_runs_what_it_has_all_parts_of() -> None:
    assert names({"sse2"}) == ["portable"]
    assert names(AVX2) == ["avx2", "portable"]
    assert names(AVX2 - {"fma"}) == ["portable"]
    assert names(AVX512) == ["avx512", "avx2", "portable"]
    assert names(ZEN4) == ["bf16dot", "vnni", "avx512", "avx2", "portable"]
    assert names(SAPPHIRE_RAPIDS)[:2] == ["amx", "bf16dot"]
    assert names(ALDER_LAKE) == ["vnni", "avx2", "portable"]
    assert names({"asimd", "asimddp"}, "aarch64") == ["dotprod", "portable"]
    assert names(set(), "riscv64") == ["portable"]


def test_the_widest_of_one_name_is_taken() -> None:
    [vnni] = [one for one in available("x86_64", frozenset(ZEN4)) if one.name == "vnni"]
    assert "-mavx512vnni" in vnni.flags
    [narrow] = [one for one in available("x86_64", frozenset(ALDER_LAKE)) if one.name == "vnni"]
    assert "-mavxvnni" in narrow.flags
    assert "-mavx512f" not in narrow.flags


def test_the_environment_chooses() -> None:
    here = available("x86_64", frozenset(ZEN4))
    for name in names(ZEN4):
        assert choose(None, {"FOREDRAFT_KERNELS": f" {name.upper()}"}, here).name == name
    assert choose("avx2", {"FOREDRAFT_KERNELS": "portable"}, here).name == "avx2"


@pytest.mark.parametrize("features", [{"sse2"}, AVX2, AVX512, ZEN4, ALDER_LAKE])
def test_by_itself_the_best_automatic_one_is_chosen(features: set[str]) -> None:
    here = available("x86_64", frozenset(features))
    assert choose(None, {}, here) == next(one for one in here if one.automatic)


def test_what_cannot_be_chosen_says_what_can() -> None:
    here = available("x86_64", frozenset(AVX2))
    with pytest.raises(KernelUnavailable, match=r"no avx512 instructions \(.* avx2, portable\)"):
        choose("avx512", {}, here)
    with pytest.raises(KernelUnavailable, match=r"is 'avx-2'; did you mean 'avx2'\?"):
        choose(None, {"FOREDRAFT_KERNELS": "avx-2"}, here)
    with pytest.raises(KernelUnavailable, match="switched off"):
        choose(None, {"FOREDRAFT_KERNELS": "off"}, here)


def test_flags_ask_for_no_more_than_the_cpu_was_checked_for() -> None:
    """Code with an instruction that the CPU has not would end the process."""
    spelling = {
        "bmi": "bmi1",
        "avx512vnni": "avx512_vnni",
        "avx512bf16": "avx512_bf16",
        "avxvnni": "avx_vnni",
        "amx-tile": "amx_tile",
        "amx-bf16": "amx_bf16",
        "amx-int8": "amx_int8",
    }
    for one in INSTRUCTION_SETS:
        if "x86_64" not in one.machines:
            continue
        asked = {flag.removeprefix("-m") for flag in one.flags if "=" not in flag}
        assert {spelling.get(flag, flag) for flag in asked} == set(one.needs)


def test_beyond_names_what_is_not_used() -> None:
    here = available("x86_64", frozenset(ZEN4))
    features = frozenset(ZEN4 | {"avx512_fp16"})
    assert unused_instructions(here[0], here, features) == ["AVX512-FP16"]
    assert unused_instructions(here[2], here, features) == ["bf16dot", "vnni", "AVX512-FP16"]
