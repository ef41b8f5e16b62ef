"""`foredraft drafters`: every drafter is listed, with what it needs and its options."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.core.errors import ConfigError
from foredraft.drafters import drafter_spec, usable_specs


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["drafters", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_every_drafter_is_listed() -> None:
    listed = run()
    for name, spec in usable_specs().items():
        assert name in listed
        assert spec.summary.split(" (")[0] in listed


def test_one_drafter_is_shown_with_its_options() -> None:
    shown = run("draft-model")
    assert "needs a draft model" in shown
    for option in drafter_spec("draft_model").options:
        assert option in shown


def test_json_has_all_of_it() -> None:
    listed = json.loads(run("--json"))
    assert listed["suffix"]["copies"]
    assert listed["none"]["options"] == {}
    assert listed["hidden_head"]["trainable"]
    (need,) = listed["blend"]["needs"]
    assert need.startswith("a trained hidden_head")
    assert [*json.loads(run("ngram", "--json"))] == ["ngram"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["drafters", "sufix"])
    assert isinstance(result.exception, ConfigError)
    assert "did you mean 'suffix'" in str(result.exception)
