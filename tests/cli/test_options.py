"""Options derive from the classes they fill: one list of names, types, defaults and texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from foredraft.cli import options as o
from foredraft.cli.main import COMMANDS, RENAMED, app, exit_with_message
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions
from foredraft.server.settings import ServerSettings
from tests.server.test_access import VALUES


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


def test_a_field_without_a_default_has_to_be_given() -> None:
    @dataclass(frozen=True)
    class Order:
        """One.

        Attributes:
            pots: to make.
        """

        pots: int

    def command(order: Order) -> None:
        """Make it."""

    command.__annotations__["order"] = Order
    program = typer.Typer(add_completion=False)
    program.command()(o.with_options(command))
    error = CliRunner().invoke(program, []).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("--pots is missing: ")
    assert CliRunner().invoke(program, ["--pots", "2"]).exit_code == 0


def test_fields_become_options_with_their_types() -> None:
    given = [
        "--kind",
        "black",
        "--minutes",
        "3.5",
        "--with-milk",
        "--guest",
        "Ann",
        "--guest",
        "Bo",
    ]
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


def test_a_mapping_is_explained() -> None:
    assert isinstance(made("--extra", "sugar")[1].exception, ConfigError)
    assert "--extra 'sugar' is not NAME=VALUE" in str(made("--extra", "sugar")[1].exception)


@pytest.mark.parametrize("cls", [LoadOptions, SamplingParams, ServerSettings])
def test_every_field_is_documented(cls: type[Any]) -> None:
    """Help texts come from docstrings, so every field needs one."""
    names = cls.model_fields if hasattr(cls, "model_fields") else [f.name for f in fields(cls)]
    assert not {*names} - {*o.docs_of_fields(cls)}


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that runs, with its words."""
    inside = getattr(command, "commands", None)
    if inside is None:
        yield path, command
        return
    for name, each in inside.items():
        yield from leaves(each, f"{path} {name}")


def all_leaves() -> dict[str, Any]:
    return dict(pair for name, each in COMMANDS.items() for pair in leaves(each.load(name), name))


def options_of(command: Any) -> list[Any]:
    """Options, but for those that print help."""
    own = [each for each in command.params if each.param_type_name == "option"]
    return [each for each in own if each.opts[0] not in ("--help", "--help-all")]


def test_the_command_line_can_be_taken_in() -> None:
    found = all_leaves()
    names = "generate chat serve run-batch models doctor demo measure audit drafters train trace"
    assert [*COMMANDS] == names.split()
    assert len(found) <= 22
    assert sum(len(options_of(each)) for each in found.values()) <= 240
    shown = {
        name: sum(not each.hidden for each in command.params if each.param_type_name == "option")
        for name, command in found.items()
    }
    assert not {name: number for name, number in shown.items() if number > 12}


def reachable(name: str) -> set[str]:
    """Fields that an option or ``--set`` of a command sets."""
    command = all_leaves()[name]
    return {each.name for each in command.params} | {*command.callback.settable}


def test_every_setting_of_the_server_can_be_set_in_serve_but_its_key() -> None:
    assert {*ServerSettings.model_fields} - reachable("serve") == {"api_key"}


@pytest.mark.parametrize("name", [*all_leaves()])
def test_all_options_are_shown_when_asked_for(name: str) -> None:
    command = all_leaves()[name]
    flags = {flag for each in command.params for flag in each.opts}
    if "--help-all" not in flags:
        assert not [each for each in options_of(command) if each.hidden]
        return
    words = ["eagle" if word == "KIND" else word for word in name.split()]
    said = CliRunner().invoke(app, [*words, "--help-all"], env={"COLUMNS": "300"}).output
    assert not [flag for each in options_of(command) for flag in each.opts[:1] if flag not in said]
    assert not [each for each in getattr(command.callback, "settable", {}) if each not in said]


