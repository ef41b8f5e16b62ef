"""Exact speculative decoding: your model's own text, faster, with nothing changed.

>>> from foredraft import LLM, SamplingParams
>>> llm = LLM.load("smollm2-135m-instruct", drafter="ngram")
>>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))[0].text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foredraft.version import __version__

if TYPE_CHECKING:
    from foredraft.async_llm import AsyncLLM
    from foredraft.core.errors import ForedraftError
    from foredraft.core.grammar import Grammar
    from foredraft.core.logprobs import TokenLogprobs
    from foredraft.core.params import SamplingParams
    from foredraft.core.record import SpeculationStats
    from foredraft.engine.request import GenerationResult
    from foredraft.hf_generate import custom_generate
    from foredraft.llm import LLM

_PUBLIC = {
    "AsyncLLM": "foredraft.async_llm",
    "LLM": "foredraft.llm",
    "ForedraftError": "foredraft.core.errors",
    "GenerationResult": "foredraft.engine.request",
    "Grammar": "foredraft.core.grammar",
    "SamplingParams": "foredraft.core.params",
    "SpeculationStats": "foredraft.core.record",
    "TokenLogprobs": "foredraft.core.logprobs",
    "custom_generate": "foredraft.hf_generate",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``import foredraft`` itself loads no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "LLM",
    "AsyncLLM",
    "ForedraftError",
    "GenerationResult",
    "Grammar",
    "SamplingParams",
    "SpeculationStats",
    "TokenLogprobs",
    "__version__",
    "custom_generate",
]
