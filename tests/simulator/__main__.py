"""``python -m tests.simulator``: simulate many steps, and say what happened in them."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.simulator.simulation import Simulation

_AT_ONCE = 20_000
"""Steps between two lines."""


def simulate(first: int, num_steps: int) -> tuple[int, int, Counter[str]]:
    """Schedules from seed ``first`` on; returns how many, their steps, and what happened.

    Raises:
        AssertionError: something is broken; its note names the seed.
    """
    seed, done = first, 0
    seen: Counter[str] = Counter()
    while done < num_steps:
        simulation = Simulation(seed)
        try:
            simulation.run()
        except BaseException as error:
            error.add_note(f"in the schedule of seed {seed}")
            raise
        seed += 1
        done += simulation.num_steps
        seen.update(simulation.seen)
    return seed - first, done, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every injected fault is said there
    start = time.perf_counter()
    schedules, steps, seen = 0, 0, Counter[str]()
    while steps < asked.steps:
        more = simulate(asked.seed + schedules, min(_AT_ONCE, asked.steps - steps))
        schedules, steps = schedules + more[0], steps + more[1]
        seen += more[2]
        seconds = time.perf_counter() - start
        rate = f"{seconds:.0f} s ({steps / seconds:.0f} a second)"
        last = asked.seed + schedules - 1
        sys.stdout.write(f"{steps} steps up to seed {last}, {rate}, nothing broken\n")
        sys.stdout.flush()
    for name, count in seen.most_common():
        sys.stdout.write(f"{count:8} {name}\n")


if __name__ == "__main__":
    main()
