"""Two-model speculation: a smaller model of the same vocabulary drafts a chain or a tree."""

from foredraft.drafters.draft_model.drafter import DRAFTER, DraftModelDrafter, DraftTreeDrafter

__all__ = ["DRAFTER", "DraftModelDrafter", "DraftTreeDrafter"]
