"""The audit of an `LLM`: its own drafter, its own parameters, on this machine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from foredraft.audit.faults import FAULTS, Fault, planted
from foredraft.audit.options import AuditOptions
from foredraft.audit.plain import Difference, Margins, PlainTarget, difference_of, shortened
from foredraft.audit.report import AuditReport, Finding, Level
from foredraft.audit.statistics import RARE, Drafted, LawTests, share_below, tail_bound
from foredraft.bench.prompts import encoded_prompts
from foredraft.cache.blocks import in_blocks
from foredraft.core.errors import CapabilityError, ConfigError, ForedraftError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import DrawnProposal
from foredraft.core.record import StepRecord
from foredraft.core.tree import ROOT
from foredraft.drafters import drafter_spec
from foredraft.drafters.base import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.request import GenerationResult
from foredraft.engine.scheduler import MAX_STEP_TOKENS
from foredraft.engine.slots import HEADROOM
from foredraft.llm import LLM
from foredraft.models.base import offered
from foredraft.models.files.progress import Progress, SilentProgress

_FEW_DRAFTED, _MOST_DRAFTED = 3, 16
"""Default nodes a step: few test each depth often, as longer drafts are mostly rejected; every
other group of replies has as many as the drafter makes, for mistakes that only depth shows."""
_TEXTS_AT_ONCE, _FEWEST_TEXTS = 16, 4
_FEW_ACCEPTED = 100
"""Accepted nodes, below which a mistake that needs one is easily missed."""
_BITS_TEXTS, _BITS_TOKENS = 6, 48
_NOISE_TEXTS, _NOISE_TOKENS, _MOST_NOISE_TEXTS = 6, 32, 36
_LOOKED_AT = 10_000
"""Tokens that an audit looks at, of which none may be called different for noise."""
_SHORT_PROMPTS = 0.4
"""Share of the prompts, the shortest ones, for texts that have to read theirs anew each time."""
_LONGER, _PREEMPTED_TEXTS = 32, 3
"""Tokens of a reply beyond those that the engine finds room for before it begins."""
_FAULT_TEXTS, _FAULT_TOKENS = (4, 4, 8, 16, 32, 64), 64
"""Texts of each look for a planted fault; it ends when one has found it."""
_PARAMETER_TEXTS, _PARAMETER_TOKENS = 3, 32
_TINY_CHUNK = 16
_MORE = "give it a longer --time-limit, or a larger --detect"
_SEED_STEP = 1_000_003
"""Between the seeds of two texts."""

Ids = Sequence[int]
Texts = list[tuple[int, ...]]


@dataclass
class Seen:
    """The draft at each token of each request, collected from the trace.

    Attributes:
        drafted: by request and position in its whole text.
        num_drafted, num_accepted: nodes.
        num_preempted: preempted requests.
    """

    drafted: dict[tuple[int, int], Drafted] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0

    def __call__(self, record: StepRecord) -> None:
        self.num_preempted += record.num_preempted
        for row in record.rows:
            if row.verdict is None:
                continue
            evidence, tree = row.verdict.evidence, row.proposal.tree
            proposal = evidence.proposal if evidence else row.proposal
            self.num_drafted += len(tree)
            self.num_accepted += row.num_accepted
            first = row.context + row.num_read
            for place, node in enumerate((ROOT, *row.verdict.path)[: len(row.committed)]):
                if node in tree.children:
                    child = tree.children[node][0]
                    likely = None
                    if isinstance(proposal, DrawnProposal):
                        probs_V = proposal.draft_probs_NV[child].double().numpy()
                        probs_V = probs_V / probs_V.sum()
                        tokens = np.flatnonzero(probs_V > RARE)
                        likely = tokens, probs_V[tokens]
                    key = row.request_id, first + place
                    self.drafted[key] = Drafted(tree.tokens[child], likely)

    @property
    def acceptance(self) -> float:
        """Share of the drafted nodes that were committed."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


class AuditedReply(NamedTuple):
    """A finished request."""

    prompt: tuple[int, ...]
    result: GenerationResult


