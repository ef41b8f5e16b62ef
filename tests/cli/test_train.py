"""`foredraft train` on a tiny checkpoint: writes its text, trains, goes on, and is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli.main import app
from foredraft.cli.options import parse_count
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.train.folder import alone_in, read_counters
from foredraft.train.texts import read_texts, write_shard
from foredraft.train.writing import engine_replies
from tests.train.helpers import some_texts

SMALL = (
    *("--batch-tokens", "512", "--sequence", "64", "--depth", "2", "--set", "output_rows=64"),
    *("--evaluations", "1"),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_TIMING_LOCK", str(tmp_path / "lock"))
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments])


def done(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_text_is_written_and_gone_on_with(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "category": "c", "turns": [f"The river {n}"]} for n in range(5)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    common = ("write-text", "--target", str(checkpoint), "--out", str(tmp_path / "texts"))
    options = ("--prompts", str(prompts), "--max-tokens", "6", "--temperature", "0,1")
    done(*common, *options, "--tokens", "100")
    first = read_texts(tmp_path / "texts")
    assert {text.temperature for text in first} == {0.0, 1.0}
    done(*common, *options, "--tokens", "1k")
    more = read_texts(tmp_path / "texts")
    assert len(more) > len(first)
    assert len({text.number for text in more}) == len(more)


def test_a_head_is_trained_and_gone_on_with(checkpoint: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "texts", some_texts())
    common = ("hidden_head", "--target", str(checkpoint), "--data", str(tmp_path / "texts"))
    common = (*common, "--out", str(tmp_path / "head"), *SMALL)
    result = done(*common, "--tokens", "2k")
    assert "tokens a step" in result.output
    before = (tmp_path / "head" / "head.json").read_text()
    done(*common, "--tokens", "3k")
    head = json.loads((tmp_path / "head" / "head.json").read_text())
    assert head["kind"] == "hidden_head"
    assert len(head["measured"]["greedy"]) == 2
    # A head that has learnt more and is no better does not take the place of the one that is there.
    learnt = head["provenance"]["tokens learnt from"]
    assert learnt >= 3000 or (tmp_path / "head" / "head.json").read_text() == before


def test_a_table_is_learnt_and_drafted_from(checkpoint: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "texts", some_texts())
    common = ("--target", str(checkpoint), "--data", str(tmp_path / "texts"))
    out = str(tmp_path / "table")
    result = done("table", *common, "--out", out, "--megabytes", "1")
    assert "named right" in result.output
    drafting = ("--drafter", "table", "--drafter-option", f"head={out}", "--max-tokens", "4")
    words = ["generate", "a b", "--model", str(checkpoint), "--dtype", "float32", *drafting]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere", "--tokens", "1k"), "no such folder"),
        (("--data", "nowhere"), "how long"),
        (("--data", "nowhere", "--tokens", "many"), "no number"),
        (("--data", "nowhere", "--tokens", "1k", "--loss", "sotf"), "did you mean 'soft'"),
        (("--data", "nowhere", "--tokens", "1k", "--option", "tap=3"), "did you mean 'taps'"),
    ],
)
def test_mistakes_are_explained(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    out = ("--target", str(checkpoint), "--out", str(tmp_path / "head"))
    result = run("hidden_head", *out, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize("command", ["hidden_head", "table", "write-text"])
def test_two_trainings_do_not_write_into_one_folder(
    checkpoint: Path, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "head"
    arguments = (command, "--target", str(checkpoint), "--out", str(out), "--tokens", "1k")
    if command == "table":
        arguments = (*arguments[:-2], "--replace")
    with alone_in(out):
        other = run(*arguments)
    assert isinstance(other.exception, ConfigError)
    assert "another process is training in" in str(other.exception)
    assert not out.exists()
    with alone_in(out):  # a refused run holds no lock
        pass


def test_a_finished_head_is_refused_or_kept_aside(checkpoint: Path, tmp_path: Path) -> None:
    write_shard(tmp_path / "texts", some_texts())
    out, data = tmp_path / "head", ("--data", str(tmp_path / "texts"))
    common = ("hidden_head", "--target", str(checkpoint), *data, "--out", str(out), *SMALL)
    assert run(*common, "--tokens", "1k").exit_code == 0
    shutil.rmtree(out / "training")
    before = (out / "weights.safetensors").read_bytes()
    # Nothing is loaded or written for it: the target does not even exist.
    refused = run("medusa", "--target", "nowhere", "--out", str(out), "--tokens", "1k")
    assert isinstance(refused.exception, ConfigError)
    assert "finished head of kind 'hidden_head'" in str(refused.exception)
    table = run("table", "--target", str(checkpoint), *data, "--out", str(out))
    assert isinstance(table.exception, ConfigError)
    assert (out / "weights.safetensors").read_bytes() == before
    result = done(*common, "--tokens", "1k", "--replace")
    assert "head.old-1" in result.output
    assert (tmp_path / "head.old-1" / "weights.safetensors").read_bytes() == before


def test_a_base_model_is_trained_on_text_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    common = ("hidden_head", "--target", str(base), "--out", str(tmp_path / "head"), *SMALL)
    done(*common, "--text-tokens", "3k", "--tokens", "1k")
    assert read_texts(tmp_path / "head" / "training" / "texts-self")
    assert (tmp_path / "head" / "head.json").exists()


def test_text_is_written_in_a_short_context(checkpoint: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "texts"), "--tokens", "2k", "--set", "max_context=128")
    done("write-text", "--target", str(checkpoint), *out)
    assert max(len(text.prompt_ids) for text in read_texts(tmp_path / "texts")) <= 64


@pytest.mark.slow
def test_training_keeps_to_its_minutes(checkpoint: Path, tmp_path: Path) -> None:
    """It writes as much text as there is time for, reads it, and learns from it."""
    common = ("hidden_head", "--target", str(checkpoint), "--out", str(tmp_path / "head"), *SMALL)
    result = done(*common, "--minutes", "0.1")
    assert "same command goes on" not in result.output
    written = sum(len(t.reply_ids) for t in read_texts(tmp_path / "head/training/texts-self"))
    assert 1000 <= written < 1_000_000
    counters = read_counters(tmp_path / "head")
    assert counters.seconds + counters.measuring_s > 0
    assert counters.prepared_s > 0


def test_a_stop_is_heeded_while_replies_are_written(checkpoint: Path) -> None:
    llm = LLM.load(str(checkpoint), drafter="none", dtype="float32")
    steps: list[int] = []
    requests = {n: ((5, 6), SamplingParams(max_tokens=200)) for n in range(3)}
    replies = engine_replies(llm, lambda: steps.append(0), lambda: len(steps) >= 5, requests)
    assert len(list(replies)) < 3
    assert len(steps) == 5
    assert not llm.engine.has_work


def test_counts() -> None:
    assert [parse_count(text) for text in ("7", "2k", "1.5M")] == [7, 2000, 1_500_000]
