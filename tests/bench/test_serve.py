"""Requests of a comparison's clients."""

from __future__ import annotations

from foredraft.bench.serve import Task


def test_no_prompt_comes_twice_and_every_client_has_one() -> None:
    """A server that keeps what it read would answer a prompt that comes again at once."""
    task = Task(["tea", "mill"], 8, 0.0)
    rounds = [task.in_round(number, clients) for clients in (1, 4) for number in range(3)]
    prompts = [prompt for each in rounds for prompt in each.prompts]
    assert len({*prompts}) == len(prompts)
    assert [len(each.prompts) for each in rounds] == [2, 2, 2, 4, 4, 4]
    beginnings = {prompt.partition(":")[0] for prompt in prompts}
    assert len(beginnings) == len(prompts), "they differ from the first words on"
    assert all(prompt.endswith(("tea", "mill")) for prompt in prompts)
