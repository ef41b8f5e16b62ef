"""Embedding, final norm and LM head of a transformers model, for drafters that use them.

transformers does not declare them, so type and shape identify them, and a short forward checks that
they make the model's logits of the last layer's output.

Shape legend: T tokens, R some rows of the head, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HFParts:
    """See `foredraft.models.base.TargetParts`."""

    def __init__(self, embedding: nn.Embedding, final_norm: nn.Module, head: nn.Linear) -> None:
        self._embedding, self._final_norm, self._head = embedding, final_norm, head

    @property
    def hidden_size(self) -> int:
        return self._embedding.embedding_dim

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @torch.no_grad()
    def embed(self, token_ids_T: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(token_ids_T.to(self.device))
        return embedded

    @torch.no_grad()
    def norm(self, hidden_TE: Tensor) -> Tensor:
        normed: Tensor = self._final_norm(hidden_TE)
        return normed

    @torch.no_grad()
    def logits(self, normed_TE: Tensor) -> Tensor:
        logits: Tensor = self._head(normed_TE)
        return logits.float()

    def kept(self, name: str, recipe: str, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @torch.no_grad()
    def head_rows(self, token_ids_R: Tensor) -> Tensor:
        weight_VE = self._head.weight
        return F.embedding(token_ids_R.to(weight_VE.device), weight_VE).to(self.dtype)

    @contextmanager
    def last_output(self) -> Iterator[list[Tensor]]:
        """The last layer's output [1, T, E] of the model's forward, once it has run."""
        caught: list[Tensor] = []
        handle = self._final_norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        try:
            yield caught
        finally:
            handle.remove()


def find_parts(model: Any, tokens: list[int]) -> HFParts | None:
    """The model's embedding, final norm and LM head; None if they are not identified.

    Args:
        model: a causal language model of transformers.
        tokens: a short text of its vocabulary, to try them on.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        return None
    if head.bias is not None:  # its logits are not the weights' alone
        return None
    if embedding.embedding_dim != head.in_features or embedding.weight.device != head.weight.device:
        return None
    norms = [
        module
        for module in model.get_decoder().children()
        if tuple(getattr(getattr(module, "weight", None), "shape", ())) == (head.in_features,)
    ]
    if len(norms) != 1:
        return None
    parts = HFParts(embedding, norms[0], head)
    return parts if _make_the_logits(parts, model, tokens) else None


@torch.no_grad()
def _make_the_logits(parts: HFParts, model: Any, tokens: list[int]) -> bool:
    token_ids_BT = torch.tensor([tokens], device=parts.device)
    try:
        with parts.last_output() as caught:
            expected_TV = model(token_ids_BT, use_cache=False).logits[0].float()
        actual_TV = parts.logits(parts.norm(caught[0]))[0]
    except Exception:  # whatever a model's code does; then its parts are not to be had
        return False
    return len(caught) == 1 and torch.allclose(actual_TV, expected_TV, rtol=0.02, atol=1e-3)
