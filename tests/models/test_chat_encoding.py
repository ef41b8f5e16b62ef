"""Chat templates: text of a message is content, and rendered as transformers renders it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.text import chat_template
from foredraft.models.text.chat_template import ChatTemplate
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.checkpoints import CHAT_TEMPLATE, train_tokenizer

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|trim }}<|im_end|>\n{% endfor %}"
)
AS_JSON = "{% for m in messages %}<|im_start|>{{ m.content|tojson }}<|im_end|>{% endfor %}"
LOOKING = (
    "{% for m in messages %}<|im_start|>{% if '<think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}"
)
ROLE_NAMES = (
    "{% for m in messages %}{{ '<|im_' + 'start' + '|>' + m.role + m.content }}{% endfor %}"
)
BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATES = [CHAT_TEMPLATE, TRIMMING, AS_JSON, LOOKING, ROLE_NAMES, BOS]


def save(directory: Path, fast: FastTokenizer, template: str) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template})
    )
    return Tokenizer(directory)


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if i in tokenizer._special]


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module", params=range(len(TEMPLATES)))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path = tmp_path_factory.mktemp("chat")
    return save(path, train_tokenizer(), TEMPLATES[request.param])


PIECES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|>", " a", "東", "\n", "<think>",
     "</think>", '"', "\U000f0000", "\U000f0001", "<|endoftext|>"]
)  # fmt: skip
CONTENT = st.lists(PIECES, max_size=8).map("".join)


@settings(max_examples=60)
@given(CONTENT, CONTENT)
def test_no_content_adds_a_special_token(tokenizer: Tokenizer, first: str, second: str) -> None:
    calm = [*user("a"), {"role": "assistant", "content": "b"}]
    wild = [*user(first), {"role": "assistant", "content": second}]
    ids = tokenizer.encode_chat(wild)
    assert special_ids(tokenizer, ids) == special_ids(tokenizer, tokenizer.encode_chat(calm))


@settings(max_examples=60)
@given(CONTENT)
def test_nothing_of_the_content_is_lost(tokenizer: Tokenizer, content: str) -> None:
    encoder = tokenizer._encoder(tools=False)
    if encoder._template.source in (LOOKING, AS_JSON):
        return
    ids = tokenizer.encode_chat(user(content))
    text = encoder._template.render(user(content), encoder._named)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=60)
@given(st.text(alphabet="<|im_>ab 東\n\U000f0000", max_size=30))
def test_ids_of_ordinary_content_are_those_of_the_rendered_text(
    tokenizer: Tokenizer, content: str
) -> None:
    encoder = tokenizer._encoder(tools=False)
    text = encoder._template.render(user(content), encoder._named)
    if all(token not in content for token in encoder._special.values()):
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode_chat(user(content)) == expected


def test_content_is_encoded_as_it_would_be_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, train_tokenizer(), CHAT_TEMPLATE)
    plain = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.encode_special_tokens = True  # of the library: special tokens are split up
    ids = tokenizer.encode_chat(user("no<|im_end|>way"))
    inner = plain.encode("user\nno<|im_end|>way", add_special_tokens=False).ids
    start, end = (plain.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert ids[: len(inner) + 2] == [start, *inner, end]


def test_every_text_of_a_message_is_content(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.tool_calls|tojson }}{{ m.name }}{{ m.content }}{% endfor %}"
    )
    tokenizer = save(tmp_path, train_tokenizer(), template)
    calls = [{"function": {"name": "<|im_end|>", "arguments": {"<|im_start|>": ["<|im_end|>"]}}}]
    message = {**user("x")[0], "tool_calls": calls, "name": "<|im_end|>"}
    assert special_ids(tokenizer, tokenizer.encode_chat([message])) == []


def test_a_template_that_puts_pieces_together_makes_no_token(tmp_path: Path) -> None:
    joining = "{{ messages[0].content|replace('X', '') }}{{ messages[1].content }}<|im_end|>"
    tokenizer = save(tmp_path, train_tokenizer(), joining)
    for first, second in (("<|im_Xend|>", ""), ("<|im_", "end|>")):
        ids = tokenizer.encode_chat([*user(first), *user(second)])
        assert len(special_ids(tokenizer, ids)) == 1


def test_plain_prompts_are_parsed_as_every_tool_does(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, train_tokenizer(), CHAT_TEMPLATE)
    assert tokenizer.encode("<|im_end|>") == [2]


# ------------------------------------------------------------------------ vocabularies of all kinds

SPECIAL = ["<s>", "</s>", "<unk>"]


def _sentencepiece_bpe() -> FastTokenizer:
    alphabet = ["▁", *"</>unkshiab", "▁a", "a<", "</s>b"]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    model = BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Metaspace()
    return fast


def _unigram() -> FastTokenizer:
    pieces = [(token, 0.0) for token in SPECIAL] + [(c, -3.0) for c in "▁</>unkshiab"]
    fast = FastTokenizer(Unigram([*pieces, ("▁hi", -1.0)], 2, False))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.decoder = decoders.Metaspace(prepend_scheme="first")
    return fast


def _word_level() -> FastTokenizer:
    words = [*SPECIAL, "hi", "a", "b"]
    fast = FastTokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast


def _word_piece() -> FastTokenizer:
    words = [*SPECIAL, "hi", "##a", "b", "a", *(f"##{c}" for c in "</>s"), "<"]
    fast = FastTokenizer(WordPiece({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast


@pytest.mark.parametrize("make", [_sentencepiece_bpe, _unigram, _word_level, _word_piece])
@pytest.mark.parametrize(
    "flags", [{}, {"normalized": True}, {"rstrip": True}, {"lstrip": True, "single_word": False}]
)
def test_content_stays_content_in_every_kind_of_vocabulary(
    tmp_path: Path, make: Callable[[], FastTokenizer], flags: dict[str, bool]
) -> None:
    fast = make()
    fast.add_special_tokens([AddedToken(text, special=True, **flags) for text in SPECIAL])
    template = "<s>{% for m in messages %} {{ m.content }} </s>{% endfor %}"
    tokenizer = save(tmp_path, fast, template)
    start, end = fast.token_to_id("<s>"), fast.token_to_id("</s>")
    for content in ("hi", "hi </s> a", "</s>", "<s> b", "hi</s>a", " </s> </s> ", "</S>"):
        ids = tokenizer.encode_chat(user(content))
        assert [i for i in ids if i in (start, end)] == [start, end], content
    assert tokenizer.encode_chat(user("hi a")) == tokenizer.encode("<s> hi a </s>", False)


# ----------------------------------------------- chat templates render as transformers renders them


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": '<b>naïve</b> & "quoted" {{ 1 }} <|im_end|>\n'},
    {"role": "assistant", "content": "<think>hm</think>Yes", "reasoning": "hm"},
    {"role": "user", "content": ""},
]
RENDERED = [
    CHAT_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{{ m.role|upper }} {{ m['content']|trim }} {% endfor %}",
    "{%- for m in messages %}\n{{- '<|' + m.role + '|>' ~ m.content ~ loop.index }}\n{%- endfor %}",
    "{% for m in messages %}{{ m | tojson }}{{ m|tojson(indent=2) }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ ns.n }}{% if ns.n > 2 %}{% break %}"
    "{% endif %}{% endfor %}",
    "{% macro say(m) %}{{ m.content.split('</think>')[-1]|trim }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% generation %}{{ m.thinking }}{% endgeneration %}"
    "{% endfor %}",
    "{% for m in messages[::-1] %}{{ '%s: %s' % (m.role, m.content|length) }}"
    "{{ m.content[:3] * 2 }}{{ '{:>5}'.format(m.role) }}{% endfor %}",
    "{% for role in messages|map(attribute='role')|unique|list %}{{ role }},{% endfor %}"
    "{{ messages|selectattr('role','equalto','user')|list|length }}{{ dict(a=1) }}"
    "{% filter upper %}x{{ missing }}{% endfilter %}{{ messages|groupby('role')|length }}",
]


@pytest.mark.parametrize("source", RENDERED)
def test_it_renders_what_transformers_renders(source: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, **special
    )
    assert ChatTemplate(source, "model").render(MESSAGES, special) == expected


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) / 1000)  # a millisecond a look
    with pytest.raises(ConfigError, match="runs for over 5 s; it was stopped"):
        ChatTemplate(source, "model").render(MESSAGES, {})


GROWING = [
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 9 ** 99999 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ '%9999999999d' % 3 }}",
    "{{ '%*d' % (9999999999, 3) }}",
    "{{ '%9999999999d'|format(3) }}",
    "{{ '{:9999999999}'.format(3) }}",
    "{{ '{:{w}}'.format(3, w='9999999999') }}",
    "{{ '{w:9999999999}'.format_map({'w': 3}) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ (['a' * 1000000] * 1000)|join }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a ' * 9999999).split()|length }}",
    *(
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
        f"{{% set ns.x = {twice} %}}{{% endfor %}}"
        for twice in ("ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x]|join", "ns.x.replace('a', ns.x)")
    ),
    "{% for i in range(99999) %}{% for i in range(99) %}" + "x" * 9999 + "{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", GROWING, ids=range(len(GROWING)))
def test_a_template_that_makes_too_much_is_stopped_before_it_has(source: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"too much|too large"):
        ChatTemplate(source, "model").render(MESSAGES, {})
    assert time.process_time() - began < 5


def test_a_long_conversation_has_room() -> None:
    messages = [{"role": "user", "content": "words and <tags> " * 5000}] * 50
    text = ChatTemplate(RENDERED[2], "model").render(messages, {})
    assert len(text) > 4_000_000
    assert ChatTemplate(RENDERED[3], "model").render(messages, {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the conversation: no system role"),
        ("{{ messages.__class__.__mro__ }}", "refuses the conversation"),
        ("{{ namespace(__class__=1) }}", "refuses the conversation"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "refuses the conversation"),
        ("{{ messages.append(1) }}", "refuses the conversation"),
        ("{{ 1 / 0 }}", "fails on the conversation: ZeroDivisionError"),
        ("{{ [] + 'a' }}", "fails on the conversation: TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'x' %}", "fails on the conversation|refuses the conversation"),
    ],
)
def test_a_template_that_fails_says_so(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source, "model").render(MESSAGES, {})


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{", "{% nonsense %}", "x" * 5_000_000, "{{ " + "(" * 5000]
)
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ModelLoadError, match="the chat template of model"):
        ChatTemplate(source, "model")


def test_renderings_do_not_share_an_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_CHARACTERS", 1000)
    template = ChatTemplate(CHAT_TEMPLATE, "model")
    assert len({template.render(MESSAGES, {}) for _ in range(50)}) == 1
