"""The wheel does not outgrow its budget, and the budget does not grow unsaid."""

from __future__ import annotations

from tools import sizes


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
