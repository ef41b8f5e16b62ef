"""Grammars on a real tokenizer: what they allow, force and refuse, also along guesses."""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.core.errors import ConfigError, GrammarError, NoTokenError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.rules import Rules
from foredraft.core.rules.book import new_rules
from foredraft.models.text import grammars as module
from foredraft.models.text.grammars import Grammars
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.checkpoints import save_tokenizer

SCHEMA = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
)
PROMPT = [5, 6]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def rules_of(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar) -> Rules:
    params = SamplingParams(temperature=1.0, grammar=grammar)
    return new_rules(
        params,
        len(PROMPT),
        tokenizer.eos_token_ids,
        vocab_size=tokenizer.vocab_size,
        encode=tokenizer.encode,
        new_matcher=grammars.new_matcher,
    )


def write(rules: Rules, vocab_size: int, seed: int, limit: int = 200) -> list[int]:
    """A reply of tokens drawn at random among those allowed."""
    generator, text = random.Random(seed), [*PROMPT]
    while len(text) < limit and not rules.is_complete(text):
        law = rules.law(torch.zeros(vocab_size), text)
        text.append(generator.choice(torch.nonzero(law.logits_V > -1e9)[:, 0].tolist()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_drawn_is_json(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    rules = rules_of(grammars, tokenizer, SCHEMA)
    found = json.loads(tokenizer.decode(write(rules, tokenizer.vocab_size, seed, 10_000)))
    assert found.keys() == {"name", "old"}
    assert len(found["name"]) <= 5


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.json_object(), '{"a": [1, {"b": null}]}'),
        (SCHEMA, '{"name": "é", "old": true}'),
        (SCHEMA, '{\n  "name": "",\n  "old": false\n}'),
        (Grammar.regex("[0-9]{2}-[a-c]+x"), "31-abcax"),
        (Grammar.choice(["yes", 'n"o\n', "été"]), 'n"o\n'),
        (Grammar.choice(["yes", 'n"o\n', "été"]), "été"),
        (Grammar.lark('start: "a" start "b" | "c"'), "aacbb"),
    ],
)
def test_what_a_grammar_describes_can_be_written(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str
) -> None:
    rules, seen = rules_of(grammars, tokenizer, grammar), [*PROMPT]
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert rules.permits(token, seen)
        seen.append(token)
    assert rules.permits(tokenizer.eos_token_ids[0], seen)
    assert not rules.permits(tokenizer.eos_token_ids[0], seen[:-1])


@pytest.mark.parametrize(
    ("pattern", "text", "is_written"),
    [
        (r"\d{2}", "42", True),
        (r"\d{2}", "٤٢", False),
        (r"[\d٤]{2}", "4٤", True),
        (r"\D", "٤", True),
        (r"\\\\d", r"\\d", True),
    ],
)
def test_digits_of_an_expression_are_ascii(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str, text: str, is_written: bool
) -> None:
    matcher = grammars.new_matcher(Grammar.regex(pattern))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(matcher.consume(token) for token in ids) == is_written


