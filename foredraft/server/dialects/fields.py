"""What a request body in OpenAI's dialect may hold: honoured, a hint, or refused by name.

`docs/operate/server.md` shows the three lists, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from foredraft.core.errors import ConfigError

Body = Mapping[str, Any]
"""Plain data, as `json.loads` makes it."""
Route = Literal["chat", "completions"]

SAME_NAME = (
    *("temperature", "top_p", "min_p", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "n", "bad_words"),
    *("allowed_token_ids", "coupling"),
)
"""Fields that `SamplingParams` has under the same name."""
RENAMED = (
    *("top_k", "seed", "max_tokens", "max_completion_tokens", "logit_bias", "logprobs"),
    *("include_stop_str_in_output", "response_format", "structured_outputs", "prediction"),
)
"""Fields that become a parameter of another name or form."""
HONOURED: Mapping[Route, tuple[str, ...]] = {
    "chat": (
        *SAME_NAME,
        *RENAMED,
        *("model", "messages", "stream", "stream_options", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "cache_salt", "priority"),
    ),
    "completions": (
        *SAME_NAME,
        *RENAMED,
        *("model", "prompt", "stream", "stream_options", "echo", "cache_salt", "priority"),
        *("add_special_tokens",),
    ),
}
HINTS = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("service_tier", "reasoning_effort", "verbosity", "include_reasoning", "request_id"),
)
"""Fields that cannot change a reply here. They are named in a header of the response."""

_VLLM_GUIDED = "use response_format or structured_outputs"
Refusals = Mapping[str, tuple[str, tuple[Any, ...]]]

REFUSED: Refusals = {
    "audio": ("text is all there is here", ()),
    "modalities": ("text is all there is here", (["text"],)),
    "web_search_options": ("this server makes no requests of its own", ()),
    "functions": ("use tools", ()),
    "function_call": ("use tool_choice", ("none", "auto")),
    "store": ("nothing is stored", (False,)),
    "best_of": ("ask for n replies and choose yourself", (1,)),
    "suffix": ("text is only continued, not filled in", ("",)),
    "use_beam_search": ("beam search is not sampling from the model", (False,)),
    "beam_width": ("beam search is not sampling from the model", ()),
    "length_penalty": ("beam search is not sampling from the model", (1, 1.0)),
    "chat_template": ("a template is a program; the model's own is used", ()),
    "chat_template_kwargs": ("the model's template is used as it is", ({},)),
    "documents": ("put them into a message", ([],)),
    "add_generation_prompt": ("a reply always begins anew", (True,)),
    "continue_final_message": ("a reply always begins anew; use /v1/completions", (False,)),
    "skip_special_tokens": ("special tokens are no text", (True,)),
    "spaces_between_special_tokens": ("special tokens are no text", (True, False)),
    "prompt_logprobs": ("use /v1/completions with echo and logprobs", ()),
    "truncate_prompt_tokens": ("shorten the prompt yourself", ()),
    "prompt_embeds": ("prompts are text or token ids", ()),
    "return_tokens_as_token_ids": ("tokens are written as their text", (False,)),
    "logits_processors": ("code does not come with a request", ([],)),
    "mm_processor_kwargs": ("text is all there is here", ({},)),
    "kv_transfer_params": ("there is one machine here", ()),
    "vllm_xargs": ("it belongs to another engine", ({},)),
    "repetition_detection": ("use stop, or a penalty", ()),
    "guided_json": (_VLLM_GUIDED, ()),
    "guided_regex": (_VLLM_GUIDED, ()),
    "guided_choice": (_VLLM_GUIDED, ()),
    "guided_grammar": (_VLLM_GUIDED, ()),
    "guided_decoding_backend": (_VLLM_GUIDED, ()),
}
"""Fields that would change a reply and cannot be honoured: why, and the values that ask nothing."""


class FieldError(ConfigError):
    """A field of a request that cannot be used as given.

    Args:
        field: its name, as the client wrote it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field=field)


def ignored(body: Body, route: Route) -> list[str]:
    """Fields of a body without effect: hints, and names that nobody knows."""
    return ignored_but(body, {*HONOURED[route], *REFUSED})


def given(body: Body, name: str, default: Any = None) -> Any:
    """A field's value; null counts as left out, as it does for OpenAI."""
    value = body.get(name)
    return default if value is None else value


def ignored_but(body: Body, known: Iterable[str]) -> list[str]:
    """Fields of a body beside the known ones."""
    return sorted({*body} - {*known})


def refuse_named(body: Body, refused: Refusals) -> None:
    """Refuse the fields of a dialect that cannot be honoured.

    Args:
        refused: by name why, and the values that ask nothing.

    Raises:
        FieldError: one is there.
    """
    for name, (reason, harmless) in refused.items():
        value = given(body, name)
        if value is not None and not any(_same(value, each) for each in harmless):
            raise not_supported(name, reason)


def not_supported(name: str, reason: str) -> FieldError:
    return FieldError(name, f"{name} is not supported: {reason}")


def refuse(body: Body, route: Route) -> None:
    """Refuse what chat or completions cannot honour.

    Raises:
        FieldError: one such field is there.
    """
    is_best_of_n = _same(body.get("best_of"), given(body, "n", 1))
    unheeded = {*HONOURED[route], *(("best_of",) if is_best_of_n else ())}
    refuse_named(body, {name: why for name, why in REFUSED.items() if name not in unheeded})
    if route == "chat" and given(body, "echo", False) is not False:
        raise not_supported("echo", "use /v1/completions")


def _same(left: object, right: object) -> bool:
    """Equal as JSON: 0 is not false, nor 1 true."""
    return type(left) is type(right) and left == right
