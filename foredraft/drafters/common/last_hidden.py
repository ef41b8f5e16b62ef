"""The target's hidden state at the last token it has read: what heads without a cache stand on.

Shape legend: E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.drafters.base import DraftRow, Observation


class LastHidden:
    """One state for each request.

    Args:
        layer: whose output it is.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._states: dict[int, tuple[int, Tensor]] = {}

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            if self._layer in seen.taps:
                # A copy: the view would keep the states of the whole forward.
                hidden_E = seen.hidden(self._layer)[-1].clone()
                self._states[seen.request_id] = (seen.end, hidden_E)

    def of(self, row: DraftRow) -> Tensor | None:
        """The state [E] that the row's last token was drawn from; None if it was not handed out.

        That is so before the prompt is read, and after steps that were not to draft.
        """
        end, hidden_E = self._states.get(row.request_id, (-1, None))
        return hidden_E if end == len(row.tokens) - 1 else None

    def end(self, request_id: int) -> None:
        self._states.pop(request_id, None)
