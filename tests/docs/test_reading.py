"""The page that walks through the engine shows its step as it is, in the order of the code."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

from foredraft.engine.step import step
from tests.docs.pages import REPO, blocks, links

PAGE = REPO / "docs" / "understand" / "life-of-a-token.md"


def test_the_step_is_shown_as_it_is() -> None:
    source = textwrap.dedent(inspect.getsource(step))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1].lineno - 1  # behind the docstring
    body = textwrap.dedent("\n".join(source.splitlines()[first:]))
    assert ("py", body + "\n") in blocks(PAGE)


def test_the_walk_goes_in_the_order_of_the_code() -> None:
    source, page = inspect.getsource(step), PAGE.read_text()
    calls = ["drafting.allow", "drafting.propose", "target.score", "turn.verify", "turn.commit"]
    calls += ["cache.keep", "drafting.observe"]
    at = [source.index(f"{call}(") for call in calls]
    assert at == sorted(at)
    section = page[page.index("**Allow.**") :]
    names = [call.removeprefix("drafting.") for call in calls]
    names = [name[0].upper() + name[1:] if "." in name else name for name in names]
    told = [section.index(f"[`{name}`]") for name in names]
    assert told == sorted(told)


def test_the_walk_begins_with_the_files_in_their_order() -> None:
    opening = PAGE.read_text().split("```")[0]
    found = re.findall(r"\((?:\.\./)+foredraft/[\w/]*?(\w+)(?:/__init__)?\.py\)", opening)
    assert tuple(found) == ("request", "scheduler", "step", "drafting", "base", "verify")


def test_every_file_of_the_engine_that_a_token_passes_is_linked() -> None:
    linked = {target for _, target in links(PAGE)}
    for name in ("request", "scheduler", "turn", "step", "drafting", "guard", "policy", "text"):
        assert f"../../foredraft/engine/{name}.py" in linked, name
