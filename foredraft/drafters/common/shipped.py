"""Trained heads that come with the package, each found by the target that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path

from foredraft.drafters.common.head_files import META, identify
from foredraft.models.base import Target

SHIPPED = Path(__file__).parents[2] / "heads"


def shipped_head(kind: str, target: Target, shipped: Path = SHIPPED) -> Path | None:
    """The directory of a head of this kind for this very target; None: there is none.

    Args:
        shipped: where heads are looked for.
    """
    if not target.capabilities.parts:
        return None
    fingerprint = identify(target).fingerprint
    for path in sorted(shipped.glob(f"*/*/{META}")):
        said = json.loads(path.read_text())
        if said["kind"] == kind and said["target"]["fingerprint"] == fingerprint:
            return path.parent
    return None
