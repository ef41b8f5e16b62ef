"""The forms in which models write thoughts and tool calls: one file a family.

A format is chosen by the marks in a model's chat template, or named by the operator.
"""

from __future__ import annotations

import re

from foredraft.core.errors import unknown
from foredraft.server.formats.base import Format
from foredraft.server.formats.deepseek import DeepSeek, DeepSeekV3
from foredraft.server.formats.gemma import FunctionGemma, Gemma4
from foredraft.server.formats.gpt_oss import GptOss
from foredraft.server.formats.granite import Granite
from foredraft.server.formats.hermes import Hermes
from foredraft.server.formats.lfm2 import Lfm2, Lfm25
from foredraft.server.formats.llama3_json import Llama3Json
from foredraft.server.formats.mistral import MistralTekken, MistralV3
from foredraft.server.formats.phi4_mini import Phi4Mini
from foredraft.server.formats.qwen3_coder import Glm, Qwen3Coder, SeedOss

FORMATS: tuple[type[Format], ...] = (
    *(GptOss, Gemma4, FunctionGemma, DeepSeekV3, DeepSeek, MistralTekken, MistralV3),
    *(Phi4Mini, SeedOss, Glm, Qwen3Coder, Hermes, Lfm25, Lfm2, Granite, Llama3Json),
)
"""In the order in which templates are asked: the marks of some are among those of others."""


def format_of(template: str | None, name: str = "auto") -> Format:
    """The format of a model's replies.

    Args:
        template: its chat template, the one for tools where there is one.
        name: of a format; "auto": the marks in the template say which.

    Raises:
        ConfigError: there is no format of that name.
    """
    every: tuple[type[Format], ...] = (*FORMATS, Format)
    named = {each.name: each for each in every}
    if name != "auto":
        if name not in named:
            raise unknown("tool format", name, ["auto", *named])
        return named[name]()
    source = template or ""
    return next((f() for f in FORMATS if all(shown in source for shown in f.shows)), Format())


def takes_tools(form: Format, template: str | None) -> bool:
    """Whether the chat template shows tools, in a form whose calls are read."""
    return bool(form.begins) and re.search(r"\btools\b", template or "") is not None