@pytest.mark.parametrize("seed", range(10))
def test_a_path_of_guesses_is_like_a_text(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    """Asked in any order, also along guesses that are then not taken."""
    rules, generator = rules_of(grammars, tokenizer, SCHEMA), random.Random(seed)
    reply = write(rules_of(grammars, tokenizer, SCHEMA), tokenizer.vocab_size, seed)
    other = write(rules_of(grammars, tokenizer, SCHEMA), tokenizer.vocab_size, seed + 100)
    logits_V = torch.zeros(tokenizer.vocab_size)
    for end in range(0, len(reply), 3):
        text = [*PROMPT, *reply[:end]]
        for _ in range(6):
            path = generator.choice([reply[end : end + generator.randrange(5)], other[:3]])
            fresh = rules_of(grammars, tokenizer, SCHEMA)
            try:
                expected = fresh.law(logits_V, [*PROMPT, *reply[:end], *path]).logits_V
            except (NoTokenError, GrammarError):
                with pytest.raises(NoTokenError):
                    rules.law(logits_V, text, path)
                continue
            assert torch.equal(rules.law(logits_V, text, path).logits_V, expected)


def test_what_alone_can_follow_is_known(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rules = rules_of(grammars, tokenizer, Grammar.regex("x(hello world|hello there)y"))
    forced = rules.forced(PROMPT)
    assert "xhello ".startswith(tokenizer.decode(forced))
    assert len(forced) > 1
    assert not rules_of(grammars, tokenizer, Grammar.regex("[a-z]+")).forced(PROMPT)


def test_the_end_is_the_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rules = rules_of(grammars, tokenizer, Grammar.choice(["ab"]))
    text = [*PROMPT, *tokenizer.encode("ab", add_special_tokens=False)]
    assert rules.is_complete(text)
    assert not rules.forced(text)
    with pytest.raises(NoTokenError, match="leads here"):
        rules.law(torch.zeros(tokenizer.vocab_size), text, [tokenizer.eos_token_ids[0]])


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"type": "objekt"}), "objekt"),
        (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (Grammar.json_schema({"$ref": "http://example.org/schema"}), "does not fetch"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.lark("start: foo"), "unknown name"),
    ],
)
def test_malformed_grammars(grammars: Grammars, grammar: Grammar, said: str) -> None:
    with pytest.raises(GrammarError, match=said) as caught:
        grammars.new_matcher(grammar)
    assert len(str(caught.value)) < 500


def test_a_model_without_an_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    endless = Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="end-of-text token"):
        Grammars(endless, endless.vocab_size).new_matcher(SCHEMA)


def test_a_vocabulary_that_is_padded(tokenizer: Tokenizer) -> None:
    """Models round their vocabulary up; what no text spells cannot occur."""
    matcher = Grammars(tokenizer, tokenizer.vocab_size + 13).new_matcher(Grammar.regex("a+"))
    mask_V = matcher.mask()
    assert len(mask_V) == tokenizer.vocab_size + 13
    assert not mask_V[tokenizer.vocab_size :].any()


def test_a_guess_that_is_taken_back_leaves_nothing_behind(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """llguidance's own way back loses a token here, once a mask was made behind the array."""
    tags = {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}
    schema = {
        "type": "object",
        "properties": {"tags": tags, "old": {"type": "boolean"}},
        "required": ["tags", "old"],
        "additionalProperties": False,
    }
    rules, fresh = (rules_of(grammars, tokenizer, Grammar.json_schema(schema)) for _ in range(2))
    logits_V = torch.zeros(tokenizer.vocab_size)
    begun, guess, rest = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ('{"tags": [\n "a"\n,\n"Im', 'i"\n]\n', 'i"\n,\n')
    )
    text = [*PROMPT, *begun]
    rules.law(logits_V, text, guess)
    for token in rest:
        text.append(token)
        rules.is_complete(text)
    assert torch.equal(rules.law(logits_V, text).logits_V, fresh.law(logits_V, text).logits_V)


def wide_schema(num_optional: int) -> dict[str, Any]:
    names = (f"p{number}" for number in range(num_optional))
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def test_many_optional_properties(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rules = rules_of(grammars, tokenizer, Grammar.json_schema(wide_schema(800)))
    text = [*PROMPT]
    for token in tokenizer.encode('{"p3": "a", "p799": "b"}', add_special_tokens=False):
        assert rules.law(torch.zeros(tokenizer.vocab_size), text).logits_V[token] == 0
        text.append(token)
    assert rules.permits(tokenizer.eos_token_ids[0], text)


def test_too_many_optional_properties(grammars: Grammars) -> None:
    inner = {"type": "array", "items": wide_schema(2001)}
    with pytest.raises(ConfigError, match="2001 optional properties; 2000 are possible"):
        Grammar.json_schema(inner)
    names = list(wide_schema(2001)["properties"])
    Grammar.json_schema(wide_schema(2001) | {"required": names[1:]})


def test_a_parser_that_outgrows_its_limits_is_refused_before_the_reply(grammars: Grammars) -> None:
    wide = [wide_schema(1500) | {"additionalProperties": {"const": n}} for n in range(4)]
    with pytest.raises(GrammarError, match="make properties required, or split the schema"):
        grammars.new_matcher(Grammar.json_schema({"anyOf": wide}))


@pytest.fixture
def held(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Grammars, threading.Event, list[Grammar]]]:
    """Grammars of which those with "slow" in them wait for an event; and what was compiled."""
    grammars, go_on, compiled = Grammars(tokenizer, tokenizer.vocab_size), threading.Event(), []
    compile_now = grammars._compile

    def compile_slowly(grammar: Grammar) -> Any:
        if "slow" in grammar.source:
            assert go_on.wait(20)
        compiled.append(grammar)
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    yield grammars, go_on, compiled
    go_on.set()


