"""The target seam: whatever can score pending tokens and a tree in one forward.

Shape legend: N positions whose logits are wanted, V vocabulary, T tokens of the forward, E hidden
size, R some rows of the head.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from foredraft.cache.layers import StoredLayers
from foredraft.cache.paged import Cache
from foredraft.core.choices import DrawKey
from foredraft.core.draws import Scored
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.rules.bans import ModelBans
from foredraft.core.sampling import Law, draw_rows
from foredraft.core.tree import EMPTY_TREE, TokenTree

_T = TypeVar("_T")


DeviceDraw: TypeAlias = Callable[[Tensor, Sequence[DrawKey]], list[Law | None]]
"""Draws from each of some rows of logits by its key; None of those that are not finite."""

Ability = Literal[
    "tree_attention", "parts", "first_layers", "low_bit", "apart", "cache_layers", "encoder"
]
"""A field of `Capabilities`."""


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a target beyond scoring chains; None for those that it lacks.

    Attributes:
        tree_attention: drafts may branch.
        taps: the layers whose outputs can be handed out, by number; an empty range when none.
        parts: embedding, final norm and LM head.
        first_layers: its first layers as a model.
        low_bit: a copy of its layers in few bits, which drafts on its own cache.
        apart: the same target with another cache, to try things.
        cache_layers: draft layers, which it runs on cache layers beside its own.
        encoder: the limits of its encoder, whose output its decoder attends to.
        recorded: its steps run as recordings.
    """

    tree_attention: bool = False
    taps: range = range(0)
    parts: TargetParts | None = None
    first_layers: LayeredTarget | None = None
    low_bit: LowBitTarget | None = None
    apart: ApartTarget | None = None
    cache_layers: HeadTarget | None = None
    encoder: Encoder | None = None
    recorded: RecordedTarget | None = None


def offered(ability: _T | None) -> _T:
    """An ability of a target, for code that runs only where there is one.

    Raises:
        CapabilityError: there is none.
    """
    if ability is None:
        raise CapabilityError("the target lacks an ability that this needs")
    return ability


def check_taps(taps: Sequence[int], there: range) -> None:
    """Refuse taps that are not to be had.

    Raises:
        ConfigError: a layer is not ``there`` (see `Capabilities.taps`).
    """
    for layer in taps:
        if layer not in there:
            has = f"layers {there.start} to {there.stop - 1}" if there else "no layers"
            raise ConfigError(f"layer {layer} cannot be tapped: this target hands out {has}")


@dataclass(frozen=True)
class Source:
    """The input that an encoder-decoder's decoder attends to, beside the text that it writes.

    Attributes:
        token_ids: of its text; empty if it is not text.
        states_SE: the encoder's output for each of its S positions, if it is known already. Without
            ``token_ids`` it needs a ``name``.
        name: tells apart sources of the same ids.
    """

    token_ids: tuple[int, ...]
    states_SE: Tensor | None = field(default=None, compare=False, repr=False)
    name: str = ""

    def __len__(self) -> int:
        return len(self.token_ids) if self.states_SE is None else len(self.states_SE)

    @cached_property
    def digest(self) -> str:
        """Equal for equal sources."""
        return hashlib.sha256(repr((self.name, self.token_ids)).encode()).hexdigest()


class Shortlist(NamedTuple):
    """Tokens that a draft may name: the first ids of the vocabulary, and some others.

    Attributes:
        num_first: the first ids.
        others: at most `MOST_OTHERS` ids behind these.
    """

    num_first: int
    others: tuple[int, ...] = ()


MOST_OTHERS = 64
"""Must equal ``kMostOthers`` of kernels/draw.h."""


