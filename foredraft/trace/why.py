"""From evidence to numbers that people can check: probabilities, noise, decisions, residual.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from foredraft.core.noise import gumbel_noise, gumbel_top
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.record import RowStep
from foredraft.core.rng import Purpose, keyed_uniform
from foredraft.core.sampling import Law
from foredraft.core.tree import ROOT
from foredraft.core.verify import Evidence, Verdict
from foredraft.trace import format as f
from foredraft.trace.texts import TokenTexts

_NUM_LIKELIEST = 6
_NUM_LOUDEST = 3
"""Number of runners-up: tokens with the largest sum of log probability and noise."""
_NUM_RESIDUAL = 6


class _Probs:
    """Probabilities of tokens at a node: by its law, and by the model at temperature 1."""

    def __init__(self, law: Law) -> None:
        self.law, self._target_V = law, law.probs_V
        self._model_V = law.logits_V.softmax(0)

    def target(self, token: int) -> float:
        return _rounded(float(self._target_V[token]))

    def model(self, token: int) -> float:
        return _rounded(float(self._model_V[token]))


def _rounded(x: float) -> float:
    """Rounded to six digits, to keep lines short."""
    return float(f"{x:.6g}")


def why(row: RowStep, texts: TokenTexts) -> tuple[f.Why | None, f.TracedDraft]:
    """The evidence for a row's verdict, and its draft with the target's probabilities."""
    verdict = row.verdict
    if verdict is None or verdict.evidence is None:
        return None, _draft(row.proposal, texts, {})
    evidence, proposal = verdict.evidence, verdict.evidence.proposal
    laws = {node: _Probs(law) for node, law in _laws(proposal, verdict, evidence)}
    scale = laws[ROOT].law.scale if ROOT in laws else None
    rule = "target-only"
    if isinstance(proposal, DrawnProposal):
        rule = "block" if proposal.tree.is_chain else "traversal"
    told = f.Why.model_construct(
        rule=rule,
        seed=evidence.seed,
        temperature=0.0 if scale is None else _rounded(1.0 / scale),
        laws=tuple(_node_law(n, probs, proposal, verdict, texts) for n, probs in laws.items()),
        decisions=tuple(_decisions(evidence)),
        residual=_residual(evidence.residual_V, verdict.next_token, texts),
    )
    return told, _draft(proposal, texts, laws)


def _laws(proposal: Proposal, verdict: Verdict, evidence: Evidence) -> Iterable[tuple[int, Law]]:
    """Distributions at nodes that have children, and at nodes that verification reached."""
    for node in sorted({ROOT, *proposal.tree.children, *verdict.path}):
        try:
            yield node, evidence.law(node)
        except Exception:  # no law there: where it matters, the verdict says so
            continue


def _node_law(
    node: int, probs: _Probs, proposal: Proposal, verdict: Verdict, texts: TokenTexts
) -> f.NodeLaw:
    tree, evidence, law = proposal.tree, verdict.evidence, probs.law
    assert evidence is not None
    taken = _taken(node, proposal, verdict)
    children = tree.children.get(node, ())
    tokens = {tree.tokens[child] for child in children} | ({taken} if taken is not None else set())
    likeliest = law.logits_V.topk(min(_NUM_LIKELIEST, law.logits_V.numel())).indices.tolist()
    noise: dict[int, float] = {}
    if law.scale is not None and not isinstance(proposal, DrawnProposal):
        position = evidence.position + (0 if node == ROOT else tree.depths[node])
        loudest = gumbel_top(law.logits_V, _NUM_LOUDEST, evidence.seed, position, law.scale)
        tokens |= {token for token, _ in loudest}
        wanted = [*(tokens | {*likeliest})]
        heard = gumbel_noise(wanted, evidence.seed, position)
        noise = dict(zip(wanted, map(_rounded, heard), strict=True))
    draft_V = None
    if isinstance(proposal, DrawnProposal) and children:
        draft_V = proposal.draft_probs_NV[children[0]]
        draft_V = draft_V / draft_V.sum()
        tokens |= {int(draft_V.argmax())}
    found = [
        f.Candidate.model_construct(
            token=token,
            text=texts.of(token),
            target_prob=probs.target(token),
            model_prob=probs.model(token),
            noise=noise.get(token),
            draft_prob=None if draft_V is None else _rounded(float(draft_V[token])),
        )
        for token in tokens | {*likeliest}
    ]
    found.sort(key=lambda c: (-c.model_prob, c.token))
    return f.NodeLaw.model_construct(node=node, taken=taken, candidates=tuple(found))


def _taken(node: int, proposal: Proposal, verdict: Verdict) -> int | None:
    """The token committed after a node; None if verification did not reach it."""
    reached = (ROOT, *verdict.path)
    if node not in reached:
        return None
    following = reached.index(node)
    if following < len(verdict.path):
        return proposal.tree.tokens[verdict.path[following]]
    return verdict.next_token


def _decisions(evidence: Evidence) -> Iterable[f.TracedDecision]:
    for made in evidence.decisions:
        uniform = keyed_uniform(evidence.seed, evidence.position, Purpose.ACCEPT, made.index)
        yield f.TracedDecision.model_construct(
            node=made.index - 1,
            probability=_rounded(made.probability),
            uniform=uniform,
            accepted=made.accepted,
        )


def _residual(
    weights_V: Tensor | None, drawn: int | None, texts: TokenTexts
) -> tuple[f.Residual, ...] | None:
    """The residual's likeliest tokens, and the one that was drawn."""
    if weights_V is None:
        return None
    total = float(weights_V.sum())
    tokens = weights_V.topk(min(_NUM_RESIDUAL, weights_V.numel())).indices.tolist()
    told = tokens if drawn is None else (*tokens, drawn)
    weights = {token: float(weights_V[token]) for token in told}
    return tuple(
        f.Residual.model_construct(token=token, text=texts.of(token), prob=_rounded(weight / total))
        for token, weight in weights.items()
        if weight > 0.0
    )


def _draft(proposal: Proposal, texts: TokenTexts, laws: dict[int, _Probs]) -> f.TracedDraft:
    tree = proposal.tree
    target_probs: tuple[float | None, ...] | None = None
    draft_probs: tuple[float, ...] | None = None
    if laws:
        target_probs = tuple(
            laws[parent].target(token) if parent in laws else None
            for token, parent in zip(tree.tokens, tree.parents, strict=True)
        )
    if isinstance(proposal, DrawnProposal) and len(proposal.draft_probs_NV):
        drawn_N = proposal.draft_probs_NV[range(len(tree)), tree.tokens]
        totals_N = proposal.draft_probs_NV.sum(1)
        draft_probs = tuple(map(_rounded, (drawn_N / totals_N).tolist()))
    return f.TracedDraft.model_construct(
        tokens=tree.tokens,
        parents=tree.parents,
        texts=tuple(map(texts.of, tree.tokens)),
        authors=proposal.authors,
        chances=None if proposal.chances is None else tuple(map(_rounded, proposal.chances)),
        draft_probs=draft_probs,
        target_probs=target_probs,
    )
