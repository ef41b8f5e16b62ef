"""The drafter seam: everything that guesses ahead implements this and nothing more.

A drafter is one file in this folder with a class that implements `Drafter` and is named by
``DRAFTER`` at the end of the file; the file's name is its registry key. See docs/add-a-drafter.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from foredraft.core.choices import DraftChoices
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.models.base import Capabilities, Target


@dataclass(frozen=True)
class DraftRow:
    """What a drafter may know of one request when it drafts.

    Attributes:
        request_id: unchanged from `Drafter.begin` to `Drafter.end`.
        tokens: all committed tokens, prompt included. Do not change it.
        params: the distribution the user asked for.
        budget: the most nodes to draft; 0 asks for an empty proposal.
        choices: the row's draft stream, for drawn proposals.
        slot: the row's slot in the target's cache, for drafters that run the target's own layers.
    """

    request_id: int
    tokens: Sequence[int]
    params: SamplingParams
    budget: int
    choices: DraftChoices
    slot: int = -1


@dataclass(frozen=True)
class Observation:
    """What became of one row's step.

    Attributes:
        request_id: which request.
        committed: the tokens the step committed.
        num_accepted: how many of them were drafted.
        proposal: what was verified.
        path: nodes of the proposal that were committed.
        logits_NV: the target's logits at the root (row 0) and at each node.
        taps: hidden states of the layers the drafter asked for, over pending tokens and nodes.
    """

    request_id: int
    committed: Sequence[int]
    num_accepted: int
    proposal: Proposal
    path: Sequence[int]
    logits_NV: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)


class Drafter(Protocol):
    """Guesses ahead for a batch of rows.

    A drafter can be wrong, slow or useless without changing a single token of the output: it
    never sees the verify stream, and every step commits at least one token without it. After
    `observe`, or at the next `propose` at the latest, nothing of a rejected branch may be left in
    its state.

    Attributes:
        taps: hidden layers of the target whose outputs `observe` wants; usually none.
    """

    @property
    def taps(self) -> Sequence[int]: ...

    def begin(self, request_id: int, prompt: Sequence[int]) -> None:
        """A request starts."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        """One proposal a row, each of at most ``row.budget`` nodes."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """A step has been committed."""
        ...

    def end(self, request_id: int) -> None:
        """A request is over; forget it."""
        ...


class BaseDrafter:
    """Do-nothing defaults for every part of `Drafter` but `propose`."""

    taps: Sequence[int] = ()

    def begin(self, request_id: int, prompt: Sequence[int]) -> None:
        pass

    def observe(self, observations: Sequence[Observation]) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass


class TextCodec(Protocol):
    """Text to ids and back, for drafters that work on text."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may be built from.

    Attributes:
        target: the target, for drafters that share its layers or embeddings.
        draft_model: the separate draft model, when the user named one.
        options: the user's options for this drafter, checked against `DrafterSpec.options`.
        tokenizer: the target's; None when requests come as token ids only.
        draft_tokenizer: the draft model's.
        forward_ms: (tokens, milliseconds) of the target's forward as of now, by rising tokens.
            Measured when first asked for, and then followed; None where nobody measures.
    """

    target: Target
    draft_model: Target | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TextCodec | None = None
    draft_tokenizer: TextCodec | None = None
    forward_ms: Callable[[], Sequence[tuple[int, float]]] | None = None


class DrafterFactory(Protocol):
    def __call__(self, context: DrafterContext) -> Drafter: ...


@dataclass(frozen=True)
class DrafterSpec:
    """How the registry knows a drafter. Each drafter file ends with one, named ``DRAFTER``.

    Attributes:
        build: makes the drafter.
        summary: one line for people.
        options: option names with one line of help each; others are refused.
        num_draft_tokens: a sensible default budget of nodes a step.
        needs: capabilities the target must have.
        needs_draft_model: whether the user must name a draft model.
        takes_draft_model: whether it can use one and do without.
        any_vocabulary: whether that model may have another vocabulary than the target.
        learns_from_guesses: whether it learns from the target's scores of guesses that were not
            accepted, so that its drafts are no function of the committed text alone.
    """

    build: DrafterFactory
    summary: str
    options: Mapping[str, str] = field(default_factory=dict)
    num_draft_tokens: int = 4
    needs: Capabilities = field(default_factory=Capabilities)
    needs_draft_model: bool = False
    takes_draft_model: bool = False
    any_vocabulary: bool = False
    learns_from_guesses: bool = False
