"""Self-speculation: some of the target's own layers draft, all of them verify."""

from foredraft.drafters.early_exit.build import DRAFTER
from foredraft.drafters.early_exit.drafter import SharedCacheDrafter, parse_skip

__all__ = ["DRAFTER", "SharedCacheDrafter", "parse_skip"]
