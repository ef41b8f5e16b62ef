"""Text to ids and back: whole characters only, chat templates, and clear errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, processors
from tokenizers.models import BPE

from foredraft.core.errors import ModelLoadError
from foredraft.models.text.prompts import checked_messages
from foredraft.models.text.tokenizer import Tokenizer, _StreamDecoder
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer, train_tokenizer

REPLACEMENT = "\ufffd"  # what decoders put in place of bytes that are no character


def save_byte_fallback(directory: Path) -> None:
    """A tokenizer whose rare characters are spelled in byte tokens, as sentencepiece's are."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "c", "é"]
    model = BPE(
        {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    fast = FastTokenizer(model)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    directory.mkdir(exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte-fallback")
    save_byte_fallback(path)
    return Tokenizer(path)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    decode = tokenizer.new_decoder()
    return [decode(token) for token in ids]


@given(st.text(max_size=30))
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.text(alphabet="aé東🦊 \n\u0301", max_size=20))
def test_streamed_pieces_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(piece or "" for piece in pieces) == text
    assert all(REPLACEMENT not in (piece or "") for piece in pieces)


def test_a_character_of_several_tokens_comes_with_its_last(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")
    assert len(ids) == 3
    assert stream(tokenizer, ids) == [None, None, "🦜"]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_any_ids_stream_to_the_text_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    text = "".join(piece or "" for piece in stream(tokenizer, ids))
    whole = tokenizer.decode(ids)
    assert whole.startswith(text)
    assert whole == text or whole.endswith(REPLACEMENT)  # an unfinished character is held back


@given(st.lists(st.integers(0, 261), max_size=20))
def test_stray_bytes_do_not_stop_a_stream(byte_fallback: Tokenizer, ids: list[int]) -> None:
    for piece in stream(byte_fallback, ids):
        assert piece is None or isinstance(piece, str)


def test_byte_tokens_make_whole_characters(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("🦜")
    assert len(ids) == 4
    assert stream(byte_fallback, ids) == [None, None, None, "🦜"]


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    [end] = tokenizer.encode("<|im_end|>")
    assert stream(tokenizer, [*tokenizer.encode("ok"), end])[-1] in (None, "")
    assert tokenizer.decode([end]) == ""


def test_batch_settings_of_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "tokenizer.json"))
    text = "The ferry crosses the river twice a day."
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


class Counting:
    """A tokenizer of the library that counts how many tokens it is given to decode."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast, self.num_decoded = fast, 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token: int) -> str | None:
        return self._fast.id_to_token(token)


@pytest.mark.parametrize("text", ["<|im_end|>", "\x80", "🦊", "a", None])
def test_a_long_stream_costs_as_much_per_token_as_a_short_one(
    tokenizer: Tokenizer, text: str | None
) -> None:
    """End-of-text for ever, bytes that are no character, ids without a token."""
    counting, num_tokens = Counting(tokenizer._fast), 5000
    token = VOCAB_SIZE + 5 if text is None else tokenizer.encode(text)[0]
    decode = _StreamDecoder(counting, tokenizer._special)  # type: ignore[arg-type]
    for _ in range(num_tokens):
        decode(token)
    assert counting.num_decoded < 150 * num_tokens
    assert (decode(tokenizer.encode("b")[0]) or "").endswith("b")


# Chat


def test_a_conversation_is_rendered_for_the_reply(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi!"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_conversations_in_the_form_of_openai(tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (system, assistant) = checked_messages(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    assert system == {"role": "system", "content": "Be brief."}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_where_a_template_may_lie(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "in the config")
    assert Tokenizer(tmp_path).chat_template == "in the config"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "for tools"},
        {"name": "default", "template": "by name"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).chat_template == "by name"
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert Tokenizer(tmp_path).chat_template == "in a file"


# Ends and identity


def test_every_end_of_text_id_is_found(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert Tokenizer(tmp_path).eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_text_that_is_no_token_id_is_refused(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path)
    for bad in ("2.0", '"2"', "true", "[2, -1]", "4294967296", "{}"):
        (tmp_path / name).write_text(f'{{"eos_token_id": {bad}}}')
        with pytest.raises(ModelLoadError, match=f"{name}: eos_token_id"):
            Tokenizer(tmp_path)
    for none in ("null", "-1", "[]"):
        (tmp_path / name).write_text(f'{{"eos_token_id": {none}}}')
        assert Tokenizer(tmp_path).eos_token_ids == (2,)


def test_fingerprints_tell_vocabularies_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_tokenizer(tmp_path / "same", chat_template=None)
    assert Tokenizer(tmp_path / "same").fingerprint == tokenizer.fingerprint
    save_tokenizer(tmp_path / "other")
    fast = train_tokenizer()
    fast.add_tokens(["<extra>"])
    fast.save(str(tmp_path / "other" / "tokenizer.json"))
    assert Tokenizer(tmp_path / "other").fingerprint != tokenizer.fingerprint
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json; save the tokenizer there"):
        Tokenizer(tmp_path)


def every_place(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value; of long lists and mappings the first few."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in [*items][:4]:
            yield from every_place(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with ``new`` at ``path``; left out there when it is `DROPPED`."""
    if not path:
        return new
    copy, (key, *rest) = value.copy(), path
    if new is DROPPED and not rest:
        del copy[key]
    else:
        copy[key] = changed(copy[key], tuple(rest), new)
    return copy


DROPPED = object()
WRONG = [DROPPED, None, True, -1, 0, 2**31, 2**40, 1e308, "", "x", "\x00", [], [None], {}, {"a": 1}]
CONFIG = {
    "bos_token": {"content": "<|im_start|>", "lstrip": False},
    "eos_token": "<|im_end|>",
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    "model_max_length": 100,
}


@pytest.fixture(scope="module")
def whole_files() -> dict[str, Any]:
    fast = train_tokenizer()
    fast.enable_truncation(5)
    fast.enable_padding(length=7)
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("ß", "ss")])
    fast.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", None, [("<|im_start|>", 1)]
    )
    return {
        "tokenizer.json": json.loads(fast.to_str()),
        "tokenizer_config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [2, 0]},
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
    }


