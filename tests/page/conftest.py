"""A served page over a model of tables, and over the default model for the browser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI

from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from foredraft.server.page_routes import include_page
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@dataclass
class Context:
    """What the page needs of a server."""

    llm: LLM

    def tenant(self, key_id: str | None, salt: object) -> str | None:
        return key_id


def page_app(llm: LLM) -> FastAPI:
    app = FastAPI()
    include_page(app, Context(llm))
    return app


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tmp_path_factory.mktemp("page") / "tiny"
    save_tokenizer(directory, TEMPLATE)
    target = TableModel.random(VOCAB_SIZE, seed=5, order=1, sharpness=6.0)
    return LLM(target, Tokenizer(directory), LoadOptions(drafter="suffix"))
