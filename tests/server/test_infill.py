"""Holes in texts: ``suffix`` of completions, and llama.cpp's route for editors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foredraft.models.table import TableModel
from foredraft.models.text.infill import Infill
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.checkpoints import save_tokenizer
from tests.server.conftest import Running, loading, running
from tests.server.events import data_of

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
FILLED = "return a + b"


def with_tokens(directory: Path, *tokens: str) -> Tokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as FastTokenizer

    save_tokenizer(directory)
    path = directory / "tokenizer.json"
    fast = FastTokenizer.from_file(str(path))
    fast.add_tokens([AddedToken(token, special=False) for token in tokens])
    fast.save(str(path))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_tokens(tmp_path_factory.mktemp("fim"), *MARKS)


@pytest.fixture(scope="module")
def client(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    """A model that writes `FILLED` behind the mark of the middle, and then a file's mark."""
    middle = tokenizer.id_of("<|fim_middle|>")
    script = [*tokenizer.encode(FILLED, False), tokenizer.id_of("<|file_sep|>")]

    def conditional(context: tuple[int, ...]) -> list[float]:
        at = len(context) - 1 - max(i for i, token in enumerate(context) if token == middle)
        return [
            1.0 if each == script[min(at, len(script) - 1)] else 1e-9
            for each in range(tokenizer.vocab_size)
        ]

    load = loading(TableModel(tokenizer.vocab_size, conditional), tokenizer, drafter="suffix")
    with running(load) as server, server.client() as client:
        yield client


def test_the_order_of_the_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    marks = Infill.of(tokenizer)
    text = tokenizer.decode(marks.prompt(tokenizer, "def f", " end", "(a"), False)
    assert text == "<|fim_prefix|>def f(a<|fim_suffix|> end<|fim_middle|>"
    shown = marks.prompt(tokenizer, "x", "y", files=[("a.py", "import b")])
    assert tokenizer.decode(shown, False) == (
        "<|file_sep|>a.py\nimport b<|file_sep|>filename\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    turned = with_tokens(tmp_path, "[PREFIX]", "[SUFFIX]")
    found = Infill.of(turned)
    assert turned.decode(found.prompt(turned, "x", "y"), False) == "[SUFFIX]y[PREFIX]x"


def test_a_prompt_that_is_far_too_long_is_not_encoded_whole(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, encode = list[int](), Tokenizer.encode

    def noted(tokenizer: Tokenizer, text: str, *more: bool, **named: bool) -> list[int]:
        if len(text) > 100:  # not what grammars try while they read the vocabulary
            sizes.append(len(text))
        return encode(tokenizer, text, *more, **named)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    text = "a b " * 40_000
    for path, body in (
        ("/infill", {"input_prefix": "", "input_suffix": text}),
        ("/v1/completions", {"prompt": text, "suffix": "x"}),
    ):
        answer = client.post(path, json=body)
        assert "prompt is too long: " in answer.json()["error"]["message"]
    assert len(sizes) == 2
    assert max(sizes) < len(text) / 2


def test_suffix_of_completions(client: httpx.Client) -> None:
    body = {"prompt": "def add(a, b):\n    ", "suffix": "\n\nprint(add(1, 2))", "temperature": 0}
    choice = client.post("/v1/completions", json=body | {"max_tokens": 50}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (FILLED, "stop")
    refused = client.post("/v1/completions", json=body | {"echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_infill(client: httpx.Client) -> None:
    body = {
        "input_prefix": "def add(a, b):\n",
        "input_suffix": "\nprint(add(1, 2))",
        "prompt": "    ",
        "input_extra": [{"filename": "b.py", "text": "def sub(a, b): ..."}],
        "n_predict": 64,
        "temperature": 0,
        "cache_prompt": True,
    }
    answer = client.post("/infill", json=body)
    assert answer.headers["x-foredraft-ignored"] == "cache_prompt"
    assert answer.json()["content"] == FILLED
    assert answer.json()["stop_type"] == "eos"
    events = data_of(client.post("/infill", json=body | {"stream": True}))
    assert "".join(event["content"] for event in events) == FILLED
    assert [event["stop"] for event in events][-1] is True
    wrong = client.post("/infill", json=body | {"input_extra": [{"text": 3}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input_extra")


def test_models_without_the_tokens_say_so(shared: Running) -> None:
    with shared.client() as client:
        for path, body in (
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
            ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "fim_prefix" in answer.json()["error"]["message"]