@dataclass(frozen=True)
class ScoreRow:
    """One row's part of a forward: some pending tokens, then a tree below the last.

    Attributes:
        slot: the row's slot in the target's cache.
        pending: the tokens to read, at least one: all that are pending, or the first of them.
        tree: draft tokens; empty unless all pending tokens are read.
        wants_logits: False for a chunk whose logits are not needed.
        draw: key of the token after the pending ones, if its law is merely scaled logits; tokens
            after the nodes of a chain are drawn with the noise of the next positions. A target
            may draw them in the forward (`Scores.drawn`), or ignore this.
        source: the encoder's input for the row's text, the same in all forwards of a slot; targets
            without an encoder ignore it.
        device_draw: key of the same tokens, and of those after the nodes of a tree, if their laws
            are temperature and filters and verification needs no probabilities. `Scores.fetch`
            then draws them where the logits are.
        shortlist: the tokens that a draft may name; a draft model may leave out the logits of all
            others, so that those of the first ids come first, then those of ``others``.
    """

    slot: int
    pending: Sequence[int]
    tree: TokenTree = EMPTY_TREE
    wants_logits: bool = True
    draw: DrawKey | None = None
    source: Source | None = None
    device_draw: DrawKey | None = None
    shortlist: Shortlist | None = None


@dataclass(frozen=True)
class Scores:
    """Results of a forward for all rows together; item i has those of row i alone.

    Attributes:
        logits_NV: float32 (or float64) logits of all rows, one row below the other, on the target's
            device: after the last pending token (the row's first) and after each tree node; none
            of a row whose logits were not wanted.
        row_wanted: the rows of ``logits_NV`` that belong to each row of the forward.
        taps: for each tapped layer its output [T, E] over all tokens of the forward.
        tokens: the rows of these that belong to each row of the forward.
        drawn: the result of `draw_rows` for the first rows of ``logits_NV``, None for rows without
            a draw; None: nothing was drawn at all.
        draw: draws from rows of these logits where they are, without bringing them to the host;
            None: it cannot be done there.
        is_short: whether the logits of a row are those of its shortlist alone, and then any.
    """

    logits_NV: Tensor
    row_wanted: tuple[range, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    tokens: tuple[range, ...] = ()
    drawn: Sequence[Law | None] | None = None
    draw: DeviceDraw | None = None
    is_short: bool = False

    @classmethod
    def of_row(cls, logits_NV: Tensor, taps: Mapping[int, Tensor] | None = None) -> Scores:
        """The scores of a forward of one row."""
        num_tokens = len(next(iter((taps or {}).values()), ()))
        return cls(logits_NV, (range(len(logits_NV)),), taps or {}, (range(num_tokens),))

    @classmethod
    def of(cls, rows: Sequence[Scores]) -> Scores:
        """Join the scores of rows that were scored one by one; a single row is not copied."""
        if len(rows) == 1:
            return rows[0]
        logits_NV = torch.cat([row.logits_NV for row in rows])
        layers = rows[0].taps
        taps = {layer: torch.cat([row.taps[layer] for row in rows]) for layer in layers}
        sizes = [len(row.tokens[0]) for row in rows]
        wanted = _ranges([len(row.logits_NV) for row in rows])
        return cls(logits_NV, wanted, taps, _ranges(sizes))

    def __len__(self) -> int:
        return len(self.row_wanted)

    def __getitem__(self, index: int) -> Scores:
        wanted, drawn = self.row_wanted[index], self.drawn
        taps = {
            layer: x_TE[self.tokens[index].start : self.tokens[index].stop]
            for layer, x_TE in self.taps.items()
        }
        return Scores(
            self.logits_NV[wanted.start : wanted.stop],
            (range(len(wanted)),),
            taps,
            (range(len(self.tokens[index])),) if self.tokens else (),
            None if drawn is None else drawn[wanted.start : wanted.stop],
        )

    def __iter__(self) -> Iterator[Scores]:
        return (self[i] for i in range(len(self)))

    def fetch(self, rows: Sequence[ScoreRow]) -> list[Scores]:
        """Each row's scores as verification needs them, without taps, in two transfers at most.

        A GPU runs asynchronously; each number that Python reads waits for it. So the tokens that
        rows draw from temperature and filters alone are drawn there and come in one piece, and the
        logits of all other rows in another, however many rows and nodes there are. Without
        `draw`, greedy rows alone are spared their logits.

        On CPU everything is on the host already. The next token of all rows whose distribution is
        merely scaled logits is drawn in one call; other distributions are computed only where
        verification reaches them.

        Args:
            rows: those of the forward.
        """
        if is_on_host(self.logits_NV):
            return self._drawn_ahead([row.draw for row in rows])
        found = [*map(Scores.of_row, self._split())]
        others = [i for i, span in enumerate(self.row_wanted) if span]
        greedy = [i for i in others if (key := rows[i].device_draw) and not key.scale]
        if self.draw and len(greedy) < len(others):
            here = [i for i in others if rows[i].device_draw]
            keys = [key for i in here for key in _keys_of(rows[i])]
            _hand_out(found, here, self.draw(self._joined(here), keys) if here else ())
            others, greedy = [i for i in others if not rows[i].device_draw], []
        if greedy:
            here_NV = self._joined(greedy)
            largest_N, best_N = here_NV.max(dim=1)
            both = torch.stack((best_N.double(), largest_N.double()), 1).tolist()  # one transfer
            laws = [_greedy(*each) for each in zip(here_NV.unbind(), both, strict=True)]
            _hand_out(found, greedy, laws)
            others = [i for i in others if i not in greedy]
        if others:
            here_NV = self._joined(others).cpu()  # one transfer
            sizes = [len(self.row_wanted[i]) for i in others]
            for i, part_NV in zip(others, torch.split(here_NV, sizes), strict=True):
                found[i] = Scores.of_row(part_NV)
        return found

    def _drawn_ahead(self, keys: Sequence[DrawKey | None]) -> list[Scores]:
        """With the draws of the forward, or else one draw after each row's pending tokens.

        Draws of a row may end early; those of a row without a key are not used.
        """
        rows, drawn = [*zip(self.row_wanted, keys, strict=True)], self.drawn
        own: list[Sequence[Law | None]]
        if drawn is None:
            wanted = [(span.start, key[:3]) for span, key in rows if key is not None and span]
            found = iter(draw_rows(self.logits_NV, wanted) if wanted else ())
            own = [[next(found)] if key is not None and span else [] for span, key in rows]
        else:
            own = [[] if key is None else drawn[span.start : span.stop] for span, key in rows]
        parts = zip(self._split(), own, strict=True)
        return [Scores(part_NV, (range(len(part_NV)),), drawn=mine) for part_NV, mine in parts]

    def _split(self) -> list[Tensor]:
        if len(self.row_wanted) == 1:
            return [self.logits_NV]
        return [self.logits_NV[span.start : span.stop] for span in self.row_wanted]

    def _joined(self, rows: Sequence[int]) -> Tensor:
        if len(rows) == len(self.row_wanted):
            return self.logits_NV
        spans = [self.row_wanted[i] for i in rows]
        return torch.cat([self.logits_NV[span.start : span.stop] for span in spans])


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _keys_of(row: ScoreRow) -> list[DrawKey]:
    """The keys of the tokens after the pending ones and after each node."""
    assert row.device_draw is not None
    return [row.device_draw.ahead(depth) for depth in (0, *row.tree.depths)]


def _hand_out(rows: list[Scores], indices: Sequence[int], drawn: Sequence[Law | None]) -> None:
    """Add to some rows the laws with the tokens drawn from them."""
    found = iter(drawn)
    for i in indices:
        rows[i] = replace(rows[i], drawn=[next(found) for _ in rows[i].row_wanted[0]])


def _greedy(logits_V: Tensor, found: Sequence[float]) -> Law | None:
    token, logit = int(found[0]), found[1]
    return Law(logits_V, None, token, drawn=token) if math.isfinite(logit) else None


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    ends = zip(sizes, accumulate(sizes), strict=True)
    return tuple(range(end - size, end) for size, end in ends)


class Target(Protocol):
    """A causal language model with a cache.

    Attributes:
        vocab_size: logits per position.
        max_context: most tokens a row may hold, pending and drafted ones included.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def cache(self) -> Cache: ...

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        """One forward over all rows.

        Writes cache entries for all tokens but commits none: `Cache.keep` does. A failed call
        leaves every slot's length as it was.

        Raises:
            ConfigError: a layer of ``taps`` is not among those that `Capabilities.taps` names.
        """


@dataclass(frozen=True)
class Encoder:
    """The limits of a target's encoder. Each row of such a target's forward has a source.

    Attributes:
        decoder_prompt: the decoder's tokens before every reply.
        max_source: most tokens of a source.
        bans: tokens that it never writes, whatever a request asks for.
    """

    decoder_prompt: Sequence[int]
    max_source: int
    bans: ModelBans


_READ_AT_ONCE = 512
"""Tokens of a text that one forward reads: its memory stays bounded."""


def read(target: Target, slot: int, tokens: Sequence[int], source: Source | None = None) -> None:
    """Prefill a text of any length into a slot, and commit it; no logits are computed."""
    for start in range(0, len(tokens), _READ_AT_ONCE):
        piece = tokens[start : start + _READ_AT_ONCE]
        target.score([ScoreRow(slot, piece, wants_logits=False, source=source)])
        target.cache.keep(slot, len(piece), ())


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a llama-shaped target, as heads need them; fields as in ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True)
class HeadWeights:
    """Decoder layers of a drafter, which the target runs as it runs its own.

    Attributes:
        layers: of each layer its tensors by name: ``attention_norm.weight`` [E], ``qkv.weight``
            [(H + 2G) D, E], ``output.weight`` [E, H D], ``mlp_norm.weight`` [E],
            ``gate_up.weight`` [2F, E] (gate first), ``down.weight`` [E, F]. Without the first three
            a layer does not attend. Without the first two its queries, keys and values are handed
            in: each token's input is [E + (H + 2G) D], and no other layer may follow. There may be
            no layers: then norm and head alone are run.
        norm_E: of the final norm; None: there is none, which only such a layer may do without.
        output_RE: the rows of the head.
        shape: sizes of the layers; ``vocab_size`` and ``num_hidden_layers`` are not looked at.
    """

    layers: Sequence[Mapping[str, Tensor]]
    norm_E: Tensor | None
    output_RE: Tensor
    shape: ModelShape


@dataclass(frozen=True)
class OwnLayers:
    """A layer that a model brings to predict further tokens.

    Its input is a product of two normed inputs, an embedding and a state; the state is what the
    model's head reads, or the layer's own normed output.

    Attributes:
        token_EE: of the embedding, with the weights of its norm.
        state_EE: of the state.
        state_norm_E: of the state.
        norm_E: of the layer's output.
        eps: of all norms.
        runner: runs the layer; its logits are those of the model's head.
    """

    token_EE: Tensor
    state_EE: Tensor
    state_norm_E: Tensor
    norm_E: Tensor
    eps: float
    runner: HeadRunner


@dataclass(frozen=True)
class HeadRow:
    """One row's part of a run: tokens of the text, then a tree below the last of them.

    Attributes:
        slot: the row's slot in the target's cache.
        start: how many entries lie before the first token.
        num_text: tokens of the text, at least one where there is no tree.
        tree: parents of the nodes; its tokens are not read.
        num_known: how many of all these, from the front, were run before and are still there.
        num_wanted: of how many, from the end, the logits are wanted.
        is_block: nodes attend to all nodes, also to later ones.
    """

    slot: int
    start: int
    num_text: int
    tree: TokenTree = EMPTY_TREE
    num_known: int = 0
    num_wanted: int = 1
    is_block: bool = False


class ScoredTokens(NamedTuple):
    """Candidates of a position, as a device has scored them.

    Attributes:
        scored: tokens with their sums of scaled logit and noise (greedy: logits), best first.
        total: the log of the sum of exp of all sums.
    """

    scored: Scored
    total: float


@dataclass(frozen=True)
class ChainRow:
    """One row's part of a round of a head (see `HeadChain`).

    Attributes:
        slot: in the target's cache.
        start: the position of the first token to read.
        following: the token after each of them.
        taps: the target's states of them, [T, E] for each tapped layer.
        key: of the first token to draft; later ones have the positions after it.
    """

    slot: int
    start: int
    following: Sequence[int]
    taps: Sequence[Tensor]
    key: DrawKey


class RecordedTarget(Protocol):
    """A target whose steps run as recordings of a few shapes.

    Attributes:
        most_drafted: drafted tokens of a row up to which its step has the bits of one token, and
            about its time.
    """

    most_drafted: int

    def record(self, taps: Sequence[int]) -> None:
        """Record what steps of one request run, so that no reply waits for it.

        Args:
            taps: layers whose outputs will be wanted.
        """


class HeadChain(Protocol):
    """Rounds of a drafting head that run on the device without the host.

    Attributes:
        most_read: tokens of a row that a round reads at most.
    """

    @property
    def most_read(self) -> int: ...

    def can_run(self, slot: int, start: int) -> bool:
        """Whether a round can read the text of a slot from this position on."""

    def run(self, rows: Sequence[ChainRow], num_steps: int) -> list[list[ScoredTokens]]:
        """Read the rows' tokens and draft so many positions, each behind the best one before.

        Args:
            num_steps: positions, at least 2.

        Returns:
            Of each row and position the candidates.
        """


class HeadRunner(Protocol):
    """Runs a drafter's layers on cache layers of their own, which come with the target's.

    Attributes:
        layers: cache layers that it writes. Entries of the text are held there once they were run.
    """

    @property
    def layers(self) -> StoredLayers: ...

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Run the tokens that are not known yet, of all rows.

        Args:
            inputs_TE: inputs of the first layer for each of them, in float32 or the
                target's dtype; see `HeadWeights.layers`.

        Returns:
            The last layer's output [T, E] in float32 for each token, before the norm; and float32
            logits [N, R] of the wanted ones.
        """

    def new_chain(self, inputs: Any, ids_R: Tensor, num_taps: int) -> HeadChain | None:
        """Rounds of these layers on the device alone; None where they are not to be had.

        Args:
            inputs: has ``text_inputs`` and ``own_inputs`` that take tensors of tokens.
            ids_R: the token of each output row.
            num_taps: how many layers of the target the inputs of the text are made of.
        """


class TargetParts(Protocol):
    """The ends of a target, for drafters that stand on them. They share the target's weights.

    Attributes:
        hidden_size: E.
        dtype: of embeddings and hidden states.
        device: of the tensors.
    """

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, E] of tokens."""

    def norm(self, hidden_TE: Tensor) -> Tensor:
        """The final norm [T, E] of the last layer's output."""

    def logits(self, normed_TE: Tensor) -> Tensor:
        """The head: float32 logits [T, V] of normed states."""

    def head_rows(self, token_ids_R: Tensor) -> Tensor:
        """The head's weights [R, E] for some tokens, in ``dtype``, scaled as logits are.

        Where a model caps its logits, products with these rows are not capped.
        """

    def kept(self, name: str, recipe: str, make: Callable[[], Tensor]) -> Tensor:
        """The result of ``make``, or its cached result of an earlier process on this model.

        Args:
            recipe: all that the tensor depends on besides the model; see `kept.recipe_of`.
        """


