"""Any causal language model of transformers as a `Target`: slower than native, and general.

Rows are read one by one, each with a cache of its own, so a row's numbers cannot depend on its
neighbours. Chains go through the model's own causal mask; trees through an explicit one.

Shape legend: T tokens of one row in one forward, C cache entries they see, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils import logging as hf_logging

from foredraft.cache.memory import CacheMemory
from foredraft.core.errors import CapabilityError, ConfigError, ForedraftError, ModelLoadError
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import (
    Capabilities,
    HeadWeights,
    Join,
    OwnLayers,
    ScoreRow,
    Scores,
    check_taps,
)
from foredraft.models.files.safety import Checkpoint
from foredraft.models.hf.cache import HFCache, layer_factory
from foredraft.models.hf.parts import HFParts, find_parts
from foredraft.models.hf.sizes import cannot_run, context_limit, decoder_of, read_config
from foredraft.models.hf.states import HFStateCache, find_reading, state_layers
from foredraft.models.native.draft_layers import NativeHeadRunner, head_config, native_join
from foredraft.models.native.plan import ForwardPlan, plan_forward


class HFTarget:
    """See `foredraft.models.base.Target`.

    Attributes:
        auto_class: loads models of this kind.
        has_encoder: whether they are encoder-decoders.

    Args:
        model: a causal language model of transformers, in eval mode; used as it is, wherever
            its weights are.
        max_context: most tokens a row may hold; the limit of the model's config when None. A
            larger one is taken as given, for models whose positions go on.
        trees: find out by trying whether the model scores trees. That takes three short forwards;
            False saves them and allows chains only.
        parts: find out by trying whether its embedding, final norm and head can be used by others;
            False saves a short forward. With them, the last layer can be tapped too: the state that
            transformers hands out for it is normed.
        cache_memory: what the cache may take, in bytes, or shared with other caches; None: a
            share of the memory there is.

    Raises:
        CapabilityError: the model is no causal language model, or its past cannot be rolled back
            (`foredraft.models.hf.states` says how a state is).
        ConfigError: the model is in training mode.
    """

    auto_class: Any = AutoModelForCausalLM
    has_encoder = False
    new_cache = HFCache
    has_own_layers = False

    def __init__(
        self,
        model: Any,
        max_context: int | None = None,
        *,
        trees: bool = True,
        parts: bool = True,
        cache_memory: CacheMemory | int | None = None,
    ) -> None:
        check_model(model, self.has_encoder)
        config = decoder_of(model.config)
        self.model = model
        head = model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or config.vocab_size)
        self._num_ids = self.vocab_size
        self.max_context = max_context or context_limit(config)
        memory = CacheMemory.of(cache_memory, model.device)
        carries_state = bool(getattr(model, "_is_stateful", False))
        layers = partial(state_layers, config) if carries_state else layer_factory(config)
        new_cache = HFStateCache if carries_state else self.new_cache
        self.cache = new_cache(layers, self.max_context, model.device, memory)
        self._num_layers: int = config.num_hidden_layers
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        self._mask = _TreeMask(config, model.dtype, model.device)
        has_positions = "position_ids" in self._arguments
        may_try = trees and has_positions and not carries_state and _masks_are_known(config)
        prompt = _distinct_tokens(self.vocab_size)
        self._parts = find_parts(model, prompt) if parts else None
        self._takes_trees = False
        self._takes_trees = may_try and self._scores_trees()
        if isinstance(self.cache, HFStateCache):
            find_reading(self, prompt)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            tree_attention=self._takes_trees,
            taps=range(self._num_layers if self._parts else self._num_layers - 1),
            parts=self._parts,
            cache_layers=self,
        )

    @classmethod
    def load(
        cls,
        source: Path | Checkpoint,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_context: int | None = None,
        cache_memory: CacheMemory | int | None = None,
        num_ids: Callable[[int], int] | None = None,
    ) -> HFTarget:
        """Load a checkpoint: safetensors only, and no code out of the directory.

        Args:
            source: the checkpoint; a directory is checked first.
            num_ids: how many of so many output rows are tokens: no others are drawn; None: all.

        Raises:
            ModelLoadError: the checkpoint is incomplete, damaged, or of a kind that transformers
                itself does not know.
            CapabilityError: see the class.
        """
        checkpoint = Checkpoint.of(source)
        config = read_config(checkpoint)
        try:
            model = _load_model(checkpoint, config, dtype, cls.auto_class)
            _check_finite(checkpoint.directory, model)
            target = cls(model.to(device), max_context, cache_memory=cache_memory)
            target.check_loaded()
            if num_ids:  # not before: what is tried takes differences of logits
                target._num_ids = num_ids(target.vocab_size)
        except ForedraftError:
            raise
        except Exception as error:  # transformers and the model's code may raise anything
            raise cannot_run(checkpoint.directory, error) from error
        return target

    def check_loaded(self) -> None:
        """Check that the model runs."""
        self._logits_once((0,), TokenTree())

    @property
    def parts(self) -> HFParts:
        """The model's ends.

        Raises:
            CapabilityError: they were not found.
        """
        if self._parts is None:
            raise CapabilityError(
                f"embedding, final norm and head of {type(self.model).__name__} cannot be told "
                "apart from outside, so no drafter can stand on them"
            )
        return self._parts

    def own_layers(self) -> OwnLayers:
        raise CapabilityError("layers that predict further tokens are run by the native decoder")

    def head_runner(self, weights: HeadWeights) -> NativeHeadRunner:
        """See `foredraft.models.base.HeadTarget`."""
        dtype = self.parts.dtype
        layers = self.cache.add_layers(head_config(weights).kv_shape, dtype)
        return NativeHeadRunner.of_head(weights, layers, dtype, fused=False)

    def join(self, weight_EK: Tensor, table_VE: Tensor | None, eps: float) -> Join:
        """See `foredraft.models.base.HeadTarget`."""
        weight_EK = weight_EK.to(self.parts.device)
        return native_join(weight_EK, table_VE, eps, self.parts.dtype, fused=False)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        check_taps(taps, self.capabilities.taps)
        for row in rows:
            self.cache.reserve(row.slot, len(row.pending) + len(row.tree))
        return Scores.of([self._score_row(row, taps) for row in rows])

    def _score_row(self, row: ScoreRow, taps: Sequence[int]) -> Scores:
        parts = [self._run(part, start, taps) for part, start in self.cache.forwards(row)]
        scores = Scores.of(parts)  # they may begin with tokens that were read before
        num_tokens = len(row.pending) + len(row.tree)
        first = len(scores.logits_NV) - (1 + len(row.tree) if row.wants_logits else 0)
        taps_TE = {i: tap_TE[len(tap_TE) - num_tokens :] for i, tap_TE in scores.taps.items()}
        return Scores.of_row(scores.logits_NV[first:], taps_TE)

    def _run(self, row: ScoreRow, start: int, taps: Sequence[int]) -> Scores:
        plan = plan_forward([row], [start])
        last = self._num_layers - 1
        with self._parts.last_output() if last in taps and self._parts else nullcontext() as caught:
            output = self._forward(row, plan, bool(taps))
        written = self.cache.num_written(row.slot)
        if written != {plan.end(plan.rows[0])}:
            raise CapabilityError(
                f"{type(self.model).__name__} left {sorted(written)} entries in its cache where "
                f"{plan.end(plan.rows[0])} were due; it cannot be rolled back"
            )
        logits_TV = output.logits[0]
        logits_NV = logits_TV[len(logits_TV) - len(plan.wanted) :].float()
        logits_NV[:, self._num_ids :] = -torch.inf
        states = [*output.hidden_states[1:-1], *(caught or ())] if taps else []
        return Scores.of_row(logits_NV, {i: states[i][0] for i in taps})

    def _forward(self, row: ScoreRow, plan: ForwardPlan, wants_states: bool) -> Any:
        return self.model(**self._inputs(row, plan), output_hidden_states=wants_states)

    def _inputs(self, row: ScoreRow, plan: ForwardPlan) -> dict[str, Any]:
        device = self.model.device
        inputs: dict[str, Any] = {
            "input_ids": plan.token_ids_T[None].to(device),
            "cache": self.cache.open(row.slot),
            "use_cache": True,
            "return_dict": True,
        }
        if "position_ids" in self._arguments:
            inputs["position_ids"] = plan.positions_T[None].to(device)
        if "logits_to_keep" in self._arguments:
            inputs["logits_to_keep"] = max(1, len(plan.wanted))  # 0 would mean all
        if not row.tree.is_chain:
            inputs["attention_mask"] = self._mask.of(plan)
        return inputs

    def _scores_trees(self) -> bool:
        """Score a small tree, and its two deepest paths alone, and compare.

        Six siblings lie between each leaf and its parent: a model that takes positions from the
        order of the tokens, or does not take the mask, gives itself away.
        """
        first, second, leaf, *others = _distinct_tokens(self.vocab_size)
        prompt, siblings = others[:3], others[3:]
        top = (first, second, *siblings)
        tree = TokenTree((*top, leaf, leaf), (*[ROOT] * len(top), 0, 1))
        try:
            in_tree = self._logits_once(prompt, tree)[-2:]
            alone = torch.stack(
                [self._logits_once(prompt, TokenTree.chain((t, leaf)))[-1] for t in (first, second)]
            )
        except Exception:  # whatever a model's code does with a mask it was not made for
            return False
        noise = 0.01 if self.model.dtype in (torch.float32, torch.float64) else 0.1
        effect = (alone[0] - alone[1]).abs().max()
        return bool((in_tree - alone).abs().max() <= noise * effect)

    def _logits_once(self, pending: Sequence[int], tree: TokenTree) -> Tensor:
        slot = self.cache.allocate()
        try:
            return self.score([ScoreRow(slot, pending, tree)])[0].logits_NV
        finally:
            self.cache.free(slot)


class _TreeMask:
    """Additive masks [1, 1, T, C] that let each token see its prefix and its ancestors.

    Layers with a sliding window get a mask of their own. Models with several kinds of layers take
    a mask for each, by the name of the kind.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._kinds = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
        self._window: int | None = getattr(config, "sliding_window", None)
        self._dtype, self._device = dtype, device

    def of(self, plan: ForwardPlan) -> Tensor | dict[str, Tensor]:
        seen_TC = plan.mask(plan.rows[0])
        assert seen_TC is not None  # only a single token needs none, and a tree has siblings
        kinds = self._kinds or ("sliding_attention",)
        masks = {kind: self._additive(self._seen_by(kind, seen_TC, plan)) for kind in kinds}
        return masks if len(masks) > 1 else masks[kinds[0]]

    def _seen_by(self, kind: str, seen_TC: Tensor, plan: ForwardPlan) -> Tensor:
        if kind == "full_attention" or self._window is None:
            return seen_TC
        entry_positions_C = torch.cat([torch.arange(plan.entries[0]), plan.positions_T])
        return seen_TC & (entry_positions_C[None] > plan.positions_T[:, None] - self._window)

    def _additive(self, seen_TC: Tensor) -> Tensor:
        mask_TC = torch.zeros(seen_TC.shape, dtype=self._dtype)
        mask_TC.masked_fill_(~seen_TC, torch.finfo(self._dtype).min)
        return mask_TC[None, None].to(self._device)


