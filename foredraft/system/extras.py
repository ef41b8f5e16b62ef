"""What only an extra of the package installs, and the command that installs it."""

from __future__ import annotations

from foredraft.core.errors import ConfigError

EXTRAS = {
    "transformers": ("hf", "models that our own decoder does not know, and custom_generate"),
    "huggingface-hub": ("hf", "models by hub id"),
    "matplotlib": ("plots", "pictures of trainings"),
    "opentelemetry-exporter-otlp-proto-http": ("otel", "spans (serve --otlp-traces-endpoint)"),
}
"""Packages that a plain installation may lack: the extra that brings each, and what it is for."""


def install_command(extra: str) -> str:
    """What a person types to get an extra of the installed foredraft."""
    return f"pip install 'foredraft[{extra}]'"


def needs_extra(what: str, extra: str, problem: ImportError) -> ConfigError:
    """The error where ``what`` needs packages that are not there, or are of another version."""
    return ConfigError(f"{what} the extra {extra!r} ({problem}): {install_command(extra)}")