class OwnAudit:
    """See the module docstring. It has the engine to itself.

    Args:
        llm: loaded with the drafter that is audited.
        params: of the requests. Their length is that of the replies, and the seed, or 0, is that
            of all that is drawn; how many replies there are to a prompt is the audit's own.
        drafter: one of your own instead of the one that ``llm`` names.

    Raises:
        ConfigError: nothing drafts, or no prompt fits.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        options: AuditOptions | None = None,
        progress: Progress | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.llm, self.options = llm, options or AuditOptions()
        self.seed, self.tokens = params.seed or 0, params.max_tokens
        self.params = replace(params, seed=None, n=1, logprobs=None, prompt_logprobs=None)
        self._progress, self._drafter = progress or SilentProgress(), drafter
        self._ends_at = time.monotonic() + self.options.time_limit
        if drafter is None and llm.drafter_name == "none":
            raise ConfigError("nothing drafts here, so there is nothing to audit; name a --drafter")
        self.drafter_name = llm.drafter_name if drafter is None else type(drafter).__name__
        self._drafted_by: set[str] = set()
        room = llm.target.max_context - self.tokens
        found = encoded_prompts(llm, self.options.prompts)
        self.prompts = [tuple(ids) for _, ids in found if len(ids) < room]
        if llm.tokenizer is None:  # ids of a small vocabulary
            vocab = llm.target.vocab_size
            self.prompts = [tuple(token % vocab for token in ids) for ids in self.prompts]
        if not self.prompts:
            raise ConfigError(f"no prompt leaves room for {self.tokens} tokens")
        self.short_prompts = sorted(self.prompts, key=len)
        del self.short_prompts[max(2, round(_SHORT_PROMPTS * len(self.prompts))) :]
        self.tolerance, self._plain = 0.0, PlainTarget(llm.target)

    def report(self) -> AuditReport:
        """Run all levels, and report their findings."""
        began, options = time.monotonic(), self.llm.options
        levels = self.run()
        params, drafted_by = self.params, sorted(self._drafted_by)
        if self._drafter is None and drafted_by:  # with auto several may draft
            self.drafter_name = " and ".join(drafted_by)
        coupling = f", coupling {params.coupling}" if params.coupling != "seeded" else ""
        return AuditReport(
            subject=f"{options.model} at temperature {params.temperature:g}{coupling} with drafter "
            f"{self.drafter_name}",
            levels=levels,
            settings={
                "model": options.model,
                "drafter": self.drafter_name,
                "num_draft_tokens": self._num_drafts,
                "params": {**asdict(params), "seed": self.seed, "max_tokens": self.tokens},
                "audit": asdict(self.options),
                "prompts_sha256": _sha256(self.prompts),
            },
            decisive=("margins" if self._is_keyed else "law", "planted faults"),
            seconds=time.monotonic() - began,
            seed=self.seed,
        )

    def run(self) -> list[Level]:
        try:
            levels = [self.bits(), *self.margins_and_law(), self.parameters()]
            if self.options.plant_faults:
                levels.append(self.planted_faults())
        finally:
            self._plain.close()
        return levels

    # ------------------------------------------------------------------------------------- bits

    def bits(self) -> Level:
        """The same requests in every way that must not matter."""
        if self.params.coupling == "drawn" and self.params.temperature > 0.0:
            said = "with the coupling drawn, texts are not to be the same bit for bit"
            return Level("bits", Finding.NOT_ASKED, said)
        prompts = self.prompts[:_BITS_TEXTS]
        self._progress.stage("Comparing bits")
        ways, compared = list[str](), 0
        evidence: list[dict[str, Any]] = []
        notes: list[str] = []
        for name, texts, plain in self._ways(prompts, notes):
            ways.append(name)
            compared += sum(map(len, plain))
            pairs = enumerate(zip(plain, texts, strict=True))
            found = [_first_difference(name, index, due, served) for index, (due, served) in pairs]
            evidence += filter(None, found)
            self._progress.advance(len(ways) / 7)
        figures = {"ways": ways, "tokens_compared": compared, "texts_differing": len(evidence)}
        if not evidence:
            distinct = compared // len(ways)  # the ways write the same texts
            said = (
                f"{distinct} tokens in each of {len(ways)} ways, none differs: "
                f"fewer than {share_below(distinct, 0.95):.1e} of all tokens do"
            )
            return Level("bits", Finding.SAME_BITS, "; ".join([said, *notes]), figures)
        said = f"{len(evidence)} texts differ from plain decoding, one at a time"
        if self.llm.is_exact:
            return Level("bits", Finding.DIFFERENT, said, figures, evidence)
        said += "; bits are not promised here, so the margins decide"
        return Level("bits", Finding.NEAR_TIES, said, figures, evidence)

    def _ways(self, prompts: Sequence[Ids], notes: list[str]) -> Iterator[tuple[str, Texts, Texts]]:
        """Name of each way, its texts, and those of plain decoding, one at a time."""
        params = self.params.of_length(min(_BITS_TOKENS, self.tokens))
        plain, drafted = self._view(None), self._view(self._num_drafts)
        as_asked = self._view(self.llm.options.num_draft_tokens or -1, prefix_caching=True)
        due = self._one_by_one(plain, prompts, params)
        yield "plain, together", self._texts(plain, prompts, params), due
        yield "drafted, together", self._texts(drafted, prompts, params), due
        yield "drafted, one at a time", self._one_by_one(drafted, prompts, params), due
        for prefixes in ("kept", "found"):
            texts = self._texts(as_asked, prompts, params)
            yield f"drafted as asked for, prefixes {prefixes}", texts, due
        if not self.llm.target.capabilities.low_bit or self._drafter is not None:
            notes.append("chunks and preemption were not tried: this target has no cache apart")
            return
        try:
            chunked, _ = self._apart(prompts, params.max_tokens, _TINY_CHUNK)
            yield "drafted, in chunks", self._texts(chunked, prompts, params), due
            # The engine reserves room for the beginning of a reply, so only longer replies can
            # preempt each other.
            params = replace(params.of_length(HEADROOM + _LONGER), ignore_eos=True)
            prompts = self.short_prompts[:_PREEMPTED_TEXTS]
            small, seen = self._apart(prompts, HEADROOM, MAX_STEP_TOKENS)
            due = self._one_by_one(plain, prompts, params)
            yield "drafted, preempted", self._texts(small, prompts, params), due
        except (CapabilityError, ConfigError) as error:
            notes.append(f"chunks and preemption were not tried: {error}")
            return
        if not seen.num_preempted:
            notes.append("nothing was preempted")

    def _apart(self, prompts: Sequence[Ids], tokens: int, max_step_tokens: int) -> tuple[LLM, Seen]:
        """On a separate cache that has room for only so many tokens after each prompt."""
        needed = sum(in_blocks(len(prompt) + tokens) for prompt in prompts)
        target = offered(self.llm.target.capabilities.apart).apart(needed)
        options = self._load_options(self._num_drafts)
        options, seen = replace(options, max_step_tokens=max_step_tokens), Seen()
        llm = LLM(target, self.llm.tokenizer, options, plan=self.llm.plan, cost=None, trace=seen)
        return llm, seen

    # ---------------------------------------------------------------------------- margins and law

    def margins_and_law(self) -> tuple[Level, Level]:
        """Replies with drafts, each token against its plain law."""
        self._progress.stage("Measuring noise")
        self.tolerance = self._measured_tolerance()
        self._progress.stage("Looking at drafted replies")
        seen, margins, law = Seen(), Margins(self.tolerance), LawTests(self.seed)
        prefixes = self.llm.options.prefix_caching
        views = [self._view(number, seen, prefixes) for number in self._depths]
        num_texts, share, turns = 0, 0.0, 0
        while True:
            number = _TEXTS_AT_ONCE // len(self._depths)
            if num_texts >= self.options.texts and share > 0.0:  # no more than are missing
                number = min(number, max(_FEWEST_TEXTS, ceil(num_texts / share) - num_texts))
            replies = self._replies(views[0], num_texts, number, self.tokens)
            views.append(views.pop(0))
            turns += 1
            for reply in replies:
                self.look_at(reply, self.params, margins, law, seen)
            num_texts += len(replies)
            share = self._share_done(margins, law)
            self._progress.advance(min(share, num_texts / self.options.texts))
            is_enough = share >= 1.0 and num_texts >= self.options.texts and turns >= len(views)
            if is_enough or margins.structural or self._is_late(0.55):
                break
        figures = {
            "texts": num_texts,
            "drafted": seen.num_drafted,
            "acceptance": round(seen.acceptance, 4),
        }
        return self._margin_level(margins, figures, seen), self._law_level(law, figures)

    def _share_done(self, margins: Margins, law: LawTests) -> float:
        """Share of the requested power that the replies so far give."""
        options = self.options
        if self._is_keyed:
            below = share_below(margins.tokens, options.power)
            return options.detect / 10.0 / below
        found = law.detectable(options.alpha / 2, options.power)
        return (options.detect / found) ** 2

    @property
    def _is_keyed(self) -> bool:
        """Whether it is known for each token which one plain decoding draws."""
        return self.params.coupling == "seeded" or self.params.temperature == 0.0

    def _measured_tolerance(self) -> float:
        """The margin, in nats of the law, that noise passes with probability ``alpha`` or less.

        That is for all tokens together. Where bits are promised and the first texts have no noise,
        there is none.
        """
        view, noise = self._view(None), list[float]()
        for first in range(0, _MOST_NOISE_TEXTS, _NOISE_TEXTS):
            for each in self._replies(view, first, _NOISE_TEXTS, _NOISE_TOKENS):
                with self.llm.engine.lock:
                    noise += self._plain.noise(each.prompt, each.result.token_ids)
            if (self.llm.is_exact and not any(noise)) or self._is_late(0.1):
                break
        return tail_bound(noise, _LOOKED_AT, self.options.alpha) / (self.params.temperature or 1.0)

    def look_at(
        self,
        reply: AuditedReply,
        params: SamplingParams,
        margins: Margins,
        law: LawTests,
        seen: Seen,
    ) -> None:
        """Score a reply again, add the results, and forget its drafts."""
        result, num_prompt = reply.result, len(reply.prompt)
        params = replace(params, seed=result.seed)
        sha, is_greedy = _sha256(reply.prompt), params.temperature == 0.0
        context = hash((reply.prompt, None if is_greedy else result.seed))
        (request,) = self.llm.engine.prepare(reply.prompt, params)
        law.begin()
        with self.llm.engine.lock:
            for at in self._plain.scored(request.rules, reply.prompt, result.token_ids):
                different = difference_of(at, params, result.seed, num_prompt)
                where = result.request_id, at.index, at.token
                margins.add(different and Difference(*where, *different, sha), context)
                context = hash((context, at.token))
                drafted = seen.drafted.pop((result.request_id, num_prompt + at.index), None)
                if at.law.scale is not None:
                    # Drafts of seeded requests are chosen with the noise of the draw itself.
                    known = None if self._is_keyed else drafted
                    last = (reply.prompt[-1], *result.token_ids)[at.index]
                    law.add(at.law.probs_V.numpy(), at.token, known, last)

    def _margin_level(self, margins: Margins, figures: Mapping[str, Any], seen: Seen) -> Level:
        options = self.options
        below = share_below(margins.tokens, options.power)
        figures = {**figures, **margins.figures}
        evidence = [asdict(each) for each in margins.examples]
        if margins.structural:
            said = (
                f"{margins.structural} of {margins.tokens} tokens are not those of plain decoding"
            )
            return Level("margins", Finding.DIFFERENT, said, figures, evidence)
        if not seen.num_drafted:
            said = "nothing was drafted, so nothing was looked at: name another --drafter"
            return Level("margins", Finding.INCONCLUSIVE, said, figures)
        few = ""
        if seen.num_accepted < _FEW_ACCEPTED:
            few = (
                f"; only {seen.num_accepted} drafted tokens were accepted, and a mistake that "
                "needs them hardly shows: try another --drafter"
            )
        if not self._is_keyed:
            said = f"each of {margins.tokens} tokens is possible by its plain law{few}"
            return Level("margins", Finding.SAME_BITS, said, figures)
        said = (
            f"each of {margins.tokens} tokens is the one that plain decoding draws: "
            f"a share of {below:.1e} that is not would have been seen{few}"
        )
        if margins.near_ties:
            said = f"{margins.near_ties} of {margins.tokens} tokens differ, all {margins.reach}"
        verdict = margins.finding
        if below > options.detect:
            verdict = Finding.INCONCLUSIVE
            said += f"; {options.detect:.1e} was asked for: {_MORE}"
        return Level("margins", verdict, said, figures, evidence)

    def _law_level(self, law: LawTests, figures: Mapping[str, Any]) -> Level:
        if self.params.temperature == 0.0:
            return Level("law", Finding.NOT_ASKED, "at temperature 0 nothing is drawn")
        options, p_values = self.options, law.p_values()
        found = law.detectable(options.alpha / 2, options.power)
        figures = {
            **figures,
            "tokens": law.count,
            "p_values": p_values,
            "shift": law.drafted.shift,
            "detectable_shift": found,
            "impossible_tokens": law.impossible,
        }
        if law.rejects(options.alpha / 2):  # the other half is for all parameters together
            name = min(p_values, key=p_values.__getitem__)
            said = f"{name}: p = {p_values[name]:.1e} over {law.count} tokens"
            return Level("law", Finding.DIFFERENT, said, figures)
        said = f"{law.count} tokens fit their laws; a shift of {found:.1%} would have been seen"
        if found > options.detect and not self._is_keyed:
            said += f", and {options.detect:.1%} was asked for: {_MORE}"
            return Level("law", Finding.INCONCLUSIVE, said, figures)
        if self._is_keyed:
            said += " by these tests alone; the margins see each token"
        return Level("law", Finding.SAME_LAW, said, figures)

    # --------------------------------------------------------------------------------- parameters

    def parameters(self) -> Level:
        """Each sampling parameter once, with drafts: every token by the plain law."""
        self._progress.stage("Trying every sampling parameter")
        seen, rows = Seen(), list[dict[str, Any]]()
        view = self._view(self._num_drafts, seen)
        settings = parameter_settings(self.llm)
        evidence: list[Mapping[str, Any]] = []
        law, temperature = LawTests(self.seed), self.params.temperature or 0.8
        base = SamplingParams(temperature=temperature, coupling=self.params.coupling)
        for number, (name, changed) in enumerate(settings.items()):
            params, margins = replace(base, **changed), Margins(self.tolerance)
            texts, tokens, prompts = _PARAMETER_TEXTS, _PARAMETER_TOKENS, self.short_prompts
            first = number * texts  # no two settings may draw with the same noise
            try:
                for reply in self._replies(view, first, texts, tokens, params, prompts):
                    self.look_at(reply, params, margins, law, seen)
            except ForedraftError as error:  # such as a reply that breaks its grammar
                margins.structural += 1
                evidence.append({"parameter": name, "error": str(error)})
            rows.append({"parameter": name, **margins.figures})
            evidence += [{"parameter": name, **asdict(each)} for each in margins.examples]
            self._progress.advance((number + 1) / len(settings))
        wrong = [str(row["parameter"]) for row in rows if row["structural"]]
        if law.rejects(self.options.alpha / 2):
            wrong.append("all of them together")
        figures = {"settings": rows, "drafted": seen.num_drafted, "p_values": law.p_values()}
        if wrong:
            said = f"tokens differ with {', '.join(dict.fromkeys(wrong))}"
            return Level("parameters", Finding.DIFFERENT, said, figures, evidence)
        ties = any(row["near_ties"] for row in rows)
        said = f"{len(settings)} settings, {sum(row['tokens'] for row in rows)} tokens, each as due"
        return Level("parameters", Finding.NEAR_TIES if ties else Finding.SAME_BITS, said, figures)

    # ------------------------------------------------------------------------------------- faults

    def planted_faults(self) -> Level:
        """The same tests with known mistakes: would they have been found?"""
        is_greedy = self.params.temperature == 0.0
        faults = [fault for fault in FAULTS if not (is_greedy and fault.needs_draws)]
        rows = []
        for number, fault in enumerate(faults):
            self._progress.stage(f"Planting a fault: {fault.name}")
            self._progress.advance(number / len(faults))
            rows.append(self.plant(fault))
        found = sum(row["found_by"] is not None for row in rows)
        said = f"{found} of {len(rows)} planted faults were found"
        missed = [str(row["fault"]) for row in rows if row["found_by"] is None]
        if missed:
            said += (
                f"; not found: {', '.join(missed)}; so few drafts may be accepted or refused here "
                "that the mistake hardly shows: try another --drafter or --temperature"
            )
        verdict = Finding.INCONCLUSIVE if missed else Finding.ALL_FOUND
        return Level("planted faults", verdict, said, {"faults": rows, "found": found})

    def plant(self, fault: Fault) -> dict[str, Any]:
        """Look for one fault, at a few growing sizes, each with its part of alpha."""
        options, seen = self.options, Seen()
        margins, law = Margins(self.tolerance), LawTests(self.seed)
        view = self._view(self._num_drafts, seen)
        found_by = None
        first, most = 0, min(_FAULT_TOKENS, self.tokens)
        for number in _FAULT_TEXTS:
            with planted(fault, view.policy, self.llm.target.cache):
                replies = self._replies(view, first, number, most, prompts=self.short_prompts)
            first += number
            for reply in replies:
                self.look_at(reply, self.params, margins, law, seen)
            if margins.structural:
                found_by = "margins"
            elif law.rejects(options.alpha / len(_FAULT_TEXTS)):
                p_values = law.p_values()
                found_by = f"law: {min(p_values, key=p_values.__getitem__)}"
            if found_by or self._is_late(1.0):
                break
        return {
            "fault": fault.name,
            "said": fault.said,
            "found_by": found_by,
            "tokens": margins.tokens,
            "acceptance": round(seen.acceptance, 4),
        }

    # ------------------------------------------------------------------------------------ running

    @property
    def _num_drafts(self) -> int:
        """Nodes a step: a fixed number, so that much is verified whether it pays here or not."""
        asked = self.llm.options.num_draft_tokens
        if asked:
            return asked
        return min(_FEW_DRAFTED, self._most_drafts)

    @property
    def _most_drafts(self) -> int:
        if self._drafter is not None:
            return _MOST_DRAFTED
        return drafter_spec(self.llm.drafter_name).num_draft_tokens

    @property
    def _depths(self) -> list[int]:
        """Nodes a step of the replies that are scored, in turns."""
        asked = self.llm.options.num_draft_tokens
        return [asked] if asked else sorted({self._num_drafts, self._most_drafts})

    def _load_options(self, drafts: int | None, prefix_caching: bool = False) -> Any:
        """Options of a view: no drafts for None, as many as pay for -1."""
        options = self.llm.options
        if drafts is None:
            return replace(
                options,
                drafter="none",
                draft_model=None,
                drafter_options={},
                num_draft_tokens=None,
                prefix_caching=False,
            )
        number = None if drafts < 0 else drafts
        return replace(options, num_draft_tokens=number, prefix_caching=prefix_caching)

    def _view(
        self, drafts: int | None, seen: Seen | None = None, prefix_caching: bool = False
    ) -> LLM:
        drafter = self._drafter if drafts is not None else None
        options, llm = self._load_options(drafts, prefix_caching), copy(self.llm)
        if drafts is not None and drafts > 0:
            llm.cost = None  # drafters leave out what does not pay: they are not to know
        keeps_evidence = seen is not None  # the distributions that drafts were drawn from
        return llm.with_drafter(options, trace=seen, drafter=drafter, keeps_evidence=keeps_evidence)

    def _replies(
        self,
        view: LLM,
        first: int,
        number: int,
        max_tokens: int,
        params: SamplingParams | None = None,
        prompts: Sequence[tuple[int, ...]] = (),
    ) -> list[AuditedReply]:
        """Replies number ``first`` and following, each with a seed of its own.

        A greedy reply does not depend on its seed: where a prompt comes again, it lacks more of its
        beginning.

        Args:
            prompts: that are taken in turns; all of them where none is given.
        """
        prompts, params = prompts or self.prompts, (params or self.params).of_length(max_tokens)
        turns = [divmod(index, len(prompts)) for index in range(first, first + number)]
        is_greedy = params.temperature == 0.0
        prompts = [shortened(prompts[at], turn if is_greedy else 0) for turn, at in turns]
        results = self._run(view, prompts, params, first)
        self._drafted_by |= {name for each in results for name in each.stats.drafters} - {"rules"}
        return [AuditedReply(tuple(p), result) for p, result in zip(prompts, results, strict=True)]

    def _one_by_one(self, view: LLM, prompts: Sequence[Ids], params: SamplingParams) -> Texts:
        return [
            text
            for index, prompt in enumerate(prompts)
            for text in self._texts(view, [prompt], params, index)
        ]

    def _texts(
        self, view: LLM, prompts: Sequence[Ids], params: SamplingParams, first: int = 0
    ) -> Texts:
        return [result.token_ids for result in self._run(view, prompts, params, first)]

    def _run(
        self, view: LLM, prompts: Sequence[Ids], params: SamplingParams, first: int
    ) -> list[GenerationResult]:
        engine: Engine = view.engine
        for index, prompt in enumerate(prompts, first):
            seed = (self.seed + index * _SEED_STEP) % 2**64
            engine.submit(prompt, replace(params, seed=seed), policy=view.policy)
        results = [event.result for event in engine.run() if event.result is not None]
        for result in results:
            if result.error is not None:
                raise ForedraftError(f"a request failed: {result.error}")
        return sorted(results, key=lambda result: result.request_id)

    def _is_late(self, share: float) -> bool:
        """Whether this share of the time limit is over."""
        left = self._ends_at - time.monotonic()
        return left <= (1.0 - share) * self.options.time_limit


def _sha256(ids: object) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def _first_difference(
    way: str, text: int, due: Sequence[int], served: Sequence[int]
) -> dict[str, Any] | None:
    if due == served:
        return None
    pairs = zip(due, served, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(due), len(served)))
    return {
        "way": way,
        "text": text,
        "position": place,
        "due": [*due[place : place + 3]],
        "served": [*served[place : place + 3]],
    }


def parameter_settings(llm: LLM) -> dict[str, dict[str, Any]]:
    """Every sampling parameter that affects the distribution, each by itself."""
    vocab = llm.target.vocab_size
    some = [*range(0, vocab, max(1, vocab // 2000))]
    end = vocab // 2  # ends a reply as soon as it may
    settings: dict[str, dict[str, Any]] = {
        "temperature 0": {"temperature": 0.0},
        "temperature 1.3": {"temperature": 1.3},
        "top_k": {"top_k": min(20, max(1, vocab - 1))},
        "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.05},
        "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "presence_penalty": {"presence_penalty": 0.7},
        "frequency_penalty": {"frequency_penalty": 0.7},
        "logit_bias": {"logit_bias": dict.fromkeys(some[:50], 3.0)},
        "allowed_token_ids": {"allowed_token_ids": some},
        "top_p, penalties": {"top_p": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        "min_tokens": {"min_tokens": 20, "stop_token_ids": [end], "logit_bias": {end: 60.0}},
    }
    if llm.tokenizer is not None:
        settings["bad_words"] = {"bad_words": ["the", "and", "is"]}
        settings["grammar"] = {"grammar": Grammar.regex("[a-z]{2,9}( [a-z]{2,9}){40,80}")}
    return settings
