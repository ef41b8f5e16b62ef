"""The shape of the source: what may import what, and what may not be in it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from foredraft.core.errors import ConfigError
from foredraft.load import load_models
from foredraft.options import LoadOptions
from tests.models.checkpoints import NATIVE_CONFIGS, save_checkpoint
from tools import sizes

PACKAGE = Path(__file__).parents[1] / "foredraft"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {
    "version": 0,
    "core": 1,
    "kernels": 1,
    "system": 1,
    "cache": 2,
    "models": 3,
    "drafters": 4,
    "control": 4,
    "engine": 5,
    "options": 6,
    "mini": 4,
    "auto": 5,
    "load": 7,
    "speculation": 7,
    "llm": 8,
    "async_llm": 9,
    "hf_generate": 9,
    "trace": 9,
    "train": 9,
    "server": 10,
    "bench": 10,
    "audit": 11,
    "cluster": 11,
    "cli": 12,
    "__main__": 13,
}
"""A module imports from its own layer and the ones below."""
APART = [("drafters", "control"), ("control", "drafters")]
"""Neighbours that know nothing of each other."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str | None:
    """ "engine" for ``foredraft.engine.step``; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import, lazy ones and those for type checking included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if _is_module(name) else node.module


def _is_module(name: str) -> bool:
    base = PACKAGE.parent.joinpath(*name.split("."))
    return base.is_dir() or base.with_suffix(".py").exists()


def test_every_module_has_its_place() -> None:
    assert {part for path in FILES if (part := part_of(module_of(path)))} <= set(LAYERS)


def test_imports_run_downward() -> None:
    wrong = []
    for path in FILES:
        mine = part_of(module_of(path))
        if mine is None:
            continue  # the package itself hands out what is at the top
        for line, imported in imports_of(path):
            if not imported.startswith("foredraft."):
                continue
            theirs = part_of(imported)
            assert theirs is not None
            if LAYERS[theirs] > LAYERS[mine] or (mine, theirs) in APART:
                wrong.append(f"{path}:{line} {mine} imports {imported}")
    assert not wrong


def test_no_module_of_models_imports_itself_by_way_of_others() -> None:
    """Lazy imports and those for type checking count: loading reads in one direction."""
    files = [*(PACKAGE / "models").rglob("*.py"), PACKAGE / "options.py", PACKAGE / "load.py"]
    graph = {module_of(path): {name for _, name in imports_of(path)} for path in files}
    order = TopologicalSorter({name: used & graph.keys() for name, used in graph.items()})
    order.prepare()  # raises with the circle, if there is one


def test_the_engine_knows_concrete_models_drafters_and_controllers_by_protocol_only() -> None:
    seams = {"foredraft.models.base", "foredraft.drafters.base", "foredraft.control.base"}
    seams |= {"foredraft.cache.base", "foredraft.cache.paged"}
    for path in (PACKAGE / "engine").glob("*.py"):
        for line, imported in imports_of(path):
            if part_of(imported) in ("models", "drafters", "control", "cache"):
                assert imported in seams, f"{path}:{line} {imported}"


def test_drafters_know_models_by_protocol_only() -> None:
    for path in (PACKAGE / "drafters").rglob("*.py"):
        for line, imported in imports_of(path):
            if part_of(imported) in ("models", "cache"):
                allowed = ("base", "layers", "paged", "files.manifest", "files.progress")
                allowed += ("files.safety", "files.json_files", "files.kept", "files.stored")
                place = ".".join(imported.split(".")[2:])
                assert place in allowed, f"{path}:{line} {imported}"
            assert not imported.startswith("foredraft.core.verify"), f"{path}:{line} {imported}"


def test_the_engine_names_no_drafting_method() -> None:
    from foredraft.drafters import drafter_names

    names = {*drafter_names(), "draft_model", "draft-model", "eagle", "medusa", "lookahead"}
    names -= {"none"}
    for path in (PACKAGE / "engine").glob("*.py"):
        source = path.read_text().lower()
        assert not [name for name in names if name in source], path


def calls_of(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def test_only_its_own_file_builds_a_proposal_directly() -> None:
    """Elsewhere it takes `Proposal.chosen` or a builder, which records what it drew from."""
    for path in FILES:
        if path == PACKAGE / "core" / "proposal.py":
            continue
        for line, called, _ in calls_of(path):
            assert called.split(".")[-1] != "Proposal", f"{path}:{line}"


def test_nothing_prints() -> None:
    for path in FILES:
        assert not [line for line, called, _ in calls_of(path) if called == "print"], path


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_unpickles_or_runs_code_of_a_checkpoint(path: Path) -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for line, imported in imports_of(path):
        assert imported.split(".")[0] not in forbidden, f"{path}:{line} imports {imported}"
    for line, called, node in calls_of(path):
        assert called not in ("torch.load", "eval", "exec"), f"{path}:{line} calls {called}"
        assert called.split(".")[-1] not in ("recv_pyobj", "send_pyobj"), f"{path}:{line}"
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in ("trust_remote_code", "allow_pickle"):
                assert isinstance(value, ast.Constant), f"{path}:{line}"
                assert value.value is False, f"{path}:{line}"


_MUTABLE_CALLS = {
    *("dict", "list", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"),
    *("count", "cycle", "iter", "ContextVar", "local", "WeakKeyDictionary", "WeakValueDictionary"),
}


def test_no_module_has_state_that_changes() -> None:
    """No `global`, and no module-level container that anything writes to."""
    wrong = []
    for path in FILES:
        module = tree_of(path)
        wrong += [f"{path}:{n.lineno}" for n in ast.walk(module) if isinstance(n, ast.Global)]
        containers = {name for node in module.body for name in _mutable_names(node)}
        wrong += [
            f"{path}:{line} changes {name}"
            for line, name in _changed_names(module)
            if name in containers
        ]
    assert not wrong


def _mutable_names(node: ast.stmt) -> Iterator[str]:
    """Names that a module-level statement binds to something that can change."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return
    made_by = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
    literal = isinstance(
        value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    )
    if literal or made_by in _MUTABLE_CALLS:
        yield from (target.id for target in targets if isinstance(target, ast.Name))


