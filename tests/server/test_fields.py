"""Each input model says what its fields do; checks and lists follow from it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from foredraft.server.dialects.chat import ChatRequest
from foredraft.server.dialects.completions import CompletionRequest
from foredraft.server.dialects.fields import RequestBody
from foredraft.server.dialects.messages import MessagesRequest
from foredraft.server.dialects.responses import ResponsesRequest
from foredraft.server.dialects.tokenize import DetokenizeRequest
from tests.server.marks import hints, honoured, refusals

USER = [{"role": "user", "content": "x"}]
MINIMAL: dict[type[RequestBody], dict[str, Any]] = {
    ChatRequest: {"messages": USER},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": USER, "max_tokens": 1},
}
OUR_OWN = {"coupling", "cache_salt", "priority", "structured_outputs", "prediction", "seed"}


def lookalikes(value: Any) -> list[Any]:
    """Values that Python, or careless code, takes for this one."""
    if isinstance(value, bool):
        return [1, "true"] if value else [0, "", []]
    return [True, str(value)] if isinstance(value, int) else []


def accepted() -> list[tuple[type[RequestBody], str, Any]]:
    return [
        (model, name, value)
        for model in MINIMAL
        for name, mark in refusals(model).items()
        for value in (*mark.harmless, *mark.listed)
    ]


@pytest.mark.parametrize(("model", "name", "value"), accepted())
def test_a_refused_field_may_ask_for_nothing_and_its_lookalikes_may_not(
    model: type[RequestBody], name: str, value: Any
) -> None:
    body = MINIMAL[model]
    for harmless in (value, None):
        model.model_validate({**body, name: harmless})
    for other in lookalikes(value):
        with pytest.raises(ValidationError, match=name):
            model.model_validate({**body, name: other})


@pytest.mark.parametrize("model", MINIMAL)
def test_every_refused_field_is_refused(model: type[RequestBody]) -> None:
    for name in refusals(model):
        with pytest.raises(ValidationError, match=name):
            model.model_validate({**MINIMAL[model], name: {"unheard": "of"}})


@pytest.mark.parametrize("model", MINIMAL)
def test_what_has_no_effect_is_named(model: type[RequestBody]) -> None:
    sent = dict.fromkeys(hints(model), "x")
    body = model.model_validate({**MINIMAL[model], **sent, "wibble": 1})
    assert body.ignored() == sorted([*sent, "wibble"])
    assert model.model_validate(MINIMAL[model]).ignored() == []


@pytest.mark.parametrize("model", MINIMAL)
def test_the_extras_of_sampling_are_everywhere(model: type[RequestBody]) -> None:
    assert set(honoured(model)) >= OUR_OWN


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_best_of_may_be_n(model: type[RequestBody]) -> None:
    body = MINIMAL[model]
    model.model_validate(body | {"best_of": 3, "n": 3})
    model.model_validate(body | {"best_of": 1})
    for wrong in ({"best_of": 3}, {"best_of": 3, "n": 2}, {"best_of": True}, {"best_of": 3.0}):
        with pytest.raises(ValidationError, match="best_of"):
            model.model_validate(body | wrong)


def test_two_names_of_one_parameter_may_not_differ() -> None:
    body = ChatRequest.model_validate({"messages": USER, "max_tokens": 5})
    assert body.sampling({})[0].max_tokens == 5
    same = {"messages": USER, "max_tokens": 5, "max_completion_tokens": 5}
    assert ChatRequest.model_validate(same).sampling({})[0].max_tokens == 5
    with pytest.raises(ValueError, match="exclude each other"):
        ChatRequest.model_validate(same | {"max_completion_tokens": 6}).sampling({})


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (CompletionRequest, {"prompt": [1, "x"] * 50_000}),
        (CompletionRequest, {"prompt": [[1, "x"]] * 50_000}),
        (CompletionRequest, {"stop_token_ids": ["x"] * 50_000}),
        (ChatRequest, {"logit_bias": {str(-i - 1): 1 for i in range(50_000)}}),
        (ChatRequest, {"tools": ["x"] * 50_000}),
        (ResponsesRequest, {"input": ["x"] * 50_000}),
        (MessagesRequest, {"messages": ["x"] * 50_000}),
        (DetokenizeRequest, {"tokens": ["x"] * 50_000}),
    ],
)
def test_the_check_ends_at_the_first_wrong_entry(
    model: type[RequestBody], wrong: dict[str, Any]
) -> None:
    """A body of 4 MB with a million wrong entries stopped the event loop for 15 s."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate({**MINIMAL.get(model, {}), **wrong})
    assert raised.value.error_count() < 10
