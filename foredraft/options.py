"""Options of a user who loads a model. `foredraft.load` resolves it on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from typing import Any

from foredraft.cache.memory import checked_memory
from foredraft.core.checks import checked_flag, checked_int, checked_text, shown
from foredraft.core.errors import ConfigError, unknown
from foredraft.system.cgroups import available_cpus

DTYPES = ("auto", "bfloat16", "float32")
WEIGHTS = ("auto", "file", "bf16", "int8", "int4")
CACHE_DTYPES = ("auto", "int8")
ACTIVATIONS = ("auto", "int16", "int8")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "hf")
SAMPLING_DEFAULTS = ("model", "none")
DEFAULT_MODEL = "smollm2-135m-instruct"
_LOWEST = {
    "threads": 1,
    "max_context": 2,
    "max_batch_size": 1,
    "max_step_tokens": 1,
    "num_draft_tokens": 0,
}
"""A context holds a token of the prompt and one of the reply, at least."""
_SHORT_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""Names of dtypes in other engines."""
_MAX_NAME = 255
"""Longest name of a file, in characters."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load a target and a drafter.

    Attributes:
        model: a built-in name, a local directory, a GGUF file, or a hub id ("org/name",
            or "org/name:Q4_K_M" for a GGUF file there).
        drafter: a registered drafter, or "auto": the best that is there.
        draft_model: name or directory of the draft model, for drafters that use one.
        num_draft_tokens: nodes to draft in each step; None: as many as pay, by what is measured.
        drafter_options: the drafter's own options.
        dtype: of activations and cache, and of weights unless ``weights`` says otherwise. "auto"
            takes bfloat16 where it is fast and float32 elsewhere.
        cache_dtype: "int8" keeps keys and values in 8 bits, with a scale for each head of a token:
            about half the memory of bfloat16, so that twice as many tokens fit, and texts that
            differ a little. On CPU with the fused kernel only. "auto" takes ``dtype``.
        weights: "int8" keeps linear layers and head in half the memory of bfloat16, which makes
            steps faster and the model a little different; "int4" keeps the linear layers in a
            third. A model that comes in 4 bits, as the built-in one does, is then used as it comes;
            others lose more than with int8. "file" keeps every weight of a GGUF file of 4 to 8 bits
            as it comes, which "auto" takes for such files. All three on CPU with the fused kernel,
            and with Triton on GPUs from compute capability 8.0 on. "bf16" means dtype bfloat16.
        draft_weights: of the draft model, as ``weights``. No text depends on them, so "auto" takes
            what drafts fastest: "int4", with activations of 8 bits, where our own kernel runs it.
        activations: "int8" rounds what weights in 4 bits, and those of K-quants, are multiplied
            with to 8 bits, with a scale for each 32: prompts, batches and drafts take less time,
            and texts differ more than by such weights alone. "auto" takes it for files that keep
            most of their weights in Q4_K, Q5_K or Q6_K, which llama.cpp multiplies with 8 bits as
            well, and 16 bits ("int16") for all else.
        device: "auto" takes CUDA when there is one.
        backend: "auto" takes the native decoder for families it knows, transformers otherwise.
        threads: CPU threads; None leaves torch's choice, within a container's quota.
        max_context: most tokens of prompt and reply together; None takes the model's limit.
        max_batch_size: most requests in one step.
        max_step_tokens: most tokens of prompts read in one step, while others decode in it: fewer
            keep the pace of their replies. None takes so many that a step lasts for about half a
            second at most: 64 to 512.
        cache_memory: bytes that all caches together may take, or a size such as "2GB": the
            target's, a draft model's and a head's keys and values of running requests, and of texts
            that may come again. None: a quarter of the machine's memory, or of its cgroup's limit,
            and at most half of what weights and work leave (of a GPU's, half of what is free). None
            of it is taken before it is needed.
        prefix_caching: keep what was read, as far as there is room: a request that begins as an
            earlier one of the same tenant reads only what is new.
        revision: of a hub id.
        sampling_defaults: "model" takes temperature, top_p, top_k, min_p and repetition_penalty
            from the model's own generation config where a request does not give them; a model that
            names none is greedy. "none" leaves them out.
        exact: insist that texts are the same bit for bit whatever is scored together. The fused
            kernel always keeps that; elsewhere it costs speed, and load fails where it cannot be
            kept. Without it, a near-tie between two tokens may fall the other way.
        calibrate: time the target's forward at load (a second or two) for drafters that
            weigh how many guesses pay on this machine.
    """

    model: str = DEFAULT_MODEL
    drafter: str = "auto"
    draft_model: str | None = None
    num_draft_tokens: int | None = None
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    cache_dtype: str = "auto"
    weights: str = "auto"
    draft_weights: str = "auto"
    activations: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    max_context: int | None = None
    max_batch_size: int = 8
    max_step_tokens: int | None = None
    cache_memory: int | str | None = None
    prefix_caching: bool = True
    revision: str | None = None
    sampling_defaults: str = "model"
    exact: bool = False
    calibrate: bool = True

    def __post_init__(self) -> None:
        choices = {"dtype": DTYPES, "cache_dtype": CACHE_DTYPES, "weights": WEIGHTS}
        choices |= {"sampling_defaults": SAMPLING_DEFAULTS}
        choices |= {"draft_weights": WEIGHTS, "activations": ACTIVATIONS, "backend": BACKENDS}
        if self.dtype in ("fp16", "float16", "half"):
            raise ConfigError(
                f"dtype is {self.dtype!r}, and nothing is computed in float16 here: bfloat16 takes "
                "as much memory, float32 keeps every bit of weights in float16; auto chooses"
            )
        for name, known in choices.items():
            if (value := str(getattr(self, name))) not in known:
                raise unknown(name, value, known, _SHORT_NAMES.get(value))
        if self.weights == "bf16" and self.dtype == "float32":
            raise ConfigError("weights 'bf16' and dtype 'float32' exclude each other; give one")
        object.__setattr__(self, "device", str(self.device))
        self._check_device()
        self._check_names()
        if not isinstance(self.drafter_options, Mapping):
            raise ConfigError(
                f"drafter_options is {self.drafter_options!r}; it must map names to values"
            )
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None or name == "max_batch_size":
                object.__setattr__(self, name, checked_int(name, value, low))
        for name in ("exact", "calibrate", "prefix_caching"):
            object.__setattr__(self, name, checked_flag(name, getattr(self, name)))
        memory = checked_memory("cache_memory", self.cache_memory)
        object.__setattr__(self, "cache_memory", memory)
        if self.threads is not None and self.threads > (cpus := available_cpus()):
            raise ConfigError(
                f"threads is {self.threads}; this machine has {cpus} for us, and more threads "
                "than that only wait for each other"
            )

    def _check_device(self) -> None:
        kind, colon, number = self.device.partition(":")
        if kind not in DEVICES:
            raise unknown("device", self.device, DEVICES, "cuda" if kind == "gpu" else None)
        if colon and not (kind == "cuda" and re.fullmatch("[0-9]{1,4}", number)):
            raise ConfigError(
                f"device is {self.device!r}; a number goes with cuda alone, such as 'cuda:1'"
            )

    def _check_names(self) -> None:
        for name in ("model", "draft_model", "drafter", "revision"):
            value = getattr(self, name)
            if isinstance(value, PathLike):
                value = fspath(value)
                object.__setattr__(self, name, value)
            if value is None and name in ("draft_model", "revision"):
                continue
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} is {shown(value)}; it must be a name or a path")
            if "\0" in checked_text(name, value) or max(map(len, value.split("/"))) > _MAX_NAME:
                raise ConfigError(f"{name} is {shown(value)}; no file can have such a name")

    @classmethod
    def of(cls, **options: Any) -> LoadOptions:
        """Build from keyword options; an unknown one is an error naming the nearest."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise unknown("option", name, known)
        return cls(**options)
