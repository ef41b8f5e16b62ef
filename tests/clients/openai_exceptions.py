"""The openai SDK's own tests that run, and those that cannot pass, with the reason."""

from __future__ import annotations

FILES = [
    f"tests/api_resources/{name}"
    for name in (
        *("chat/test_completions.py", "test_completions.py"),
        *("test_models.py", "test_responses.py"),
    )
]
_STORED = "(test_completions or test_responses) and not create"
"""Stored replies (list, retrieve, update, delete, cancel, compact): nothing is stored here."""
_EVERY_FIELD = "create_with_all_params"
"""Every field at once with made-up values: ``max_tokens=0`` and audio (chat), ``best_of=0`` and
``suffix`` (completions), ``previous_response_id`` (responses). Each is refused by name."""
_OTHERS = "test_models and delete"
"""A model cannot be deleted."""
DESELECTED = f"not ({_STORED}) and not {_EVERY_FIELD} and not ({_OTHERS})"
MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "ft:gpt-4o-mini:acemeco:suffix:abc123")
"""The names that these tests use."""
