"""Speculation for a transformers model that is loaded already.

>>> model.generate(**inputs, max_new_tokens=200, custom_generate=foredraft.custom_generate)

``generate`` turns its many options into logits processors, stopping criteria and a generation
config. The ones below are honoured; everything else is refused by name.

Shape legend: B rows, T prompt tokens (left-padded), N tokens of prompt and reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.core.record import SpeculationStats
from foredraft.core.rules.bans import ModelBans
from foredraft.engine.request import GenerationResult
from foredraft.llm import LLM
from foredraft.load import LoadedModel
from foredraft.models.base import Source
from foredraft.options import LoadOptions
from foredraft.system.extras import needs_extra

try:
    from transformers.generation import (
        EosTokenCriteria,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        GenerateDecoderOnlyOutput,
        MaxLengthCriteria,
        MinPLogitsWarper,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    from foredraft.models.hf.encoder_decoder import EncoderDecoderTarget
    from foredraft.models.hf.target import HFTarget, check_model
except ImportError as problem:
    raise needs_extra("custom_generate needs", "hf", problem) from problem

_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Warpers of the distribution, in the order in which both libraries apply them."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "token_healing": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "compile_config": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Generation options that are neither processors nor criteria, and the values that ask nothing."""

_EXPECTED_INPUTS = {
    "cache",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
}
_ENCODER_INPUTS = {"encoder_outputs", "decoder_attention_mask"}


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Result of ``generate(…, return_dict_in_generate=True)``; it contains no cache.

    Attributes:
        sequences: [B, N] token ids, prompt included.
        speculation: statistics of speculation for each row.
    """

    speculation: list[SpeculationStats] | None = None


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    *,
    drafter: str = "auto",
    draft_model: Any = None,
    num_draft_tokens: int | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    coupling: Literal["seeded", "drawn"] = "seeded",
    token_streamer: Any = None,
    source_ids: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode speculatively inside ``model.generate``; pass it as ``custom_generate``.

    The keyword options are given to ``generate`` itself, beside its own. Greedy text is what
    ``generate`` gives without it; sampled text follows the same distribution, and
    ``torch.manual_seed`` makes it repeatable.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: as
            ``generate`` hands them over. ``input_ids`` are int64 [B, T].
        drafter: a registered drafter; "auto" is "draft_model" with a draft model, "prediction" of
            the source for encoder-decoders, else "suffix".
        draft_model: a smaller transformers model of the same vocabulary; of an encoder-decoder
            another one, or a model without an encoder, which reads the source first.
        num_draft_tokens: most nodes to draft a step; None takes the drafter's own default.
        drafter_options: the drafter's own options.
        coupling: see `SamplingParams`.
        token_streamer: a streamer of transformers, for one row. (``generate`` does not pass its
            own ``streamer`` on to a custom function.)
        source_ids: of an encoder-decoder once more its ``input_ids`` [B, S], which ``generate``
            keeps to itself: drafters copy from them, and draft models read them.

    Returns:
        int64 [B, N], short rows padded at the end; a `SpeculativeOutput` when
        ``return_dict_in_generate`` is set.

    Raises:
        ConfigError: an option that foredraft does not implement, or a drafter's option it lacks.
        CapabilityError: a model that cannot be speculated with.
        ForedraftError: generation failed, such as on logits that are not finite.
    """
    max_length, eos_token_ids = _read_criteria(stopping_criteria)
    has_encoder = model.config.is_encoder_decoder
    check_model(model, has_encoder)
    _refuse_unimplemented(generation_config, model_kwargs, has_encoder)
    num_begun = input_ids.shape[1] if has_encoder else None
    params, bans = _read_processors(logits_processor, generation_config.do_sample, num_begun)
    requests = _read_inputs(input_ids, source_ids, has_encoder, model_kwargs)
    if draft_model is not None and has_encoder and source_ids is None:
        raise ConfigError(
            "a draft model has to read the source, too; pass its input_ids once more as source_ids"
        )
    # Like generate itself, continue past the context length of the config.
    target = _target(model, max_length, requests[0][0], bans)
    options = LoadOptions(
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        drafter_options=drafter_options or {},
        max_batch_size=len(requests),
    )
    draft = None if draft_model is None else LoadedModel(_target(draft_model))
    llm = LLM(target, None, options, draft=draft)
    max_tokens = max_length - input_ids.shape[1]
    params = replace(params, max_tokens=max_tokens, stop_token_ids=eos_token_ids, coupling=coupling)
    if token_streamer is not None:
        if len(requests) > 1:
            raise ConfigError(f"a streamer shows one row, and there are {len(requests)}")
        token_streamer.put(input_ids.cpu())
    results = _run(llm, requests, params, token_streamer)
    sequences = _padded(input_ids, results, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(sequences=sequences, speculation=[r.stats for r in results])


def _read_inputs(
    input_ids: Tensor, source_ids: Tensor | None, has_encoder: bool, model_kwargs: Mapping[str, Any]
) -> list[tuple[list[int], Source | None]]:
    """Each row's prompt ids, and an encoder-decoder's source."""
    if has_encoder:
        return [*zip(input_ids.tolist(), _sources(source_ids, model_kwargs), strict=True)]
    if source_ids is not None:
        raise _not_implemented("source_ids for a model without an encoder")
    return [(prompt, None) for prompt in _unpadded(input_ids, model_kwargs)]


def _target(
    model: Any,
    max_context: int | None = None,
    decoder_prompt: Sequence[int] | None = None,
    bans: ModelBans | None = None,
) -> HFTarget:
    if not model.config.is_encoder_decoder:
        return HFTarget(model, max_context, trees=False, parts=False)
    return EncoderDecoderTarget(model, max_context, decoder_prompt=decoder_prompt, bans=bans)


def _sources(source_ids_BS: Tensor | None, model_kwargs: Mapping[str, Any]) -> list[Source]:
    """The encoder's output for each row, without padding."""
    states_BSE = model_kwargs["encoder_outputs"][0]
    num_rows, num_positions = states_BSE.shape[:2]
    mask_BS = model_kwargs.get("attention_mask")
    seen_BS = torch.ones(num_rows, num_positions) if mask_BS is None else mask_BS
    seen_BS = seen_BS.to(states_BSE.device).bool()
    ids: list[tuple[int, ...]] = [()] * num_rows
    if source_ids_BS is not None:
        # Several replies to one source are consecutive rows.
        source_ids_BS = source_ids_BS.repeat_interleave(num_rows // len(source_ids_BS), dim=0)
        if source_ids_BS.shape != seen_BS.shape:
            raise ConfigError(
                f"source_ids have shape {tuple(source_ids_BS.shape)}; the encoder has read "
                f"{tuple(seen_BS.shape)}"
            )
        both = zip(source_ids_BS.to(seen_BS.device), seen_BS, strict=True)
        ids = [tuple(row[seen].tolist()) for row, seen in both]
    return [
        Source(ids[row], states_BSE[row][seen_BS[row]], name=f"row {row}")
        for row in range(num_rows)
    ]


def _refuse_unimplemented(config: Any, model_kwargs: Mapping[str, Any], has_encoder: bool) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            hint = "; beams are neither the likeliest token nor a draw" if "beam" in name else ""
            raise _not_implemented(f"{name}={value!r}", hint)
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and not mask.all():
        raise _not_implemented("a decoder_attention_mask with padding")
    expected = _EXPECTED_INPUTS | (_ENCODER_INPUTS if has_encoder else set())
    for name, value in model_kwargs.items():
        if value is not None and name not in expected:
            hint = "; pass it as token_streamer" if name == "streamer" else ""
            raise _not_implemented(f"the input {name!r}", hint)
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise _not_implemented("cache of your own")


def _not_implemented(what: str, hint: str = "") -> ConfigError:
    return ConfigError(
        f"foredraft.custom_generate does not implement {what}{hint}; drop it, or call generate "
        "without custom_generate"
    )


def _read_criteria(criteria: Sequence[Any]) -> tuple[int, list[int]]:
    """The length limit, prompt included, and the ids that end a row."""
    max_length, eos_token_ids = None, []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            max_length = int(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos_token_ids = [int(token) for token in criterion.eos_token_id.flatten()]
        else:
            raise _not_implemented(f"the stopping criterion {type(criterion).__name__}")
    if max_length is None:
        raise ConfigError("generate gave no length limit; set max_new_tokens")
    return max_length, eos_token_ids


def _read_processors(
    processors: Sequence[Any], do_sample: bool | None, num_begun: int | None = None
) -> tuple[SamplingParams, ModelBans]:
    """The distribution that the processors describe together, and their bans.

    Their own values count, not the config's: a caller may have added one.

    Args:
        num_begun: number of decoder tokens before an encoder-decoder's reply; None for others.
    """
    options: dict[str, Any] = {"temperature": 1.0} if do_sample else {}
    bans, warpers = ModelBans(), list[Any]()
    for processor in processors:
        banned = None if num_begun is None else _banned_by(processor, num_begun)
        if banned is not None:
            bans = replace(bans, **banned)
            continue
        warpers.append(processor)
        name = _WARPERS.get(type(processor))
        if name is None or not do_sample or _filters_unusually(processor):
            raise _not_implemented(f"the logits processor {type(processor).__name__}")
        options[name] = getattr(processor, name)
    kinds = [type(processor) for processor in warpers]
    if kinds != [kind for kind in _WARPERS if kind in kinds]:
        raise _not_implemented(f"logits processors in the order {[k.__name__ for k in kinds]}")
    if do_sample:
        options["seed"] = 0  # each row draws its own
    return SamplingParams.of(**options), bans


def _banned_by(processor: Any, num_begun: int) -> dict[str, Any] | None:
    """Fields of `ModelBans`; None: it is a processor of another kind.

    Args:
        num_begun: tokens that are there before the reply.
    """
    kind = type(processor)
    if kind is SuppressTokensLogitsProcessor:
        return {"never": tuple(processor.suppress_tokens.tolist())}
    if kind is SuppressTokensAtBeginLogitsProcessor:
        place = processor.begin_index - num_begun
        return {"never_at": (place, tuple(processor.begin_suppress_tokens.tolist()))}
    if kind is ForcedBOSTokenLogitsProcessor:
        return {"first": processor.bos_token_id} if num_begun == 1 else {}
    if kind is ForcedEOSTokenLogitsProcessor and processor.eos_token_id.numel() == 1:
        return {"last": int(processor.eos_token_id)}
    return None


def _filters_unusually(processor: Any) -> bool:
    return (
        getattr(processor, "filter_value", -torch.inf) != -torch.inf
        or getattr(processor, "min_tokens_to_keep", 1) != 1
    )


def _unpadded(input_ids_BT: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Each row's prompt without the padding on its left."""
    mask_BT = model_kwargs.get("attention_mask")
    if mask_BT is None:
        mask_BT = torch.ones_like(input_ids_BT)
    seen_BT = mask_BT.to(input_ids_BT.device).bool()
    if seen_BT.shape != input_ids_BT.shape or (seen_BT[:, :-1] & ~seen_BT[:, 1:]).any():
        raise _not_implemented("an attention_mask other than padding on the left")
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None:
        expected_BT = (seen_BT.cumsum(1) - 1)[seen_BT]
        given_BT = position_ids.to(seen_BT.device).expand_as(seen_BT)[seen_BT]
        if not torch.equal(given_BT, expected_BT):
            raise _not_implemented("position_ids of your own")
    return [row[seen].tolist() for row, seen in zip(input_ids_BT, seen_BT, strict=True)]


def _run(
    llm: LLM,
    requests: Sequence[tuple[Sequence[int], Source | None]],
    params: SamplingParams,
    streamer: Any,
) -> list[GenerationResult]:
    """Generate all rows; results in their order."""
    for prompt, source in requests:
        seed = None if params.seed is None else int(torch.randint(2**63 - 1, ()).item())
        llm.engine.submit(prompt, replace(params, seed=seed), source=source)
    results: dict[int, GenerationResult] = {}
    for event in llm.engine.run():
        for token in event.token_ids if streamer is not None else ():
            streamer.put(torch.tensor([token]))
        if event.result is not None:
            results[event.request_id] = event.result
            if event.result.error is not None:
                raise ForedraftError(f"generation failed: {event.result.error}")
    if streamer is not None:
        streamer.end()
    return [results[request_id] for request_id in sorted(results)]


def _padded(input_ids_BT: Tensor, results: Sequence[GenerationResult], config: Any) -> Tensor:
    """The given prompts, the replies after them, and padding after shorter replies."""
    longest = max(len(result.token_ids) for result in results)
    pad = config._pad_token_tensor
    reply_BN = input_ids_BT.new_full((len(results), longest), 0 if pad is None else int(pad))
    for row, result in zip(reply_BN, results, strict=True):
        row[: len(result.token_ids)] = input_ids_BT.new_tensor(result.token_ids)
    return torch.cat([input_ids_BT, reply_BN], dim=1)