def use_or_refuse(directory: Path) -> bool:
    """Whether the tokenizer there works; that, or a `ModelLoadError`, is all that may be."""
    try:
        tokenizer = Tokenizer(directory)
        assert isinstance(tokenizer.decode(tokenizer.encode("The ferry")), str)
        assert tokenizer.vocab_size
        assert tokenizer.fingerprint
        assert len(stream(tokenizer, [0, 1, 2, 50, 10**9])) == 5
        if tokenizer.chat_template is not None:
            tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}])
    except ModelLoadError as error:
        return directory.name not in str(error)
    return True


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_files_give_a_tokenizer_or_a_clear_refusal(
    tmp_path: Path, whole_files: dict[str, Any], data: st.DataObject
) -> None:
    contents = dict(whole_files)
    name = data.draw(st.sampled_from(sorted(contents)))
    path = data.draw(st.sampled_from([*every_place(contents[name])][1:]))
    contents[name] = changed(contents[name], path, data.draw(st.sampled_from(WRONG)))
    for file, content in contents.items():
        (tmp_path / file).write_text(json.dumps(content))
    use_or_refuse(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
)
def test_cut_and_foreign_files_are_refused(
    tmp_path: Path, whole_files: dict[str, Any], name: str
) -> None:
    for file, content in whole_files.items():
        (tmp_path / file).write_text(json.dumps(content))
    assert use_or_refuse(tmp_path)
    whole = json.dumps(whole_files.get(name, {}))
    bad = [b"\xff\xfe", b"{{"]
    if name.endswith("json"):
        bad += [b"", b"[]", b"null", b"[" * 100_000, whole[: len(whole) // 2].encode()]
    for content in bad:
        (tmp_path / name).write_bytes(content)
        assert not use_or_refuse(tmp_path), content[:20]
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert not use_or_refuse(tmp_path)


def test_others_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """The server's event loop is one of them."""
    text = "The ferry crosses the river. " * 20_000
    ids = tokenizer.encode(text)
    user = [{"role": "user", "content": text}]
    for work in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_chat(user),
        lambda: tokenizer.decode([*ids, *ids, *ids]),
    ):
        assert num_turns_during(work) > 3


def num_turns_during(work: Callable[[], object]) -> int:
    """How often this thread gets to run while another one works."""
    states: list[str] = []

    def run() -> None:
        states.append("begun")
        work()
        states.append("over")

    thread, turns = threading.Thread(target=run), 0
    thread.start()
    while len(states) < 2:
        turns += len(states)
        time.sleep(0.0005)
    thread.join()
    return turns


def save_files(directory: Path, **contents: Any) -> Tokenizer:
    """A tokenizer with these files beside it, ``__`` in place of the dot of their names."""
    train_tokenizer().save(str(directory / "tokenizer.json"))
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer(directory)


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
HI = [{"role": "user", "content": "Hi"}]


def test_a_conversation_with_tools_has_the_template_for_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    tokenizer = save_files(tmp_path, tokenizer_config={"chat_template": templates})
    assert tokenizer.decode(tokenizer.encode_chat(HI)) == "Hi"
    assert tokenizer.decode(tokenizer.encode_chat(HI, TOOLS)) == "look"


def test_special_tokens_of_an_old_repository_are_in_a_map(tmp_path: Path) -> None:
    """The map counts where ``tokenizer_config.json`` has no added tokens, as in transformers."""
    template = {"chat_template": "{{ eos_token }}"}
    map_of = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    tokenizer = save_files(tmp_path, tokenizer_config=template, special_tokens_map=map_of)
    assert tokenizer.encode_chat(HI) == list(tokenizer.eos_token_ids) == [2]
    newer = template | {"added_tokens_decoder": {}, "eos_token": "<|im_start|>"}
    tokenizer = save_files(tmp_path, tokenizer_config=newer, special_tokens_map=map_of)
    assert tokenizer.eos_token_ids == (1,)


def test_a_template_of_a_processor_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    of_processor = {"chat_template": "processor"}
    tokenizer = save_files(tmp_path, chat_template=of_processor)
    assert tokenizer.chat_template == "processor"
    own = {"chat_template": "own"}
    tokenizer = save_files(tmp_path, chat_template=of_processor, tokenizer_config=own)
    assert tokenizer.chat_template == "own"


def test_options_that_transformers_ignores_beside_a_tokenizer_json_change_nothing(
    tmp_path: Path,
) -> None:
    """From 5.24 on it takes `add_bos_token` from no file where there is a ``tokenizer.json``."""
    from transformers import PreTrainedTokenizerFast

    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    options = named | {"add_bos_token": True, "add_eos_token": True}
    tokenizer = save_files(tmp_path, tokenizer_config=options)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.encode("The ferry") == theirs("The ferry")["input_ids"]
