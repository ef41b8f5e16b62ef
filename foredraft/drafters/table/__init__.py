"""A table of what followed what in the target's own text, and the text's own repetitions.

Nothing is computed: a look-up says what came after the last one to five tokens in text that the
target wrote before, and what followed the longest earlier match in this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from foredraft.core.cost import Price
from foredraft.core.errors import ConfigError
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import (
    DrafterContext,
    DrafterSpec,
    DraftRequest,
    DraftRow,
    Observation,
)
from foredraft.drafters.common.best_first import best_first
from foredraft.drafters.common.head_folder import identify
from foredraft.drafters.common.per_request import PerRequestDrafter
from foredraft.drafters.common.price import asked_price
from foredraft.drafters.common.shipped import shipped_head
from foredraft.drafters.table.ngrams import KIND, NgramTable, load_table
from foredraft.drafters.table.opinions import TableText
from foredraft.models.base import Capabilities


class TableDrafter(PerRequestDrafter[TableText]):
    """See the module docstring.

    Args:
        table: of the target.
        price: what nodes cost; the controller's when None.
        tree: whether drafts may branch.
    """

    def __init__(self, table: NgramTable, price: Price | None = None, tree: bool = True) -> None:
        super().__init__()
        self._table, self._price, self._tree = table, price, tree
        self.promise = table.promise

    def begin_request(self, request: DraftRequest) -> TableText:
        return TableText(request.tokens, self._table, request.params.temperature > 0.0)

    def draft_tree(self, request: TableText, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        place = reduce(request.advance, draft, request.place)
        return best_first(place, request.successors, row, self._tree, self._price, len(draft))

    def observe_request(self, request: TableText, seen: Observation) -> None:
        for token in seen.committed:
            request.commit(token)


def found_table(context: DrafterContext, option: str) -> NgramTable | None:
    """The table that the user named, or that comes with the package; None: there is none.

    Args:
        option: what names its directory.

    Raises:
        ConfigError: it is not there, or of another target.
        ModelLoadError: it is damaged.
    """
    given = context.options.get(option) or shipped_head(KIND, context.target)
    if given is None:
        return None
    identity = identify(context.target, None, getattr(context.tokenizer, "fingerprint", None))
    return load_table(Path(str(given)).expanduser(), identity, context.target.vocab_size)


def _build(context: DrafterContext) -> TableDrafter:
    table = found_table(context, "head")
    if table is None:
        raise ConfigError(
            "drafter 'table' needs a table of the target's text. Make one with 'foredraft train "
            "table --target MODEL --out DIR', and name its directory with the drafter option head"
        )
    return TableDrafter(table, asked_price(context), context.target.capabilities.tree_attention)


DRAFTER = DrafterSpec(
    build=_build,
    summary="looks up what followed the last tokens in text that the target wrote before",
    copies=True,
    options={
        "head": "directory of the table (needed, but for models whose table is built in)",
        "node_cost": "time one more draft token adds to a step, in plain steps (measured)",
    },
    num_draft_tokens=16,
    needs=Capabilities(parts=True),
    required_options=("head",),
)
