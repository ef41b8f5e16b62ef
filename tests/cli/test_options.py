"""Options derive from the classes they fill: one list of names, types, defaults and texts."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from foredraft.cli import options as o
from foredraft.cli.main import COMMANDS, app
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions
from foredraft.server.settings import ServerSettings


@dataclass(frozen=True)
class Tea:
    """How to make it.

    Attributes:
        kind: of the leaves.
        minutes: to wait.
        with_milk: added last.
        guests: each by name; may be
            repeated.
        extras: whatever else.
    """

    kind: str = "green"
    minutes: float | None = None
    with_milk: bool = False
    guests: str | Sequence[str] = ()
    extras: Mapping[str, Any] = ()  # type: ignore[assignment]
    cup: object = None


_AS_IT_IS = o.Derived()


def made(*arguments: str, derived: o.Derived = _AS_IT_IS) -> tuple[Any, Result]:
    """The object that a command gets for these arguments."""
    got: list[Any] = []

    def command(tea: Tea, water: str = "hot") -> None:
        got.extend((tea, water))

    command.__annotations__["tea"] = Annotated[Tea, derived]
    program = typer.Typer(add_completion=False)
    program.command()(o.with_options(command))
    result = CliRunner().invoke(program, [*arguments])
    return (got[0] if got else None), result


def test_fields_become_options_with_their_types() -> None:
    given = (
        "--kind",
        "black",
        "--minutes",
        "3.5",
        "--with-milk",
        "--guest",
        "Ann",
        "--guest",
        "Bo",
    )
    tea, _ = made(*given, "--extra", "sugar-cubes=2", "--extra", "spoon=silver")
    extras = {"sugar_cubes": 2, "spoon": "silver"}
    assert tea == Tea("black", 3.5, True, ("Ann", "Bo"), extras)
    assert made()[0] == Tea()
    assert made("--no-with-milk")[0] == Tea()
    assert "--cup" not in made("--help")[1].output, "no command line can say what it is"


def test_help_texts_and_defaults_are_the_fields_own() -> None:
    shown = " ".join(made("--help")[1].output.replace("│", " ").split())
    assert "Of the leaves. [default: (green)]" in shown
    assert "Each by name; may be repeated." in shown


def test_a_command_decides_some_itself() -> None:
    derived = o.Derived(fixed={"kind": "white"}, defaults={"minutes": 7.0}, without=("guests",))
    assert made(derived=derived)[0] == Tea("white", 7.0)
    assert made("--minutes", "1", derived=derived)[0] == Tea("white", 1.0)
    assert made("--kind", "black", derived=derived)[1].exit_code == 2
    assert made("--guest", "Ann", derived=derived)[1].exit_code == 2


def test_names_and_parsers() -> None:
    derived = o.Derived(names={"minutes": "--wait"}, parsers={"minutes": lambda text: 60.0})
    assert made("--wait", "an hour", derived=derived)[0] == Tea(minutes=60.0)


def test_a_mapping_is_explained() -> None:
    assert isinstance(made("--extra", "sugar")[1].exception, ConfigError)
    assert "--extra 'sugar' is not NAME=VALUE" in str(made("--extra", "sugar")[1].exception)


@pytest.mark.parametrize("cls", [LoadOptions, SamplingParams, ServerSettings])
def test_every_field_is_documented(cls: type[Any]) -> None:
    """Help texts come from docstrings, so every field needs one."""
    names = cls.model_fields if hasattr(cls, "model_fields") else [f.name for f in fields(cls)]
    assert not {*names} - {*o.docs_of_fields(cls)}


def options_of(name: str) -> dict[str, Any]:
    command = COMMANDS[name].load(name)
    return {flag: each for each in command.params for flag in each.opts}


def test_every_load_option_is_an_option_of_generate_and_serve() -> None:
    for command, own in (("generate", {"max_batch_size"}), ("serve", set[str]())):
        for name, flag in o.flags(LoadOptions, o.Derived()).items():
            assert (flag in options_of(command)) == (name not in own), (command, flag)


def test_every_setting_of_the_server_is_an_option_of_serve_but_its_key() -> None:
    known = options_of("serve")
    flags = o.flags(ServerSettings, o.Derived())
    assert {name for name, flag in flags.items() if flag not in known} == {
        *("api_key", "request_metrics")  # a secret; and one that is called as vLLM does
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_is_the_first_sentence_of_the_help(name: str) -> None:
    command = COMMANDS[name].load(name)
    text = " ".join(str(command.help).split())
    assert text.startswith(COMMANDS[name].summary), text


def test_help_imports_neither_the_engine_nor_the_server() -> None:
    heavy = ["torch", "numpy", "transformers", "pydantic", "fastapi", "uvicorn", "tokenizers"]
    heavy += ["huggingface_hub", "foredraft.llm", "foredraft.options", "foredraft.cli.generate"]
    code = (
        "import sys\n"
        "from foredraft.cli.main import app\n"
        "try:\n    app(['--help'])\n"
        "finally:\n    print([m for m in sys.argv[1:] if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "generate" in done.stdout
    assert done.stderr.strip() == "[]"


def test_help_of_every_command_is_complete() -> None:
    for name in COMMANDS:
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0, name


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_model_loads(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Afterwards it is, also where loading fails; what was loaded is left alone."""

    def load(**options: Any) -> str:
        assert not gc.isenabled()
        if fails:
            raise ConfigError("no such model")
        return "loaded"

    monkeypatch.setattr("foredraft.llm.LLM.load", load)
    frozen = gc.get_freeze_count()
    try:
        if fails:
            with pytest.raises(ConfigError):
                o.load_llm(LoadOptions())
        else:
            assert o.load_llm(LoadOptions()) == "loaded"  # type: ignore[comparison-overlap]
        assert gc.isenabled()
        assert (gc.get_freeze_count() > frozen) is not fails
    finally:
        gc.unfreeze()
