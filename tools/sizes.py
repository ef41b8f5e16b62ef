"""Lines of Python by package of the wheel, the change against main, and the budget of all.

``python tools/sizes.py`` fails where the wheel is larger than ``sizes.toml`` allows. The budget may
be raised only together with a file in docs/decisions/ that says why.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = "sizes.toml"
DECISIONS = "docs/decisions/"
AT_THE_ROOT = "(root)"


def package_of(path: str) -> str:
    """``foredraft/cli/main.py`` belongs to "cli"; modules of the root are counted together."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else AT_THE_ROOT


def lines_now() -> Counter[str]:
    """Lines of the working tree by package."""
    counts: Counter[str] = Counter()
    for path in (ROOT / "foredraft").rglob("*.py"):
        counts[package_of(str(path.relative_to(ROOT)))] += path.read_bytes().count(b"\n")
    return counts


def lines_at(revision: str) -> Counter[str]:
    """Lines of a revision by package."""
    counts: Counter[str] = Counter()
    paths = _git("ls-tree", "-r", "--name-only", revision, "foredraft").split("\n")
    names = [path for path in paths if path.endswith(".py")]
    asked = "".join(f"{revision}:{name}\n" for name in names).encode()
    batch = subprocess.run(
        ["git", "cat-file", "--batch"], cwd=ROOT, input=asked, capture_output=True, check=True
    ).stdout
    for name in names:
        header, _, batch = batch.partition(b"\n")
        size = int(header.split()[2])
        counts[package_of(name)] += batch[:size].count(b"\n")
        batch = batch[size + 1 :]
    return counts


def base_revision() -> str | None:
    """Where this work left main; the commit before on main itself; None outside of git."""
    for main in ("origin/main", "main"):
        try:
            base = _git("merge-base", "HEAD", main).strip()
            return f"{base}~1" if base == _git("rev-parse", "HEAD").strip() else base
        except subprocess.CalledProcessError:
            continue
    return None


def budget_of(text: str) -> int:
    """The budget in a ``sizes.toml``; earlier ones had one for each package."""
    lines: int | dict[str, int] = tomllib.loads(text)["lines"]
    return lines if isinstance(lines, int) else sum(lines.values())


def problems(total: int, budget: int, before: int, changed: Iterable[str]) -> list[str]:
    """The faults, a sentence each.

    Args:
        total: lines of the wheel.
        budget: most lines of the wheel.
        before: the budget on main.
        changed: paths that differ from main.
    """
    found = []
    if total > budget:
        found.append(
            f"the wheel has {total} lines; its budget is {budget}. Make it smaller, or raise the "
            f"budget in {BUDGETS} together with a file in {DECISIONS} that says why."
        )
    if budget > before and not any(path.startswith(DECISIONS) for path in changed):
        found.append(f"the budget is raised, and {DECISIONS} does not say why")
    return found


def main() -> int:
    """Print the table; 1 where the wheel is too large."""
    now, base = lines_now(), base_revision()
    budget = budget_of((ROOT / BUDGETS).read_text())
    then, before, changed = now, budget, list[str]()
    if base is not None:
        then = lines_at(base)
        changed = _git("diff", "--name-only", base).split()
        changed += _git("ls-files", "--others", "--exclude-standard").split()
        try:
            before = budget_of(_git("show", f"{base}:{BUDGETS}"))
        except subprocess.CalledProcessError:
            before = budget
    _write(f"{'package':<14}{'lines':>8}{'change':>8}")
    for name in sorted({*now, *then}):
        _write(f"{name:<14}{now[name]:>8}{now[name] - then[name]:>+8}")
    total = sum(now.values())
    _write(f"{'all':<14}{total:>8}{total - sum(then.values()):>+8}   budget {budget}")
    found = problems(total, budget, before, changed)
    for problem in found:
        _write(problem)
    return 1 if found else 0


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
