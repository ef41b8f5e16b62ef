"""Chat templates render as transformers renders them, and stop when they run away."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.core.errors import ConfigError, ModelLoadError
from foredraft.models.text import chat_template
from foredraft.models.text.chat_template import ChatTemplate
from tests.models.checkpoints import CHAT_TEMPLATE

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": '<b>naïve</b> & "quoted" {{ 1 }} <|im_end|>\n'},
    {"role": "assistant", "content": "<think>hm</think>Yes", "reasoning": "hm"},
    {"role": "user", "content": ""},
]
TEMPLATES = [
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


@pytest.mark.parametrize("source", TEMPLATES)
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
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(width=10**10) }}",
    "{{ '%9999999999d' % 3 }}",
    "{{ '%*d' % (9999999999, 3) }}",
    "{{ '%9999999999d'|format(3) }}",
    "{{ '{:9999999999}'.format(3) }}",
    "{{ '{:{w}}'.format(3, w='9999999999') }}",
    "{{ '{w:9999999999}'.format_map({'w': 3}) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ 3|round(-999999999) }}",
    "{{ lipsum(10**9) }}",
    "{{ range(99999)|batch(10**9, 'x')|list }}",
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
    text = ChatTemplate(TEMPLATES[2], "model").render(messages, {})
    assert len(text) > 4_000_000
    assert ChatTemplate(TEMPLATES[3], "model").render(messages, {})


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