_CHANGING = {
    *("append", "add", "update", "pop", "popitem", "clear", "extend", "insert", "remove"),
    *("discard", "setdefault", "appendleft", "popleft", "sort", "reverse"),
}


def _changed_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Names whose value is changed in place anywhere in a module."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _CHANGING and isinstance(node.func.value, ast.Name):
                yield node.lineno, node.func.value.id
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if isinstance(node.ctx, ast.Store | ast.Del):
                yield node.lineno, node.value.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "next":
            yield from ((node.lineno, a.id) for a in node.args if isinstance(a, ast.Name))


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("CACHE = {}\ndef f(x):\n    CACHE[x] = 1", ["CACHE"]),
        ("SEEN: list[int] = []\ndef f(x):\n    SEEN.append(x)", ["SEEN"]),
        ("import itertools\nIDS = itertools.count()\ndef f():\n    return next(IDS)", ["IDS"]),
        ("NAMES = {'a': 1}\ndef f(x):\n    return NAMES[x]", []),
        ("def f():\n    local = []\n    local.append(1)", []),
    ],
)
def test_the_check_for_state_would_notice(source: str, changes: list[str]) -> None:
    module = ast.parse(source)
    containers = {name for node in module.body for name in _mutable_names(node)}
    assert [name for _, name in _changed_names(module) if name in containers] == changes


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_the_step_is_short() -> None:
    """The loop that everything runs through is to be read at one glance."""
    path = PACKAGE / "engine" / "step.py"
    assert len(path.read_text().splitlines()) <= 100
    (step,) = (function for function in functions_of(path) if function.name == "step")
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < 35


@pytest.mark.parametrize("package", ["core", "cache", "engine", "control"])
def test_no_function_takes_more_than_seven_parameters(package: str) -> None:
    """Values that belong together travel together."""
    for path in (PACKAGE / package).rglob("*.py"):
        for function in functions_of(path):
            given = function.args
            names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            own = [name for name in names if name not in ("self", "cls")]
            assert len(own) <= 7, f"{path}:{function.lineno} {function.name} takes {len(own)}"


def test_everything_public_is_there() -> None:
    import foredraft

    assert set(foredraft.__all__) <= set(dir(foredraft))
    for name in foredraft.__all__:
        assert getattr(foredraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = foredraft.LMM


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_all_names_what_is_there(path: Path) -> None:
    module = tree_of(path)
    if any(
        isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__" for n in module.body
    ):
        loaded = importlib.import_module(module_of(path))
        assert all(hasattr(loaded, name) for name in loaded.__all__)


@pytest.mark.parametrize(
    ("module", "extra"), [("foredraft", ("typer", "rich")), ("foredraft.cli.main", ())]
)
def test_importing_it_loads_nothing_heavy(module: str, extra: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["torch", "transformers", "tokenizers", "numpy", "huggingface_hub", *extra]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_class_has_a_name_of_its_own() -> None:
    """One word, one meaning: a name that two modules give to classes means two things."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice


# ------------------------------------------------------------ the wheel does not outgrow its budget


def test_the_wheel_keeps_to_its_budget() -> None:
    budget = sizes.budget_of((sizes.ROOT / sizes.BUDGETS).read_text())
    assert sizes.problems(sum(sizes.lines_now().values()), budget, budget, []) == []


def test_a_wheel_that_outgrows_its_budget_is_named() -> None:
    [problem] = sizes.problems(11, 10, 10, [])
    assert problem.startswith("the wheel has 11 lines; its budget is 10.")


def test_the_budget_is_raised_with_a_decision_only() -> None:
    [problem] = sizes.problems(11, 12, 10, ["foredraft/cli/main.py"])
    assert "the budget is raised" in problem
    assert sizes.problems(11, 12, 10, ["docs/decisions/0013-more.md"]) == []
    assert sizes.problems(9, 9, 10, []) == []


def test_budgets_by_package_are_read_as_their_sum() -> None:
    assert sizes.budget_of("[lines]\ncore = 3\ncli = 4\n") == 7


def test_modules_of_the_root_count_together() -> None:
    assert sizes.package_of("foredraft/llm.py") == sizes.AT_THE_ROOT
    assert sizes.package_of("foredraft/models/hf/parts.py") == "models"


# ------------------------------------------------------------------------------------------- extras


def uninstall(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Importing it, or what rests on it, is an error, as where it is not installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("foredraft.models.hf.target", "foredraft.models.hf.cache"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_native_model_needs_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    uninstall(monkeypatch, "transformers")
    uninstall(monkeypatch, "huggingface_hub")
    assert load_models(LoadOptions(str(tmp_path)))[0].plan.backend == "native"


def test_a_model_of_transformers_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, NATIVE_CONFIGS["llama-tied"]())
    uninstall(monkeypatch, "transformers")
    with pytest.raises(ConfigError, match="runs through transformers, which needs") as caught:
        load_models(LoadOptions(str(tmp_path), backend="hf"))
    assert str(caught.value).endswith("pip install 'foredraft[hf]'")


def test_custom_generate_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch, "transformers")
    monkeypatch.delitem(sys.modules, "foredraft.hf_generate", raising=False)
    with pytest.raises(ConfigError, match=r"custom_generate needs .*'foredraft\[hf\]'"):
        importlib.import_module("foredraft.hf_generate")
