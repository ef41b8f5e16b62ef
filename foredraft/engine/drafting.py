"""All that happens between a request, its controller and its drafter.

``request.drafter`` alone names the drafter of a request. It is set in this file only: when the
request is given its slot, when its controller names another drafter, and when a drafter fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from foredraft.control.base import Allowance
from foredraft.core.errors import ForedraftError
from foredraft.core.proposal import NO_PROPOSAL, DrawnProposal, Proposal
from foredraft.core.record import StepRecord
from foredraft.core.tree import ROOT, TokenTree
from foredraft.engine.guard import LoadedDrafter, guarded
from foredraft.engine.policy import Policy, Trace
from foredraft.engine.request import Request
from foredraft.engine.turn import Turn
from foredraft.models.base import Scores

_log = logging.getLogger("foredraft")
_MOST_NOT_READY = 8
"""Steps in a row in which a drafter may say that it cannot draft for a request yet."""


# ---- a request comes, changes its drafter, and goes ----------------------------------------------


def begin(request: Request, others: Sequence[Request]) -> None:
    """Attach a drafter to a request that has its slot: the one it names, or its controller's.

    A drafter with cache layers of its own may lack entries that the target's cache holds: see
    `LoadedDrafter.can_follow`.

    Args:
        others: the requests in the batch, and those about to begin.
    """
    policy, named = request.policy, request.params.speculation
    name = guarded(
        lambda: _known(policy, policy.controller.begin(request, others)),
        None,
        "the controller failed to begin a request",
    )
    if named in policy.drafters:
        name = named
    if name is None:
        return
    loaded = policy.drafters[name]
    if loaded.can_follow(request.slot, request.num_cached):
        _follow(request, loaded, request.num_cached)


def end(request: Request) -> None:
    """Detach the request's drafter: the request is over, or is preempted."""
    if request.drafter is not None:
        _loaded(request).end(request.request_id)
        request.drafter = None


def _move(request: Request, name: str | None) -> None:
    """Replace the request's drafter; without a name it decodes plainly."""
    end(request)
    if name is None:
        return
    loaded = request.policy.drafters[name]
    if loaded.traits.joins_late:
        # The last token is pending: it comes with an observation like all later ones.
        _follow(request, loaded, len(request.tokens) - 1)


def _follow(request: Request, loaded: LoadedDrafter, num_known: int) -> None:
    if loaded.traits.name in request.excluded_drafters:
        return
    request.num_not_ready = 0
    with loaded.timed("begin_ms"):
        request.drafter = loaded.traits.name  # while it begins: an interrupted one is ended
        if not loaded.begin(request.draft_row(num_cached=num_known)):
            _lose(request)


def _lose(request: Request) -> None:
    """Detach a drafter that has failed for the request and forgotten it; it does not come back."""
    if request.drafter is not None:
        request.excluded_drafters.add(request.drafter)
        request.drafter = None


def _wait(request: Request) -> None:
    """Count a step in which the request's drafter could not draft yet; detach it after a few.

    Some never can, such as a model whose context the text has outgrown. Nodes planned for them are
    lost to other drafters and rows.
    """
    request.num_not_ready += 1
    if request.drafter is not None and request.num_not_ready >= _MOST_NOT_READY:
        number, name = request.request_id, request.drafter
        _log.info("drafter %s cannot draft for request %d and leaves it", name, number)
        request.excluded_drafters.add(name)
        end(request)


# ---- what a step does, in this order -------------------------------------------------------------


def allow(batch: Sequence[Turn]) -> None:
    """Ask controllers for each row's drafter and budget; find the tokens that rules force."""
    able = [turn for turn in batch if turn.reads_all and turn.may_draft]
    for turn in able:
        turn.request.room = _room(turn.request)
    by_policy = _by_policy(able)
    for policy, turns in by_policy.items():
        rows = [turn.request for turn in turns]
        others = [turn.request for turn in able if turn.request.policy is not policy]
        for turn, allowance in zip(turns, _allowed(policy, rows, others), strict=True):
            _take(turn, allowance)


