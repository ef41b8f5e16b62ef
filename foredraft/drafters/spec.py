"""The registry's description of a drafter: its needs, its options and its sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from foredraft.drafters.base import Drafter
from foredraft.models.base import Ability, Target

if TYPE_CHECKING:
    from foredraft.drafters.heads.base import HeadModule


class TextCodec(Protocol):
    """Text to ids and back, for drafters that work on text.

    Attributes:
        fingerprint: equal where ids have the same meaning; None: it is not known.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class DrafterContext:
    """Inputs of building a drafter.

    Attributes:
        target: the target, for drafters that share its layers or embeddings.
        draft_model: the separate draft model, when the user named one.
        options: the user's options for this drafter, checked against `DrafterSpec.options`.
        tokenizer: the target's; None when requests come as token ids only.
        draft_tokenizer: the draft model's.
        size_share: bytes that a forward of the draft model reads, over the target's; None: not
            known.
        is_fixed: whether the user has set the number of draft tokens: then none is left out.
    """

    target: Target
    draft_model: Target | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TextCodec | None = None
    draft_tokenizer: TextCodec | None = None
    size_share: float | None = None
    is_fixed: bool = False

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the tokenizer, which identifies its ids; None if it is unknown."""
        return self.tokenizer.fingerprint if self.tokenizer else None


@dataclass(frozen=True)
class DrafterSpec:
    """How the registry knows a drafter. Each drafter file ends with one, named ``DRAFTER``.

    Attributes:
        summary: one line of help text.
        options: option names with one line of help each; others are refused.
        num_draft_tokens: a sensible default budget of nodes a step.
        needs: capabilities the target must have.
        needs_in_words: explanation of the needs, if the names of capabilities are not clear.
        draft_model: whether it uses a draft model: never, if the user names one, always, or always
            and of any vocabulary.
        trained: the kind of trained folder that it cannot draft without (option ``head``), unless
            one comes with the model; None: it needs none.
        copies: whether its drafts are copied from earlier text. Where only some are, its proposals
            name "copy" as the author of those nodes.
        reads_prediction: whether it drafts from `SamplingParams.prediction`.
        head: kind of head that ``foredraft train`` trains for it; None: it needs none.
        is_models_own: whether some models bring it.
    """

    build: Callable[[DrafterContext], Drafter]
    summary: str
    options: Mapping[str, str] = field(default_factory=dict)
    num_draft_tokens: int = 4
    needs: Sequence[Ability] = ()
    needs_in_words: str = ""
    draft_model: Literal["none", "optional", "required", "any vocabulary"] = "none"
    trained: str | None = None
    copies: bool = False
    reads_prediction: bool = False
    head: type[HeadModule] | None = None
    is_models_own: bool = False

    def comes_with(self, target: Target) -> bool:
        """Whether a model brings it."""
        layers = target.capabilities.cache_layers
        return self.is_models_own and layers is not None and layers.has_own_layers

    @property
    def needs_draft_model(self) -> bool:
        return self.draft_model in ("required", "any vocabulary")

    def missing_capabilities(self, target: Target) -> list[str]:
        """Capabilities that it needs and the target does not offer."""
        return [name for name in self.needs if not getattr(target.capabilities, name)]