@pytest.mark.parametrize("old", RENAMED)
def test_old_names_say_the_new_one(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        exit_with_message(lambda: app([*old.split(), "x"]))
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.strip() == f"error: foredraft {old} is now: {RENAMED[old]}"
    new = RENAMED[old].replace(",", "").split()[1:]
    assert new[0] in COMMANDS or new[:2] == ["-m", "benchmarks"]
    if len(new) > 1 and new[0] in ("train", "drafters"):
        assert new[1] in COMMANDS[new[0]].load(new[0]).commands


def test_a_file_of_settings_goes_behind_options_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        "[model]\nthreads = 1\nexact = true\ndrafter_options = {shared = true}\n"
        '[server]\nport = 8100\nmax_waiting = 3\nmax_n = 3\nallowed_hosts = ["a", "b"]\n'
    )
    monkeypatch.setenv("FOREDRAFT_CONFIG", str(file))
    monkeypatch.setenv("FOREDRAFT_MAX_WAITING", "5")
    monkeypatch.setenv("foredraft_max_n", "6")  # as pydantic reads it
    got: list[Any] = []

    def command(
        load: Annotated[LoadOptions, o.model()],
        settings: Annotated[ServerSettings, o.Derived(section="server", flags=("port",))],
    ) -> None:
        got.extend((load, settings))

    program = typer.Typer(add_completion=False)
    program.command()(o.with_options(command))
    done = CliRunner().invoke(program, ["--port", "9000", "--set", "exact=false"])
    assert done.exit_code == 0, done.exception
    load, settings = got
    assert (load.threads, load.exact, load.drafter_options) == (1, False, {"shared": True})
    assert (settings.port, settings.max_waiting, settings.max_n) == (9000, 5, 6)
    monkeypatch.delenv("foredraft_max_n")
    assert settings.allowed_hosts == ("a", "b")
    for text, said in (
        ("[modle]\n", "did you mean 'model'"),
        ("[model]\nthread = 1\n", "did you mean 'threads'"),
        ("[model]\nthreads = 'x'\n", "threads is 'x'"),
        ("[model]\nthreads = 0\n", str(file)),
        ("[server]\nmax_n = 0\n", f"^{file}: max_n is 0: "),
        ("[server]\nport = 99999\n", f"^{file}: port is 99999: "),
        ('[server]\napi_key = "a-secret-key"\n', "not read from this file: set FOREDRAFT_API_KEY"),
        ("x", "cannot be read"),
    ):
        file.write_text(text)
        wrong = CliRunner().invoke(program, [])
        assert isinstance(wrong.exception, ConfigError)
        assert re.search(said, str(wrong.exception))


@pytest.mark.parametrize("name", sorted({*ServerSettings.model_fields} - {"api_key"}))
def test_every_setting_of_the_server_comes_from_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = ServerSettings.model_fields[name].default
    text = VALUES.get(name, "a.example" if isinstance(default, tuple) else "1")
    written: Any = [text] if isinstance(default, tuple) else text
    if isinstance(default, bool):
        written, text = not default, str(not default)
    elif text.isdecimal() and not isinstance(default, str):
        written = int(text)
    file = tmp_path / "config.toml"
    file.write_text(f"[server]\n{name} = {json.dumps(written)}\n")
    monkeypatch.setenv("FOREDRAFT_CONFIG", str(file))
    got: list[ServerSettings] = []

    def command(settings: Annotated[ServerSettings, o.Derived(section="server")]) -> None:
        got.append(settings)

    program = typer.Typer(add_completion=False)
    program.command()(o.with_options(command))
    done = CliRunner().invoke(program, [])
    assert done.exit_code == 0, done.exception
    monkeypatch.delenv("FOREDRAFT_CONFIG")
    monkeypatch.setenv(f"FOREDRAFT_{name}".upper(), text)
    assert getattr(got[0], name) == getattr(ServerSettings(), name) != default


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_is_the_first_sentence_of_the_help(name: str) -> None:
    command = COMMANDS[name].load(name)
    text = " ".join(str(command.help).split())
    assert text.startswith(COMMANDS[name].summary), text
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert len(shown.output) > 300


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
