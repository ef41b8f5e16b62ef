"""From a request body in OpenAI's dialect, with vLLM's extras, to sampling parameters.

The server and `foredraft run-batch` share this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from foredraft.core.checks import checked_flag, checked_int, checked_real, shown
from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import SamplingParams
from foredraft.core.rng import SEED_BITS
from foredraft.server.dialects.fields import SAME_NAME, Body, FieldError, given, refuse
from foredraft.server.dialects.prompts import text_of

_WITHOUT_LIMIT = 1 << 30
"""Tokens of a chat reply when none are named: the engine stops at the end of the context."""
_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_TEMPERATURE = 1.0


def chat_params(body: Body, grammar: Grammar | None = None) -> SamplingParams:
    """Parameters of a chat request.

    Args:
        body: fields that are None count as left out.
        grammar: that the reply has to follow besides, such as a tool that must be called.

    Raises:
        ConfigError: a value out of range or of the wrong type, or a field that is refused.
    """
    refuse(body, "chat")
    if given(body, "top_logprobs") is not None and not given(body, "logprobs", False):
        raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
    return _params(body, _WITHOUT_LIMIT, _chat_logprobs, grammar)


def completion_params(body: Body) -> SamplingParams:
    """Parameters of a completions request. Echo with logprobs asks for those of the prompt.

    Raises:
        ConfigError: as `chat_params`.
    """
    refuse(body, "completions")
    params = _params(body, _DEFAULT_COMPLETION_TOKENS, _completion_logprobs, None)
    echo = checked_flag("echo", given(body, "echo", False))
    return _with(params, prompt_logprobs=params.logprobs) if echo else params


def _params(
    body: Body, max_tokens: int, logprobs: Callable[[Body], int | None], grammar: Grammar | None
) -> SamplingParams:
    asked = {name: body[name] for name in SAME_NAME if given(body, name) is not None}
    asked.setdefault("temperature", _DEFAULT_TEMPERATURE)
    asked |= {
        "max_tokens": _max_tokens(body, max_tokens),
        "top_k": max(0, checked_int("top_k", given(body, "top_k", 0), low=-1)),
        "seed": _seed(given(body, "seed")),
        "logit_bias": _logit_bias(given(body, "logit_bias", {})),
        "logprobs": logprobs(body),
        "include_stop": given(body, "include_stop_str_in_output", False),
        "prediction": _prediction(given(body, "prediction")),
        "grammar": _one_grammar(body, grammar),
    }
    return _with(SamplingParams(), **asked)


def _with(params: SamplingParams, **more: Any) -> SamplingParams:
    """``params`` with other values; one that this build does not know is refused by name."""
    kept = {field.name: getattr(params, field.name) for field in fields(params)}
    for name, value in more.items():
        if name not in kept and value not in (None, (), [], {}, False, 1, 1.0, 0):
            raise FieldError(name, f"{name} is not supported by this build")
    return SamplingParams(**kept | {name: v for name, v in more.items() if name in kept})


def _max_tokens(body: Body, default: int) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := given(body, name)) is not None:
            return checked_int(name, value, low=1)
    return default


def _seed(seed: object) -> int | None:
    """OpenAI's seeds are signed."""
    if seed is None:
        return None
    number = checked_int("seed", seed, low=-(2 ** (SEED_BITS - 1)), high=2**SEED_BITS - 1)
    return number % (1 << SEED_BITS)


def _logit_bias(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise FieldError("logit_bias", f"logit_bias must map token ids to numbers: {shown(biases)}")
    found: dict[int, float] = {}
    for token, bias in biases.items():
        if not (isinstance(token, int) or (isinstance(token, str) and token.isdecimal())):
            raise FieldError("logit_bias", f"logit_bias: {shown(token)} is not a token id")
        found[int(str(token)[:20])] = checked_real("logit_bias", bias, -100.0, 100.0)
    return found


def _chat_logprobs(body: Body) -> int | None:
    if not checked_flag("logprobs", given(body, "logprobs", False)):
        return None
    return checked_int("top_logprobs", given(body, "top_logprobs", 0), low=0, high=20)


def _completion_logprobs(body: Body) -> int | None:
    value = given(body, "logprobs")
    return None if value is None else checked_int("logprobs", value, low=0, high=20)


def _prediction(prediction: object) -> str | None:
    """Predicted Outputs: ``{"type": "content", "content": text or text parts}``."""
    if prediction is None:
        return None
    if not isinstance(prediction, Mapping) or prediction.get("type", "content") != "content":
        raise FieldError(
            "prediction",
            f'prediction must be {{"type": "content", "content": …}}, not {shown(prediction)}',
        )
    return text_of("prediction.content", prediction.get("content"))


def _one_grammar(body: Body, forced: Grammar | None) -> Grammar | None:
    found = {
        "response_format": _named("response_format", response_grammar, body),
        "structured_outputs": _named("structured_outputs", _structured_outputs, body),
        "tool_choice": forced,
    }
    asked = [name for name, grammar in found.items() if grammar is not None]
    if len(asked) > 1:
        raise FieldError(asked[1], f"{asked[0]} and {asked[1]} exclude each other; give one")
    return found[asked[0]] if asked else None


def _named(name: str, read: Callable[[object], Grammar | None], body: Body) -> Grammar | None:
    """The grammar of a field; what is wrong with it is said under the field's name."""
    try:
        return read(given(body, name))
    except FieldError:
        raise
    except ConfigError as error:
        raise FieldError(name, f"{name}: {error}") from error


def response_grammar(form: object) -> Grammar | None:
    """The grammar of a ``response_format``, in the form of chat or of responses.

    Raises:
        FieldError: an unknown type, or a schema that is none.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "json_schema" and isinstance(form, Mapping):
        named = form.get("json_schema", form)
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if isinstance(schema, Mapping | bool):
            return Grammar.json_schema(schema)
        raise FieldError("response_format", "response_format has no json_schema.schema")
    raise FieldError(
        "response_format",
        f"response_format is of type {shown(kind)}; known are text, json_object and json_schema",
    )


def _structured_outputs(asked: object) -> Grammar | None:
    """vLLM's form: one of json, json_object, regex, choice and grammar."""
    if asked is None:
        return None
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }
    wanted = {k: v for k, v in asked.items() if v is not None} if isinstance(asked, Mapping) else {}
    if len(wanted) != 1 or (name := next(iter(wanted))) not in makers:
        raise FieldError(
            "structured_outputs",
            f"structured_outputs must hold one of {', '.join(makers)}, not {shown(asked)}",
        )
    return makers[name](wanted[name])
