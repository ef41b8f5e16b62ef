"""Fields that all APIs share: sampling parameters under OpenAI's and vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from foredraft.core.checks import shown
from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.core.params import MAX_BIASES, SamplingParams
from foredraft.core.rng import SEED_BITS
from foredraft.engine.scheduler import MAX_PRIORITY
from foredraft.models.text.prompts import text_of
from foredraft.server.dialects.fields import (
    Items,
    Number,
    RequestBody,
    Sets,
    characters,
    entries,
    json_characters,
)
from foredraft.server.errors import naming_fields

WITHOUT_LIMIT = 1 << 30
"""Tokens of a reply when none are named: the engine stops at the end of the context."""
_DEFAULT_TEMPERATURE = 1.0
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,19}")


def response_grammar(form: object) -> Grammar | None:
    """The grammar of a ``response_format``, in the form of chat or of responses.

    Raises:
        ConfigError: an unknown type, or a schema that is none.
    """
    options: Mapping[str, Any] = form if isinstance(form, Mapping) else {}
    kind = options.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object" and "schema" not in options:
        return Grammar.json_object()
    if kind in ("json_schema", "json_object"):  # llama.cpp's form has a schema under both
        named = options.get("json_schema", options)
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if isinstance(schema, Mapping | bool):
            return Grammar.json_schema(schema)
        raise ConfigError("it has no json_schema.schema")
    raise ConfigError(f"the type is {shown(kind)}; known are text, json_object and json_schema")


def format_grammar(options: Mapping[str, Any]) -> Grammar | None:
    """The grammar of an object that holds such a format, under ``format``."""
    return response_grammar(options.get("format"))


def _structured_grammar(outputs: Mapping[str, Any]) -> Grammar:
    """vLLM's form: one of json, json_object, regex, choice and grammar."""
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }
    named = [name for name, value in outputs.items() if value is not None]
    if len(named) != 1 or named[0] not in makers:
        raise ConfigError(f"it must hold one of {', '.join(makers)}, not {shown(outputs)}")
    return makers[named[0]](outputs[named[0]])


def _predicted_text(prediction: Mapping[str, Any]) -> str:
    """Predicted Outputs: ``{"type": "content", "content": text or text parts}``."""
    if prediction.get("type", "content") != "content":
        raise ConfigError(f'it must be {{"type": "content", "content": …}}, not {prediction}')
    return text_of("prediction.content", prediction.get("content"))


def _token_id(key: object) -> object:
    """A key of ``logit_bias``: a token id has one spelling only."""
    if isinstance(key, int):
        return key
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    raise ValueError(f"{shown(key)} is not a token id")


def _few(biases: object) -> object:
    """Refused before each entry is looked at: a body may hold a million."""
    if isinstance(biases, Mapping) and len(biases) > MAX_BIASES:
        raise ValueError(f"it names {len(biases)} tokens; it may name {MAX_BIASES}")
    return biases


_TokenId = Annotated[int, BeforeValidator(_token_id, json_schema_input_type=str)]
_Bias = Annotated[Number, Field(ge=-100, le=100)]
_Biases = Annotated[dict[_TokenId, _Bias], BeforeValidator(_few)]
_Seed = Annotated[
    int,
    Field(ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS),
    AfterValidator(lambda seed: seed % 2**SEED_BITS),  # OpenAI's seeds are signed
]
_TopK = Annotated[
    int,
    Field(ge=-1),
    AfterValidator(lambda k: max(k, 0)),  # for vLLM -1 keeps all tokens, too
]


Words = Annotated[Items[str] | None, entries("max_stop"), characters("max_stop_characters")]
Stops = Annotated[str | Items[str] | None, entries("max_stop"), characters("max_stop_characters")]
Tools = Annotated[
    Items[dict[str, Any]] | None, entries("max_tools"), json_characters("max_schema_bytes")
]
Schema = Annotated[dict[str, Any] | None, json_characters("max_schema_bytes")]


class SamplingFields(RequestBody):
    """The fields that all APIs share.

    Attributes:
        default_max_tokens: of a reply where the request names no number.
    """

    default_max_tokens: ClassVar[int] = WITHOUT_LIMIT

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: _TopK | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[_Biases | None, entries("max_logit_bias")] = None
    seed: _Seed | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    bad_words: Words = None
    allowed_token_ids: Items[int] | None = None
    include_stop_str_in_output: Annotated[bool | None, Sets("include_stop")] = None
    structured_outputs: Annotated[Schema, Sets("grammar", _structured_grammar)] = None
    prediction: Annotated[dict[str, Any] | None, Sets("prediction", _predicted_text)] = None
    coupling: Literal["seeded", "drawn"] | None = None
    speculation: str | None = None
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    def sampling(
        self, defaults: Mapping[str, float] | None
    ) -> tuple[SamplingParams, dict[str, str]]:
        """The sampling parameters, and for each the request field that set it.

        Args:
            defaults: the model's own, which count later; None: OpenAI's count.

        Raises:
            ConfigError, ApiError: values that cannot be used, or contradict each other.
        """
        parameters = self.parameters()
        names = {parameter: name for parameter, (name, _) in parameters.items()}
        values = {parameter: value for parameter, (_, value) in parameters.items()}
        if defaults is None:
            values.setdefault("temperature", _DEFAULT_TEMPERATURE)
        values.setdefault("max_tokens", self.default_max_tokens)
        if values.get("top_p") == 0 and values.get("temperature") == 0:  # it says nothing then
            del values["top_p"]
        with naming_fields(names):
            return SamplingParams(**values), names