def test_a_slow_grammar_keeps_no_other_waiting(
    held: tuple[Grammars, threading.Event, list[Grammar]],
) -> None:
    grammars, go_on, compiled = held
    slow, quick = Grammar.regex("slow"), Grammar.regex("quick")
    waits = [grammars.compile(slow) for _ in range(3)]
    grammars.compile(quick).result(20)
    grammars.compile(quick).result(20)
    assert not any(wait.done() for wait in waits)
    go_on.set()
    assert len({id(wait.result(20)) for wait in waits}) == 1
    assert compiled == [quick, slow]


def test_what_nobody_waits_for_is_not_begun(
    held: tuple[Grammars, threading.Event, list[Grammar]],
) -> None:
    grammars, go_on, compiled = held
    slow = [Grammar.regex(f"slow{number}") for number in range(4)]
    waits = [grammars.compile(each, "a") for each in slow]
    grammars.compile(slow[3], "a")  # two wait for the last one
    for number in (0, 2, 3):
        grammars.give_up(waits[number], "a")
    go_on.set()
    assert all(waits[number].result(20) for number in (0, 1, 3))
    grammars.compile(Grammar.regex("x"), "a").result(20)
    assert slow[2] not in compiled
    assert grammars.compile(slow[2], "a").result(20), "it is begun when it is asked for again"


def test_no_owner_holds_all_threads(
    held: tuple[Grammars, threading.Event, list[Grammar]],
) -> None:
    """Requests that have left hold theirs until the end, for nothing ends a compilation."""
    grammars, go_on, compiled = held
    slow = [Grammar.regex(f"slow{number}") for number in range(9)]
    waits = [grammars.compile(each, "a") for each in slow]
    for wait in waits[:5]:
        grammars.give_up(wait, "a")
    assert grammars.compile(Grammar.regex("quick"), "b").result(20)
    until = time.monotonic() + 20
    while "b" in grammars._running and time.monotonic() < until:
        time.sleep(0.001)  # the thread has given its result, and is not yet free
    assert len(grammars._running) == 2
    assert grammars.compile(slow[8], "b")  # another owner wants it, too
    assert len(grammars._running) == 3
    go_on.set()
    assert all(wait.result(20) for wait in (*waits[:2], *waits[5:]))
    assert not {*slow[2:5]} & {*compiled}


def test_a_refused_grammar_leaves_no_memory_behind(tokenizer: Tokenizer) -> None:
    """It was 170 MB for an expression of 15 characters, of up to 64 at a time."""
    from llguidance import LLMatcher

    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    error = grammars.compile(Grammar.regex("(a{1000}){1000}")).exception(60)
    assert isinstance(error, GrammarError)
    found: BaseException | None = error
    while found is not None:
        frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
        kept = [value for frame in frames for value in frame.f_locals.values()]
        assert not any(isinstance(value, LLMatcher) for value in kept)
        found = found.__context__


def test_large_grammars_are_not_kept_by_the_dozen(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.0)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for text in ("a", "b", "c"):
        grammars.compile(last := Grammar.regex(text)).result(20)
    grammars._pool.shutdown()  # what follows a result is done as well
    assert [*grammars._jobs] == [*grammars._seconds] == [last]


