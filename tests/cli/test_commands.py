"""The commands, run on a tiny checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from foredraft.bench.measure import MeasuredRun
from foredraft.cli.generate import _report
from foredraft.cli.main import app
from foredraft.core.errors import ConfigError, PromptError
from foredraft.core.record import SpeculationStats
from foredraft.kernels import build
from foredraft.kernels.instructions import available
from foredraft.system.extras import EXTRAS
from foredraft.system.paths import cache_root
from tests.cli.conftest import Run


def test_generate_streams_the_text(run: Run) -> None:
    plain = run("generate", "The ferry", "--max-tokens", "12", "--drafter", "none")
    drafted = run("generate", "The ferry", "--max-tokens", "12", "--drafter", "ngram")
    assert plain.exit_code == drafted.exit_code == 0
    assert plain.stdout == drafted.stdout
    assert "12 tokens in 12 steps" in plain.stderr


def test_it_is_said_why_nothing_was_drafted(run: Run) -> None:
    def said(*options: str) -> str:
        result = run("generate", "The ferry", "--max-tokens", "5", *options)
        return str(result.stderr.splitlines()[-1])  # a line of a log is not wrapped

    assert "nothing was drafted: plain decoding was asked for" in said("--drafter", "none")
    assert "nothing was drafted: plain decoding" in said("--num-draft-tokens", "0")
    long = ("--drafter-option", "min-ngram-size=9", "--drafter-option", "max-ngram-size=9")
    found = said("--drafter", "ngram", "--num-draft-tokens", "3", *long)
    assert "nothing was drafted: nothing to propose" in found


def test_generate_json_holds_everything(run: Run) -> None:
    asked = ("a b a b a b", "--max-tokens", "9", "--seed", "3", "--drafter", "suffix")
    result = run("generate", *asked, "--json")
    report = json.loads(result.stdout)
    assert report["drafter"] == "suffix"
    assert report["seed"] == 3
    stats = report["stats"]
    assert stats["committed"] == len(report["token_ids"])
    assert stats["drafted"] == stats["accepted"] + stats["rejected"] + stats["discarded"]


def test_the_one_that_drafted_most_is_named() -> None:
    """Not the one that was loaded first: it said "table" where all drafts were the copy's."""
    stats = SpeculationStats(drafters={"table": 2, "self_draft": 40})
    result = SimpleNamespace(stats=stats, text="", token_ids=(), error=None, seed=1)
    result.num_prompt_tokens, result.finish_reason = 3, "stop"
    run = SimpleNamespace(result=result, first_event_s=0.0, total_s=0.0, tokens_per_s=0.0)
    llm = SimpleNamespace(plan=None, drafter_name="table")
    assert _report(cast(Any, llm), cast(Any, run), "a")["drafter"] == "self_draft"


def test_generate_reads_standard_input(run: Run) -> None:
    piped = run("generate", "-", "--max-tokens", "4", "--json", input="The ferry")
    given = run("generate", "The ferry", "--max-tokens", "4", "--json")
    assert json.loads(piped.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]


def test_standard_input_that_is_not_text_is_said(checkpoint: Path) -> None:
    arguments = ["generate", "-", "--model", str(checkpoint), "--dtype", "float32"]
    error = CliRunner().invoke(app, arguments, input=b"ferry \xff").exception
    assert "the prompt on standard input is not UTF-8 (byte 0xff at 6)" in str(error)
    error = CliRunner().invoke(app, ["generate"], input="The ferry").exception
    assert isinstance(error, ConfigError)
    assert "'-' for standard input" in str(error)


def test_generate_passes_drafter_options_on(run: Run) -> None:
    ngram = ("generate", "x", "--max-tokens", "3", "--drafter", "ngram", "--drafter-option")
    assert run(*ngram, "max-ngram-size=3").exit_code == 0
    wrong = run(*ngram, "max_ngram_sise=3")
    assert isinstance(wrong.exception, ConfigError)
    assert "max_ngram_size" in str(wrong.exception)


def test_unknown_options_and_commands_name_the_nearest() -> None:
    option = CliRunner().invoke(app, ["generate", "x", "--temprature", "1"])
    assert option.exit_code == 2
    assert "--temperature" in option.output
    command = CliRunner().invoke(app, ["generat"])
    assert command.exit_code == 2
    assert "generate" in command.output


@pytest.mark.parametrize("name", ["missing.gguf", "org/missing.GGUF"])
def test_no_such_file(name: str) -> None:
    error = CliRunner().invoke(app, ["generate", "x", "--model", name]).exception
    assert isinstance(error, ConfigError)
    assert f"no such file: '{name}'" in str(error)