def read(batch: Sequence[Turn], most_tokens: int) -> None:
    """Let drafters with a model of their own prefill. A row with tokens left drafts nothing yet.

    They read prompts along with the target, and the unread text of rows that may draft.

    Args:
        most_tokens: the most tokens that all drafters read together, as other rows wait for them.
    """
    reading = _by_drafter(
        batch, lambda turn, loaded: loaded.traits.reads and bool(turn.budget or not turn.reads_all)
    )
    for loaded, turns in reading.items():
        rows = [turn.request.draft_row() for turn in turns]
        with loaded.timed("read_ms"):
            unread = loaded.read(rows, max(1, most_tokens // len(reading)))
        for turn in turns:
            if turn.request_id not in unread:
                _lose(turn.request)
            if unread.get(turn.request_id, 1):
                turn.draft_nothing("reading")


def propose(batch: Sequence[Turn]) -> None:
    """A proposal for each row, empty where there is none."""
    for turn in batch:
        if turn.forced:
            turn.proposal = Proposal.chosen(TokenTree.chain(turn.forced))
            turn.num_forced = len(turn.forced)
    for loaded, turns in _by_drafter(batch, lambda turn, _: turn.budget > 0).items():
        with loaded.timed("draft_ms"):
            _ask(loaded, turns)


def taps(batch: Sequence[Turn]) -> Sequence[int]:
    """Layers whose outputs drafters want of this step.

    With steps that may draft, or always where a drafter keeps something for each token.
    """
    wanted = _by_drafter(batch, lambda turn, loaded: bool(turn.allowance.budget or loaded.layers))
    return sorted({tap for loaded in wanted for tap in loaded.taps})


def observe(batch: Sequence[Turn], scores: Scores) -> None:
    """Pass each row's step to the drafter that follows it."""
    numbers = {turn: number for number, turn in enumerate(batch)}
    for loaded, turns in _by_drafter(batch, lambda _, loaded: loaded.traits.learns).items():
        with loaded.timed("learn_ms"):
            failed = loaded.observe([turn.observation(scores, numbers[turn]) for turn in turns])
            for turn in turns if failed else ():
                if turn.request_id in failed:
                    _lose(turn.request)


def loaded_for(batch: Sequence[Turn]) -> list[LoadedDrafter]:
    """All drafters that may draft for these rows, whether they do now or not."""
    policies = {turn.request.policy: None for turn in batch}  # which may share some
    return [*dict.fromkeys(each for policy in policies for each in policy.drafters.values())]


def report(batch: Sequence[Turn], record: StepRecord) -> None:
    """Pass a step's record to controllers and to the traces of policies."""
    by_policy = _by_policy(batch)
    drafting_ms = sum(each.taken.draft_ms for each in loaded_for(batch))
    for policy in by_policy:
        # Only its own drafters' times: drafters of another policy may have their names.
        taken = {name: each.taken for name, each in policy.drafters.items()}
        others_ms = drafting_ms - sum(each.draft_ms for each in taken.values())
        draft_ms = max(0.0, record.times.draft_ms - others_ms)
        times = replace(record.times, draft_ms=draft_ms, drafters=taken)
        tell = partial(policy.controller.observe, replace(record, times=times))
        guarded(tell, None, "the controller failed to observe a step")
        own = record
        if len(by_policy) > 1:
            pairs = zip(batch, record.rows, strict=True)
            rows = tuple(row for turn, row in pairs if turn.request.policy is policy)
            own = replace(record, rows=rows)
        policy.trace = call_trace(policy.trace, own)


def forget(request: Request) -> None:
    """Let the controller forget a request that is over."""
    controller = request.policy.controller
    guarded(
        lambda: controller.end(request.request_id),
        None,
        "the controller failed to end a request",
    )


# ---- one row -------------------------------------------------------------------------------------


def _room(request: Request) -> int:
    if request.params.speculation == "off":
        return 0
    # The last token a step commits is the target's own, so one fewer can be drafted.
    limits = request.params.max_draft_tokens, request.policy.most_drafted
    given = [most for most in limits if most is not None]
    return max(0, min([request.num_remaining - 1, *given]))


def _take(turn: Turn, allowance: Allowance) -> None:
    """Apply a controller's allowance to a row, as far as there is room for it."""
    request = turn.request
    if allowance.drafter != request.drafter:
        _move(request, allowance.drafter)
    turn.drafter = request.drafter
    turn.plain_reason = _why_plain(request, allowance)
    allowed = max(0, min(allowance.budget, request.room))
    turn.forced = _forced(request, min(allowance.num_forced, request.room))
    if request.drafter and _is_asked(request, allowed, len(turn.forced)):
        turn.budget = allowed
    spare = max(0, min(allowance.spare, request.room - allowed))
    if (allowed, spare) != (allowance.budget, allowance.spare):
        allowance = replace(allowance, budget=allowed, spare=spare)
    turn.allowance = allowance


def _ask(loaded: LoadedDrafter, turns: Sequence[Turn]) -> None:
    """Let a drafter propose for its rows, or go on behind what is forced."""
    proposals: dict[int, Proposal] = {}
    rows = [turn.draft_row() for turn in turns if not _goes_on(turn)]
    if rows:
        proposals = loaded.propose(rows)
    for turn in turns:
        forced = turn.forced
        if goes_on := _goes_on(turn):
            proposal = loaded.propose_after(turn.draft_row(len(forced)), forced)
        else:
            proposal = proposals.get(turn.request_id)
        if proposal is None:
            _lose(turn.request)
            continue
        if not proposal.is_ready:
            turn.draft_nothing("reading" if loaded.traits.reads else "not ready")
            _wait(turn.request)
            continue
        turn.request.num_not_ready = 0
        if goes_on:
            tree = TokenTree.chain(forced).hang(proposal.tree, len(forced) - 1)
            turn.proposal = permitted(Proposal.chosen(tree), turn.request)
        elif len(proposal.tree):
            turn.proposal, turn.num_forced = permitted(proposal, turn.request), 0


def _loaded(request: Request) -> LoadedDrafter:
    """The request's drafter; it must have one."""
    assert request.drafter is not None
    return request.policy.drafters[request.drafter]


def _by_drafter(
    batch: Sequence[Turn], takes_part: Callable[[Turn, LoadedDrafter], bool]
) -> dict[LoadedDrafter, list[Turn]]:
    groups: dict[LoadedDrafter, list[Turn]] = {}
    for turn in batch:
        if turn.request.drafter is not None:
            loaded = _loaded(turn.request)
            if takes_part(turn, loaded):
                groups.setdefault(loaded, []).append(turn)
    return groups


def _why_plain(request: Request, allowance: Allowance) -> str:
    if request.params.speculation == "off" or request.params.max_draft_tokens == 0:
        return "plain decoding was asked for"
    if not request.room:
        return "no room for drafts"
    if not allowance.budget:
        return allowance.reason
    return "no drafter can join this text" if request.drafter is None else "nothing to propose"


def _is_asked(request: Request, allowed: int, num_forced: int) -> bool:
    """Whether the drafter is to draft, beside the tokens that the rules force.

    Where they force as much as the row may draft it has nothing to add. Behind several forced
    tokens only a drafter that can go on from a draft has anything to say.
    """
    if not num_forced:
        return allowed > 0
    return num_forced < allowed and (num_forced == 1 or _loaded(request).traits.continues)


def _goes_on(turn: Turn) -> bool:
    return bool(turn.forced) and _loaded(turn.request).traits.continues


def _allowed(
    policy: Policy, rows: Sequence[Request], others: Sequence[Request]
) -> Sequence[Allowance]:
    """See `Controller.allow`; if it fails, no nodes, and each row keeps its drafter."""

    def ask() -> Sequence[Allowance] | None:
        allowances = policy.controller.allow(rows, others)
        if len(allowances) != len(rows):
            raise ValueError(f"{len(allowances)} allowances for {len(rows)} rows")
        for allowance in allowances:
            _known(policy, allowance.drafter)
        return allowances

    allowances = guarded(ask, None, "the controller failed to allow anything")
    return [Allowance(row.drafter) for row in rows] if allowances is None else allowances


def _known(policy: Policy, name: str | None) -> str | None:
    if name is not None and name not in policy.drafters:
        raise ValueError(f"no drafter {name!r} is loaded, only {sorted(policy.drafters)}")
    return name


def call_trace(trace: Trace | None, record: StepRecord) -> Trace | None:
    """Call a trace with a step's record; returns it, or None if it failed: it is switched off."""
    if trace is None:
        return None
    return guarded(lambda: (trace(record), trace)[1], None, "the trace failed and is switched off")


def _by_policy(turns: Sequence[Turn]) -> dict[Policy, list[Turn]]:
    by_policy: dict[Policy, list[Turn]] = {}
    for turn in turns:
        by_policy.setdefault(turn.request.policy, []).append(turn)
    return by_policy


def _forced(request: Request, most: int) -> tuple[int, ...]:
    """The only tokens that can follow, by the request's rules and its committed text.

    Drafts that are drawn need this: it does not depend on any draft.
    """
    if most < 1 or not request.rules.bans:
        return ()
    try:
        return tuple(request.rules.forced(request.tokens)[:most])
    except ForedraftError as error:  # verification says so, too, if the text gets there
        _log.debug("nothing is forced for request %d: %s", request.request_id, error)
        return ()


def permitted(proposal: Proposal, request: Request) -> Proposal:
    """A chosen draft without the tokens that the request's rules do not permit.

    Drafters with a distribution have masked it already before they chose or drew; drafters that
    copy have none. Only chosen tokens are dropped: a drawn one that is taken away after it was
    seen would bias the text.
    """
    tree, rules = proposal.tree, request.rules
    if not rules.bans or isinstance(proposal, DrawnProposal) or not len(tree):
        return proposal
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    try:
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            before = paths.get(parent)
            if before is not None and rules.permits(token, request.tokens, before):
                paths[node] = (*before, token)
    except ForedraftError as error:  # likewise
        _log.debug("a draft for request %d is dropped: %s", request.request_id, error)
        return NO_PROPOSAL
    if len(paths) > len(tree):
        return proposal
    del paths[ROOT]
    return Proposal.chosen(tree.subset([*paths]))