class Join(Protocol):
    """Joins states and a token to the input of a head's layer."""

    def __call__(self, states: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        """[T, E], float32 on the CPU, of states [T, E] each and one token for each row."""


class HeadTarget(Target, Protocol):
    """A target that runs draft layers.

    Attributes:
        parts: its ends.
        has_own_layers: whether the model brings layers that predict further tokens.

    Raises:
        CapabilityError: `parts` was asked of a target that lacks them.
    """

    @property
    def parts(self) -> TargetParts: ...

    @property
    def has_own_layers(self) -> bool: ...

    def own_layers(self) -> OwnLayers:
        """The first of them, read anew.

        Raises:
            CapabilityError: there are none.
            ModelLoadError: they are incomplete or damaged.
        """

    def head_runner(self, weights: HeadWeights) -> HeadRunner:
        """A runner of a drafter's layers, which get cache layers of their own.

        Raises:
            ConfigError: the shapes of the weights do not fit each other.
        """

    def join(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> Join:
        """The fastest input projection of a drafter's layers that the target has.

        Each state is normed to a root mean square of 1, the states of a token are concatenated
        [T, K] and multiplied with the matrix, and the token's row of the table is added. The result
        may be rounded: a draft does not have to be exact.

        Args:
            weight_EK: the matrix.
            table_VE: contributions of tokens; None: there are none.
            eps: of the norms.
        """


class LayeredTarget(Target, Protocol):
    """A target whose first layers can be run alone."""

    @property
    def num_layers(self) -> int: ...

    def first_layers(self, count: int) -> Target:
        """The first layers, the final norm and the LM head, with a cache of their own."""


class LowBitCopy(Protocol):
    """A copy of a target's layers and head in few bits, on the target's own cache.

    Attributes:
        bits: of a weight of the layers.
        num_bytes: memory that its weights take beside the target's.
        identity: tells copies of one target apart.
    """

    @property
    def bits(self) -> int: ...

    @property
    def identity(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    def on(self, target: Target) -> LowBitCopy:
        """The same copy on the cache of `LowBitTarget.apart`."""

    def score(self, rows: Sequence[ScoreRow], starts: Sequence[int]) -> Scores:
        """One forward of the copy, which reads entries and writes after the committed ones.

        Nothing of it is ever committed: the target's forward of the same tokens writes their
        entries anew.

        Args:
            rows: as for `Target.score`; ``pending`` are the first tokens to read.
            starts: for each row the position of the first of them: the slot's length, or more where
                the copy has read the tokens in between since the slot was last changed.

        Returns:
            Scores with a draw for each row of logits, or without draws. After the first token of a
            chain, tokens are drawn with the noise of the next positions; a row without
            `ScoreRow.draw` gives the likeliest. A draw is None if its logits are not finite.
            Logits of drawn tokens are the copy's own; others may be estimates.
        """


class ApartTarget(Target, Protocol):
    """A target that can be had with another cache.

    Attributes:
        identity: tells models, and forms of one model, apart.
        parts: its ends.
    """

    @property
    def parts(self) -> TargetParts: ...

    @property
    def identity(self) -> str: ...

    def apart(self, num_tokens: int) -> Target:
        """The same target with a small cache of its own: to try things while this one is in use.

        Args:
            num_tokens: that the cache has room for.
        """


class LowBitTarget(ApartTarget, Protocol):
    """A target of which copies in few bits can draft.

    Attributes:
        low_bits: what a copy's weights may have, the fewest first.
    """

    @property
    def low_bits(self) -> Sequence[int]: ...

    def low_bit_copy(self, bits: int) -> LowBitCopy:
        """A copy with ``bits``-bit weights, shared by all holders while one exists.

        Raises:
            ConfigError: there is no such copy.
            ModelLoadError: there is no memory for it.
        """

    def tune_copy(
        self, texts: Sequence[Sequence[int]], advance: Callable[[str], None]
    ) -> LowBitCopy:
        """A better copy in 4 bits, which takes some time to make and is kept for later processes.

        Args:
            texts: token ids that the target wrote itself; some thousands in all.
            advance: called after each layer with a line about it.
        """
