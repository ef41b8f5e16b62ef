"""The part of a drawn proposal that the target has laws for.

The rules for drawn proposals look at every node, also at those they then reject. A node without a
law (NaN logits, a grammar's error) must not cost the row anything unless it is reached. So the
draft is taken to end there: whether a token hangs below a node then depends on the tokens up to
that node alone, never on itself, and the law of the output stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foredraft.core.proposal import DrawnProposal
from foredraft.core.sampling import Law, NodeLaws
from foredraft.core.tree import ROOT
from foredraft.core.verify.verdict import Verdict


@dataclass(frozen=True)
class SoundPart:
    """A proposal cut off below the nodes without a law.

    Attributes:
        proposal: what is left.
        laws: of its nodes. Leaves without one of their own have their parent's in its place: a
            leaf's law is asked for the token after it alone, which `in_whole` then takes back.
        nodes: for each node that is left its number in the whole proposal.
        errors: why nodes have no law, by number in the whole proposal.
    """

    proposal: DrawnProposal
    laws: Mapping[int, Law]
    nodes: tuple[int, ...]
    errors: Mapping[int, Exception]

    def in_whole(self, verdict: Verdict) -> Verdict:
        """A verdict about this part as one about the whole proposal."""
        path = tuple(self.nodes[node] for node in verdict.path)
        if path and path[-1] in self.errors:
            return Verdict.failed(path, self.errors[path[-1]])
        return Verdict(path, verdict.next_token, verdict.kind)


def sound_part(proposal: DrawnProposal, laws: NodeLaws) -> SoundPart:
    """See `SoundPart`; laws are looked up for every node above which all have one."""
    tree = proposal.tree
    found: dict[int, Law] = {}
    errors: dict[int, Exception] = {}
    for node in (ROOT, *range(len(tree))):
        parent = ROOT if node == ROOT else tree.parents[node]
        if node == ROOT or parent in found:
            try:
                found[node] = laws[node]
            except Exception as error:  # said when the node is reached
                errors[node] = error
    kept = tuple(n for n in range(len(tree)) if tree.parents[n] in found)
    if len(kept) < len(tree):
        proposal = proposal.restricted_to(kept)
    stand_ins = {n: found[tree.parents[n]] for n in kept if n in errors}
    by_new = {new: {**found, **stand_ins}[old] for new, old in enumerate(kept)}
    if ROOT in found:
        by_new[ROOT] = found[ROOT]
    return SoundPart(proposal, by_new, kept, errors)
