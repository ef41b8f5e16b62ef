"""Which decoder a machine gets."""

from __future__ import annotations

import pytest
import torch

from benchmarks.random_model import random_config
from foredraft.core.errors import ConfigError
from foredraft.load import native_decoder, plan_native
from foredraft.models.native.cuda import exact_decoder, graphed_decoder
from foredraft.options import LoadOptions
from foredraft.system.devices import resolve_device

CONFIG = random_config("smollm2-135m")


@pytest.mark.parametrize(
    ("device", "exact", "decoder"),
    [
        ("cuda", False, "graphed"),
        ("cuda:1", False, "graphed"),
        ("cuda", True, "fixed-shape"),
        ("auto", False, "graphed"),
    ],
)
def test_a_gpu_runs_recorded_graphs_unless_bits_must_be_exact(
    device: str, exact: bool, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = plan_native("model", None, CONFIG, LoadOptions(exact=exact), resolve_device(device))
    assert (plan.decoder, plan.dtype, plan.is_exact) == (decoder, "bfloat16", exact)
    made = native_decoder(plan.decoder)
    # By the GPU's own kernels, where it has them.
    assert made is (exact_decoder if exact else graphed_decoder)


@pytest.mark.parametrize(("exact", "decoder"), [(False, "eager"), (True, "fixed-shape")])
def test_a_cpu_without_the_kernel_runs_eagerly(
    exact: bool, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.load._kernel_problem", lambda: "no compiler")
    plan = plan_native("model", None, CONFIG, LoadOptions(exact=exact), "cpu")
    assert plan.decoder == decoder


def test_a_missing_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        resolve_device("cuda")
