"""No package of the wheel outgrows its budget, and no budget grows unsaid."""

from __future__ import annotations

from tools import sizes


def test_every_package_keeps_to_its_budget() -> None:
    budgets = sizes.budgets_of((sizes.ROOT / sizes.BUDGETS).read_text())
    assert sizes.problems(sizes.lines_now(), budgets, budgets, []) == []


def test_a_package_that_outgrows_its_budget_is_named() -> None:
    [problem] = sizes.problems({"cli": 11, "core": 5}, {"cli": 10, "core": 5}, {}, [])
    assert problem.startswith("cli has 11 lines; its budget is 10.")
    [problem] = sizes.problems({"new": 1}, {}, {}, [])
    assert "new has 1 lines; its budget is 0" in problem


def test_a_budget_is_raised_with_a_decision_only() -> None:
    raised = ({"cli": 11}, {"cli": 12}, {"cli": 10})
    [problem] = sizes.problems(*raised, ["foredraft/cli/main.py"])
    assert "the budget of cli is raised" in problem
    assert sizes.problems(*raised, ["docs/decisions/0013-more.md"]) == []
    assert sizes.problems({"cli": 9}, {"cli": 9}, {"cli": 10}, []) == []


def test_modules_of_the_root_count_together() -> None:
    assert sizes.package_of("foredraft/llm.py") == sizes.AT_THE_ROOT
    assert sizes.package_of("foredraft/models/hf/parts.py") == "models"