def test_a_late_end_of_a_wait_ends_no_other(
    held: tuple[Grammars, threading.Event, list[Grammar]],
) -> None:
    """Its compilation has failed, the grammar is compiled anew, and others wait for that."""
    grammars, go_on, _ = held
    bad = Grammar.regex("(a")
    first = grammars.compile(bad, "a")
    with pytest.raises(GrammarError):
        first.result(20)
    slow = [grammars.compile(Grammar.regex(f"slow{number}"), "a") for number in range(2)]
    again = grammars.compile(bad, "a")
    grammars.give_up(first, "a")
    go_on.set()
    with pytest.raises(GrammarError):
        again.result(20)
    assert all(each.result(20) for each in slow)


def test_nobody_waits_for_threads_that_an_exiting_interpreter_refuses(
    held: tuple[Grammars, threading.Event, list[Grammar]],
) -> None:
    grammars, go_on, _ = held
    waits = [grammars.compile(Grammar.regex(f"slow{number}"), "a") for number in range(4)]
    grammars._pool.shutdown(wait=False)
    go_on.set()
    for wait in waits[:2]:
        assert wait.result(20)
    for wait in (*waits[2:], grammars.compile(Grammar.regex("x"))):
        with pytest.raises(RuntimeError, match="shutdown"):
            wait.result(20)


def test_many_grammars_at_once_are_not_kept_for_good(
    held: tuple[Grammars, threading.Event, list[Grammar]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, go_on, _ = held
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    waits = [grammars.compile(Grammar.regex(f"slow{number}"), "a") for number in range(6)]
    go_on.set()
    assert all(wait.result(20) for wait in waits)
    for owner in ("a", "b"):
        assert grammars.compile(Grammar.regex("slow5"), owner) is waits[5]
    assert len(grammars._jobs) == 2
    assert not grammars._jobs[Grammar.regex("slow5")].waiting["b"]


def test_a_grammar_that_failed_is_tried_again(grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group"):
            grammars.compile(Grammar.regex("(a")).result(20)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (SCHEMA, '{"name": "é", "old": true}'),
        (Grammar.regex("ab{2}"), "abb"),
        (Grammar.choice(["yes", "no"]), "no"),
        (Grammar.lark('start: "a" start "b" | "c"'), "aacbb"),
    ],
)
@pytest.mark.parametrize("before", ["", "Hm, <b>東京</b>?\n", "{"])
def test_a_grammar_may_begin_after_a_mark(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str, before: str
) -> None:
    behind = grammar.behind("</think>")
    rules, seen = rules_of(grammars, tokenizer, behind), [*PROMPT]
    end = tokenizer.eos_token_ids[0]
    for token in tokenizer.encode(f"{before}</think>\n\n{text}", add_special_tokens=False):
        assert rules.permits(token, seen)
        assert not rules.permits(end, seen)
        seen.append(token)
    assert rules.permits(end, seen)
    assert not rules.permits(tokenizer.encode("!", add_special_tokens=False)[0], seen)


def test_an_added_token_that_looks_special_is_written_as_itself(tmp_path: Path) -> None:
    """`<tool_call>` of Qwen2.5 is an added token that is not special."""
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    number = Tokenizer(tmp_path).vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": number, "content": "<call>", **flags})
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("<call>", add_special_tokens=False) == [number]
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 3)
    rules = rules_of(grammars, tokenizer, Grammar("lark", 'start: "<call>{" /[a-c]+/ "}"'))
    matcher = grammars.new_matcher(Grammar("lark", 'start: "<call>{" /[a-c]+/ "}"'))
    assert matcher.mask()[number]
    assert matcher.forced()[0] == number
    assert matcher.permits(number)
    for seed in range(5):
        text = write(rules, tokenizer.vocab_size + 3, seed)
        assert text[0] == number
        assert tokenizer.decode(text, skip_special_tokens=False).startswith("<call>{")