def test_more_context_than_the_model_has_is_said(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run("generate", "The", "--max-context", "100000", "--max-tokens", "2").exit_code == 0
    assert "max_context is 100000, and the model takes 2048: 2048 it is" in caplog.text
    longer = run("generate", "The ferry crosses", "--max-context", "2", "--max-tokens", "3")
    assert isinstance(longer.exception, PromptError)
    assert "context" in str(longer.exception)


def test_doctor_prints_the_plan(run: Run) -> None:
    report = json.loads(run("doctor", "--json", "--tokens", "100").stdout)
    target = report["models"]["target"]
    assert target["dtype"] == "float32"
    parts = [target[f"{part}_bytes"] for part in ("weight", "cache", "work")]
    assert all(parts[:2])
    assert target["memory_bytes"] == sum(parts)
    kept = report["cache"]
    assert kept.pop("folder") == str(cache_root())
    assert all(size >= 0 and name.endswith("_bytes") for name, size in kept.items())
    shown = " ".join(run("doctor").stdout.split())
    assert "dtype float32 cache dtype float32" in shown
    assert "models target name" in shown
    assert "cache limit" in shown


def test_doctor_says_what_a_step_reads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(*options: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(run("doctor", "--json", *options).stdout)
        return dict(report["models"]["target"])

    in_4_bits = target("--weights", "int4")
    assert target()["in_4_bits"] == {"read_bytes": in_4_bits["read_bytes"], "as_it_comes": False}
    assert in_4_bits["in_4_bits"] is None
    assert in_4_bits["read_bytes"] < target()["read_bytes"]
    monkeypatch.setattr("foredraft.models.native.source_blocks.has_blocks", lambda _: True)
    assert "as it comes yes" in " ".join(run("doctor").stdout.split())
    monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    assert target()["in_4_bits"] is None


def test_doctor_names_the_instructions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_KERNELS", "portable")
    machine = json.loads(run("doctor", "--json").stdout)["machine"]
    assert machine["instructions"] == "portable"
    better = [one.name for one in available()[:-1]]
    assert machine["instructions_unused"][: len(better)] == better
    assert machine["kernels_from"] == "this machine's compiler"
    monkeypatch.setenv("FOREDRAFT_KERNELS", "off")
    shown = " ".join(run("doctor").stdout.split())
    assert "instructions none" in shown
    assert "kernels from none" in shown


def test_doctor_says_how_to_get_a_compiler(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for known in (build._load, build._load_best):
        known.cache_clear()
    [note] = json.loads(run("doctor", "--json").stdout)["models"]["target"]["notes"]
    command = "apt install g++" if os.geteuid() == 0 else "sudo apt install g++"
    assert note == (
        "no fused CPU kernel, so torch runs its steps, slower: no C++ compiler found; "
        f"install one with: {command}"
    )
    assert "missing: no fused CPU kernel" in run("doctor").stdout


def test_doctor_lists_what_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.system.machine.package_version", lambda name: None)
    shown = " ".join(run("doctor").stdout.split())
    for package, (extra, purpose) in EXTRAS.items():
        assert f"not installed: {package}, for {purpose}: pip install 'foredraft[{extra}]'" in shown
    assert "nothing is missing" not in shown
    monkeypatch.setattr("foredraft.system.machine.package_version", lambda name: "1")
    assert "not installed" not in run("doctor").stdout


def test_models_are_listed_described_and_removed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    model = tmp_path / "models" / "gguf-tiny-1"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    layout = tmp_path / "kept" / "0a1b"
    layout.mkdir(parents=True)
    (layout / "model").write_text(str(model))
    (layout / "weights").write_bytes(bytes(2_000_000))

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["models", *arguments])

    listed = {
        (each["model"], each["kind"]): each for each in json.loads(invoke("list", "--json").stdout)
    }
    assert not listed["smollm2-135m-instruct", "packaged"]["is_here"]
    assert listed["gguf-tiny-1", "layout"]["num_bytes"] > 2_000_000
    assert "downloaded by its first use" in " ".join(invoke("list").stdout.split())
    about = json.loads(invoke("show", str(checkpoint), "--json").stdout)
    assert (about["family"], about["layers"], about["max_context"]) == ("llama", 3, 2048)
    assert "family llama" in " ".join(invoke("show", str(checkpoint)).stdout.split())
    wrong = invoke("rm", "gguf-tiny-2").exception
    assert "did you mean 'gguf-tiny-1'" in str(wrong)
    assert invoke("rm", "gguf-tiny-1").stdout.count("deleted") == 2
    assert not model.exists()
    assert not layout.exists()


def test_demo_proves_that_texts_are_identical(run: Run) -> None:
    result = run("demo", "--max-tokens", "6")
    assert result.exit_code == 0
    assert result.stdout.count("identical: sha256") == 3


def test_demo_fails_when_a_text_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter("abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setattr(MeasuredRun, "sha256", property(lambda run: next(digests)))
    result = run("demo", "--max-tokens", "4")
    assert result.exit_code == 1
    assert "DIFFERENT" in result.stdout


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("foredraft ")


def test_a_prediction_speeds_up_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    asked = ("generate", "The ferry", "--max-tokens", "16", "--json", "--set", "calibrate=false")
    plain = json.loads(run(*asked, "--drafter", "none").stdout)
    path = tmp_path / "expected.txt"
    path.write_text(plain["text"], encoding="utf-8")
    predicted = json.loads(run(*asked, "--prediction", str(path)).stdout)
    assert predicted["drafter"] == "prediction"
    assert predicted["token_ids"] == plain["token_ids"]
    assert predicted["stats"]["drafted"] > 0
    asked = (*asked, "--drafter", "ngram")  # one that drafts without it
    assert json.loads(run(*asked, "--prediction", str(path)).stdout)["drafter"] == "prediction"
    for name, *asked_for in (("none", "--drafter", "none"), ("off", "--set", "speculation=off")):
        refused = run(*asked[:-2], "--prediction", str(path), *asked_for).exception
        assert isinstance(refused, ConfigError)
        assert f"--prediction is of no use with drafter {name!r}" in str(refused)
    result = run("generate", "x", "--prediction", "no/such/file")
    assert isinstance(result.exception, ConfigError)
    assert "the prediction no/such/file cannot be read" in str(result.exception)
