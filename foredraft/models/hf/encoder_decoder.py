"""Encoder-decoders of transformers (T5, BART, Marian and their kin) as a `Target`.

The prompt is the source: the encoder reads it once, and the keys and values of cross-attention are
kept while a slot uses them or caches a text that was generated from them. Forks, preempted requests
and later requests with the same source share them.

Shape legend: S positions of a source, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from foredraft.core.errors import CapabilityError
from foredraft.core.rules.bans import ModelBans
from foredraft.core.tree import TokenTree
from foredraft.models.base import Capabilities, Encoder, ScoreRow, Source
from foredraft.models.hf.cache import HFCache
from foredraft.models.hf.sizes import context_limit
from foredraft.models.hf.target import HFTarget
from foredraft.models.native.plan import ForwardPlan

_NEARLY = 0.01
"""Part of what another token changes that the order of a sum may change, in float32."""


@dataclass(eq=False)
class Encoded:
    """An encoded source for the decoder; constant once a forward has filled it.

    Attributes:
        digest: of the source.
        states_1SE: the encoder's output.
        cross: keys and values of cross-attention, a layer of the decoder each.
    """

    digest: str
    states_1SE: Tensor
    cross: Any = field(default_factory=DynamicCache)

    @property
    def num_bytes(self) -> int:
        tensors = [self.states_1SE]
        tensors += [tensor for layer in self.cross.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


class SourceCache(HFCache):
    """A cache whose slots have sources. Slots of one owner (`Cache.share`) have the same source."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._encoded: dict[int, Encoded] = {}  # by slot
        self._by_owner: WeakValueDictionary[bytes, Encoded] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(each.num_bytes for each in {*self._encoded.values()})

    def encoded(self, slot: int, source: Source) -> Encoded | None:
        """The encoded source of a slot, from itself or from another slot of its owner."""
        owner = self._slots[slot].owner
        found = self._encoded.get(slot) or (self._by_owner.get(owner) if owner else None)
        return found if found is not None and found.digest == source.digest else None

    def set_encoded(self, slot: int, encoded: Encoded) -> None:
        self._encoded[slot] = encoded
        if owner := self._slots[slot].owner:
            self._by_owner[owner] = encoded

    def fork(self, slot: int) -> int:
        twin = super().fork(slot)
        if slot in self._encoded:
            self._encoded[twin] = self._encoded[slot]
            self._measure(twin)
        return twin

    def free(self, slot: int) -> None:
        super().free(slot)
        self._encoded.pop(slot, None)

    def distrust(self) -> None:
        self._by_owner.clear()  # an encoded source may be the cause
        super().distrust()

    def _source_room(self, slot: int) -> int:
        encoded = self._encoded.get(slot)
        if encoded is None or not self._token_bytes:
            return 0
        return -(-encoded.num_bytes // self._token_bytes)


class EncoderDecoderTarget(HFTarget):
    """An encoder-decoder as a `foredraft.models.base.Target`.

    A row without a source has one of the decoder's first tokens: enough to measure with.

    Args:
        model: an encoder-decoder of transformers with a text head, in eval mode.
        max_context: most tokens of a reply, with those it begins behind; the limit of the model's
            config when None.
        decoder_prompt: the decoder prompt of replies; None: from the model's generation config.
        bans: tokens that are never generated; None: from the generation config.
        cache_memory: see `HFTarget`.

    Raises:
        CapabilityError: the model is none, its past cannot be rolled back, or nothing says what its
            replies begin behind.
        ConfigError: the model is in training mode.
    """

    auto_class = AutoModelForSeq2SeqLM
    has_encoder = True
    new_cache = SourceCache

    def __init__(
        self,
        model: Any,
        max_context: int | None = None,
        *,
        decoder_prompt: Sequence[int] | None = None,
        bans: ModelBans | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, max_context, trees=False, parts=False, **options)
        generation = model.generation_config
        self.decoder_prompt = decoder_prompt or _decoder_prompt(model, generation)
        self.max_source = context_limit(model.config)
        self.bans = bans or ModelBans(
            tuple(generation.suppress_tokens or ()),
            (0, tuple(generation.begin_suppress_tokens or ())),
            last=_one_token("forced_eos_token_id", generation.forced_eos_token_id),
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(encoder=Encoder(self.decoder_prompt, self.max_source, self.bans))

    def check_loaded(self) -> None:
        """Check that tokens get the same scores together and one by one.

        Raises:
            CapabilityError: they differ.
        """
        tokens = [*self.decoder_prompt, *(i * self.vocab_size // 4 for i in (1, 2, 3))]
        together_NV = self._logits_once(tokens[:1], TokenTree.chain(tokens[1:]))
        slot = self.cache.allocate()
        one_by_one = []
        for token in tokens:
            one_by_one.append(self.score([ScoreRow(slot, [token])])[0].logits_NV)
            self.cache.keep(slot, 1, ())
        self.cache.free(slot)
        error = (torch.cat(one_by_one) - together_NV).abs().max()
        effect = (together_NV[1:] - together_NV[:-1]).abs().max()
        if self.model.dtype == torch.float32 and not error <= _NEARLY * effect:
            raise CapabilityError(
                f"{type(self.model).__name__} scores a token otherwise when others are read with "
                "it, so guesses cannot be checked in one forward"
            )

    def _forward(self, row: ScoreRow, plan: ForwardPlan, wants_states: bool) -> Any:
        cache = cast(SourceCache, self.cache)
        source = row.source or Source(tuple(self.decoder_prompt))
        encoded = cache.encoded(row.slot, source) or self._encode(source)
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded.states_1SE),
            decoder_input_ids=plan.token_ids_T[None].to(self.model.device),
            use_cache=True,
            return_dict=True,
            cache=EncoderDecoderCache(cache.open(row.slot), encoded.cross),
        )
        cache.set_encoded(row.slot, encoded)  # not before: a failed forward may fill it by half
        return output

    def _encode(self, source: Source) -> Encoded:
        if source.states_SE is not None:
            return Encoded(source.digest, source.states_SE[None])
        ids_1S = torch.tensor([source.token_ids], device=self.model.device)
        output = self.model.get_encoder()(input_ids=ids_1S, return_dict=True)
        return Encoded(source.digest, output.last_hidden_state)


def _decoder_prompt(model: Any, generation: Any) -> tuple[int, ...]:
    """The decoder prompt of every reply: the start token, and the forced token after it."""
    start = _one_token("decoder_start_token_id", generation.decoder_start_token_id)
    if start is None:
        start = _one_token("bos_token_id", generation.bos_token_id)
    if start is None:
        raise CapabilityError(
            f"nothing says what token the decoder of {type(model).__name__} starts with; set "
            "decoder_start_token_id in generation_config.json"
        )
    forced = _one_token("forced_bos_token_id", generation.forced_bos_token_id)
    return (start,) if forced is None else (start, forced)


def _one_token(name: str, token: Any) -> int | None:
    """A token of a generation config."""
    if isinstance(token, list) and len(token) == 1:
        (token,) = token
    if token is not None and type(token) is not int:
        raise CapabilityError(f"{name} is {token!r}; one token is needed here")
    return token