def _distinct_tokens(vocab_size: int) -> list[int]:
    """Twelve ids spread over the vocabulary."""
    return [(i + 1) * vocab_size // 13 for i in range(12)]


def check_model(model: Any, has_encoder: bool) -> None:
    """Refuse models that cannot be a target; see `HFTarget`."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder != has_encoder or not model.can_generate():
        kind = "an encoder-decoder" if has_encoder else "a causal language model"
        raise CapabilityError(f"{name} is not {kind} with a text head")
    if not model._supports_default_dynamic_cache():
        raise CapabilityError(
            f"{name} keeps its past in a form of its own, which cannot be copied: a rejected token "
            "cannot be taken out of it again"
        )
    if model.training:
        raise ConfigError(f"{name} is in training mode, where dropout is random; call model.eval()")


def _masks_are_known(config: Any) -> bool:
    """Whether `_TreeMask` knows which tokens each layer may see.

    Not so for attention in chunks, nor for models (GPT-Neo) that window their attention by the
    order of the cache whatever mask they are given.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds <= {"full_attention", "sliding_attention"} and not hasattr(config, "window_size")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without progress bars, which callers show, and remarks on weights, which are checked here."""
    shown, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shown:
            hf_logging.enable_progress_bar()


def _load_model(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, auto_class: Any) -> Any:
    directory = checkpoint.directory
    named = {"dtype": dtype, "trust_remote_code": False}
    with _quietly():
        with torch.device("meta"), no_init_weights():
            _check_size(checkpoint, auto_class.from_config(config, **named))
        model, info = auto_class.from_pretrained(
            directory,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **named,
        )
    missing = sorted(str(key) for key in info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelLoadError(
            f"{directory} does not hold the model its config.json describes: "
            f"{', '.join(missing[:3])}{more} missing. Missing weights are never made up; get the "
            "whole checkpoint."
        )
    checkpoint.warn_of_unused(map(str, info["unexpected_keys"]))
    return model.eval()


def _check_size(checkpoint: Checkpoint, model: Any) -> None:
    """Refuse a model of more numbers than the weight files can hold.

    transformers makes up weights that are missing or of another shape before it says so.
    """
    size = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    # A bit is the least that a weight is stored in; masks and angles of positions are in no file.
    if size > max(8 * checkpoint.num_bytes, 1 << 26):
        raise ModelLoadError(
            f"{checkpoint.directory}: config.json describes {size:,} weights, and the files hold "
            f"{checkpoint.num_bytes:,} bytes. Correct config.json, or get the whole checkpoint"
        )


def _check_finite(directory: Path, model: Any) -> None:
    for name, weight in model.named_parameters():
        # One pass without a temporary; see foredraft.models.native.weights.
        if weight.is_floating_point() and not torch.isfinite(weight.sum(dtype=torch.float32)):
            raise ModelLoadError(
                f"{directory}: NaN or infinite weights in {name}; the file is damaged or was "
                "saved from a diverged run"
            )
