"""Optional packages, the extras of foredraft that install them, and the commands for it."""

from __future__ import annotations

from foredraft.core.errors import ConfigError

EXTRAS = {
    "transformers": ("hf", "models that our own decoder does not know, and custom_generate"),
    "opentelemetry-exporter-otlp-proto-http": ("otel", "spans (serve --otlp-traces-endpoint)"),
}
"""Packages that a plain installation lacks: the extra of each, and its purpose."""


def install_command(extra: str) -> str:
    """The command that installs an extra of this foredraft."""
    return f"pip install 'foredraft[{extra}]'"


def needs_extra(what: str, extra: str, problem: ImportError) -> ConfigError:
    """The error if ``what`` needs packages that are missing or of another version."""
    return ConfigError(f"{what} the extra {extra!r} ({problem}): {install_command(extra)}")
