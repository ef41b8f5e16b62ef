"""Every sampling parameter beside every drafter, both couplings, chains and trees.

A parameter is honoured, or refused by name; there is no third way. Seeded requests write the text
of plain decoding with the same seed, with the same log probabilities. Requests whose drafts are
drawn have plain decoding's law, which is enumerated.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from foredraft.control.base import Allowance, Row
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.logprobs import TokenLogprobs
from foredraft.core.params import SamplingParams, ThinkingLimit
from foredraft.core.rules.book import NewRules, new_rules
from foredraft.drafters import drafter_names
from foredraft.drafters.base import Drafter
from foredraft.drafters.none import NoDrafter
from foredraft.engine.request import GenerationResult
from foredraft.models.base import Target
from foredraft.models.table import TableModel
from foredraft.models.text.grammars import Grammars
from foredraft.models.text.tokenizer import Tokenizer
from tests.conformance.harness import KINDS, WITH_HEADS, Kind, set_up, simplest_kind, spec_of
from tests.engine.helpers import engine_of

LETTERS = "abcdef"
END = len(LETTERS)
TABLE = TableModel.random(END + 1, seed=11, sharpness=1.5)
OTHER = TableModel.random(END + 1, seed=12, sharpness=1.5)
PROMPTS = ([0, 1, 2, 0, 1], [3], [5, 4, 3, 5, 4, 3, 5])
MAX_TOKENS = 14

CASES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "logit_bias": {"logit_bias": {1: 1.5, 4: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [0, 1, 2, 5]},
    "bad_words": {"bad_words": ["ab", "d", "cac"]},
    "grammar": {"grammar": Grammar.regex("((ab|cd)[ef]*)+")},
    "forced": {"grammar": Grammar.regex("(abcdef[ab]fedcba[cd]){2}"), "max_tokens": 24},
    "seed": {"seed": 2**64 - 1},
    "n": {"n": 3},
    "max_tokens": {"max_tokens": 5},
    "min_tokens": {"min_tokens": 6},
    "stop": {"stop": ["ca", "ff"]},
    "stop_token_ids": {"stop_token_ids": [3]},
    "include_stop": {"stop": ["ca", "b"], "stop_token_ids": [3], "include_stop": True},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "coupling": {"coupling": "drawn"},
    "prediction": {"prediction": "abcabcabc"},
    "speculation": {"speculation": "off"},
    "max_draft_tokens": {"max_draft_tokens": 1},
    "skip_special_tokens": {"skip_special_tokens": False},
    "thinking": {"thinking": ThinkingLimit(3, (), (5, 1))},
    "all at once": {
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "logit_bias": {0: 0.5},
        "allowed_token_ids": [0, 1, 2, 3, 4, END],
        "bad_words": ["ca"],
        "grammar": Grammar.regex("[abcde]{2,9}"),
        "min_tokens": 2,
        "stop": "bbb",
        "include_stop": True,
        "n": 2,
        "logprobs": 1,
        "prompt_logprobs": 0,
    },
}
"""One for each parameter, and one of all that can go together."""


@functools.cache
def letters() -> Tokenizer:
    """One letter a token, and an end."""
    fast = FastTokenizer(BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    fast.add_special_tokens([AddedToken("<end>", special=True)])
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    directory = Path(_scratch().name)
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return Tokenizer(directory)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="foredraft-parameters-")


def table_kind() -> Kind:
    def draft(context: tuple[int, ...]) -> list[float]:
        pairs = zip(TABLE.probs(context), OTHER.probs(context), strict=True)
        return [0.7 * p + 0.3 * q for p, q in pairs]

    return Kind(
        "table",
        lambda: TableModel(END + 1, TABLE.probs),
        lambda: TableModel(END + 1, draft),
        letters,
    )


@functools.cache
def kind_of(name: str) -> Kind:
    return table_kind() if name == "table" else KINDS[name]()


@functools.cache
def rules_for(kind: str) -> NewRules:
    codec, vocab_size = kind_of(kind).new_codec(), kind_of(kind).new_target().vocab_size
    assert isinstance(codec, Tokenizer)
    return functools.partial(
        new_rules,
        vocab_size=vocab_size,
        encode=functools.partial(codec.encode, add_special_tokens=False),
        new_matcher=Grammars(codec, vocab_size).new_matcher,
    )


class Forcing(FixedBudget):
    """Lets what rules force be drafted beyond the budget."""

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        allowances = super().allow(rows, others)
        return [
            replace(allowance, num_forced=row.room)
            for row, allowance in zip(rows, allowances, strict=True)
        ]


def generate(
    kind: str,
    target: Target,
    drafter: Drafter,
    params: SamplingParams,
    num_draft_tokens: int,
    budget: type[FixedBudget] = FixedBudget,
) -> list[GenerationResult]:
    codec = kind_of(kind).new_codec()
    assert isinstance(codec, Tokenizer)
    engine = engine_of(
        target,
        drafter,
        budget(num_draft_tokens),
        eos_token_ids=codec.eos_token_ids,
        new_decoder=codec.new_decoder,
        new_rules=rules_for(kind),
    )
    for prompt in PROMPTS:
        engine.submit(prompt, params)
    results = [event.result for event in engine.run() if event.result is not None]
    assert not engine._policy.num_faults, "the drafter failed"
    return sorted(results, key=lambda result: result.request_id)


def said(results: Sequence[GenerationResult]) -> list[tuple[Any, ...]]:
    """All that a user sees of results, but for the accounting."""
    return [
        (
            *(r.text, r.token_ids, r.finish_reason, r.seed, r.error),
            *(numbers(r.logprobs), numbers(r.prompt_logprobs)),
        )
        for r in results
    ]


def numbers(found: Sequence[TokenLogprobs | None] | None) -> Any:
    """Rounded: what torch scores together differs in the last bits (see exactness.md)."""
    if found is None:
        return None
    flat: list[tuple[int, float]] = []
    for entry in found:
        flat += [(entry.token, entry.logprob), *entry.top] if entry else [(-1, 0.0)]
    tokens = [token for token, _ in flat]
    return tokens, [logprob for _, logprob in flat]


def assert_same(left: Any, right: Any) -> None:
    """Equal, but for the last bits of numbers."""
    if isinstance(left, float):
        assert left == pytest.approx(right, abs=1e-4)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@functools.cache
def plain(kind: str, case: str, temperature: float) -> list[tuple[Any, ...]]:
    target = kind_of(kind).new_target()
    return said(generate(kind, target, NoDrafter(), params_of(case, temperature), 0))


def params_of(case: str, temperature: float, **more: Any) -> SamplingParams:
    shared = {"seed": 5, "max_tokens": MAX_TOKENS, "temperature": temperature}
    return SamplingParams(**shared | CASES[case] | more)


def test_every_parameter_has_a_case() -> None:
    assert {field.name for field in fields(SamplingParams)} == CASES.keys() - {
        "all at once",
        "forced",
    }


def pairs() -> Iterator[Any]:
    """All of them; on a real forward most are left to `make test-all`."""
    for name in (*drafter_names(), *WITH_HEADS):
        needs = set(spec_of(name).needs)
        on_tables = needs <= {"tree_attention", "taps"} and name not in WITH_HEADS
        for case in CASES:
            quick = on_tables or case == "all at once"
            yield pytest.param(name, case, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "case"), [*pairs()])
def test_the_text_is_that_of_plain_decoding(name: str, case: str) -> None:
    """Seeded requests, and drawn ones of drafters that draw nothing."""
    kind = simplest_kind(name)
    couplings = ["seeded"] + ["drawn"] * (name in CHOOSE_ALWAYS)
    for temperature in (0.0, 1.0):
        for coupling in couplings:
            setup = set_up(name, kind_of(kind))
            params = params_of(case, temperature, coupling=coupling)
            budget = spec_of(name).num_draft_tokens
            results = generate(kind, setup.target, setup.drafter, params, budget)
            assert_same(said(results), plain(kind, case, temperature))


@pytest.mark.parametrize("name", [*drafter_names(), *WITH_HEADS])
def test_forced_tokens_go_past_every_drafter(name: str) -> None:
    """It hears of steps in which it was not asked, between others in which it was."""
    kind = simplest_kind(name)
    for temperature in (0.0, 1.0):
        params = params_of("forced", temperature)
        setup = set_up(name, kind_of(kind))
        results = generate(kind, setup.target, setup.drafter, params, 3, Forcing)
        assert_same(said(results), plain(kind, "forced", temperature))
        assert sum(result.stats.accepted for result in results) > 12


CHOOSE_ALWAYS = ("ngram", "suffix", "token-recycling", "retrieval", "lookahead", "prediction")
"""They draw no tokens, so that a drawn request has the same text, too."""


def test_the_cases_do_something() -> None:
    """Each parameter changes a text, or what comes with it; else nothing above is tested."""
    texts = {case: [r[:3] for r in plain("table", case, 1.0)] for case in CASES}
    same = {case for case in CASES if texts[case] == texts["temperature"]} - {"temperature"}
    drafting = {"coupling", "prediction", "speculation", "max_draft_tokens"}
    assert same == {"logprobs", "prompt_logprobs", "skip_special_tokens"} | drafting
    told, of_prompt = (plain("table", case, 1.0)[0] for case in ("logprobs", "prompt_logprobs"))
    assert len(told[5][0]) == 3 * len(told[1])
    assert len(of_prompt[6][0]) == 2 * len(PROMPTS[0]) - 1


@pytest.mark.parametrize("name", ["ngram", "suffix", "draft-model", "lookahead"])
def test_drafts_are_accepted_under_rules(name: str) -> None:
    """Rules must not turn speculation into plain decoding by another name."""
    accepted = 0
    for case in ("logit_bias", "bad_words", "grammar"):
        setup = set_up(name, kind_of("table"))
        params = params_of(case, 0.0, max_tokens=60)
        results = generate("table", setup.target, setup.drafter, params, 6)
        accepted += sum(r.stats.accepted for r in results)
    assert accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_is_complete_does_not_end_a_reply_before_min_tokens(
    temperature: float,
) -> None:
    """docs/sampling.md: the reply cannot go on and may not end, which is an error."""
    setup = set_up("ngram", kind_of("table"))
    asked = {"grammar": Grammar.choice(["a"]), "temperature": temperature, "max_tokens": 9}
    for num_draft_tokens in (0, 4):
        run = functools.partial(generate, "table", setup.target, setup.drafter)
        (ends, *_) = run(SamplingParams(**asked, min_tokens=1), num_draft_tokens)
        assert (ends.finish_reason, len(ends.token_ids)) == ("stop", 1)
        (stuck, *_) = run(SamplingParams(**asked, min_tokens=5), num_draft_tokens)
        assert (stuck.finish_reason, len(stuck.token_ids)) == ("error", 1)
        assert "leave no token after 1 tokens of the reply (grammar, min_tokens)" in str(
            stuck.error
        )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "best_of": ({"best_of": 2}, "best_of is not offered"),
    "an unknown one": ({"top_a": 0.1}, "unknown sampling option 'top_a'"),
    "no such token": ({"logit_bias": {99: 1.0}}, "logit_bias names token 99"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    "a bad grammar": ({"grammar": Grammar.regex("(a")}, r"grammar \(regex\) cannot be used"),
    "a grammar without end": (
        {"grammar": Grammar.regex("a"), "ignore_eos": True},
        "ignore_eos and grammar",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case: str) -> None:
    options, message = REFUSED[case]
    target = kind_of("table").new_target()
    engine = engine_of(target, NoDrafter(), FixedBudget(0), new_rules=rules_for("table"))
    with pytest.raises(ConfigError, match=message):
        engine.submit(PROMPTS[0], SamplingParams.of(**options))
    assert not engine.has_work


def test_the_documentation_has_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "start" / "sampling.md").read_text()
    table = page[page.index("## Parameters") : page.index("Refused")]
    assert not [field.name for field in fields(SamplingParams) if f"`{field.name}`" not in table]
