"""How a `DsparkModule` learns.

Shape legend: B texts, L tokens (anchors), S places of a block, E hidden size, H query heads,
D head size, M rank of the Markov head, K columns of the output product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.dspark import DsparkModule
from foredraft.drafters.heads.layers import LlamaLayer
from foredraft.train.heads.base import (
    HeadTraining,
    Prediction,
    TextBatch,
    behind_anchor,
    following,
)
from foredraft.train.target import TrainingTarget

_CONFIDENCE_STRIDE = 4
"""The confidence head learns at one anchor in this many: its labels need products of all rows."""


_SCALES = torch.logspace(-2, 2, 41, base=2.0, dtype=torch.float64)
"""Grid on which the scale of a confidence is fitted."""


class DsparkTraining(HeadTraining[DsparkModule]):
    """See the module docstring."""

    def take_layers(self, source: TrainingTarget) -> None:
        module, embedding_VE = self.module, source.embedding()
        module.norm.weight.copy_(source.final_norm())
        module.mask_E.copy_(embedding_VE.mean(0))
        module.fuse.weight.mul_(0.1)
        module.fuse.weight[:, -source.shape.hidden_size :] += torch.eye(len(module.mask_E))
        for i, layer in enumerate(module.layers):
            layer.load_state_dict(dict(source.layer(i - module.num_layers)))
        if module.rank:
            # Similar tokens start alike, so that they learn together.
            projection_EM = torch.randn(embedding_VE.shape[1], module.rank)
            rows_VM = F.normalize(embedding_VE.float(), dim=-1) @ projection_EM
            module.markov.weight.copy_(rows_VM)

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        context_BLE = self.module.context([batch.taps[layer] for layer in self.module.taps])
        anchors_BLE = following(batch.embeddings_BLE, 1)
        block = self.module.block(anchors_BLE.flatten(0, 1))
        x_BSLE = block.view(*anchors_BLE.shape[:2], *block.shape[1:]).transpose(1, 2)
        for layer in self.module.layers:
            x_BSLE = _over_all_anchors(cast(LlamaLayer, layer), x_BSLE, context_BLE)
        states_BSLE, output_RK = self.module.norm(x_BSLE), self.module.output_RK
        return [
            Prediction(
                self.module.markov_states(states_BSLE[:, k - 1], following(batch.tokens_BL, k)),
                output_RK,
                k,
            )
            for k in range(1, min(depth, self.module.block_size) + 1)
        ]

    def extra_loss(self, batch: TextBatch, predictions: Sequence[Prediction]) -> Tensor | None:
        """Cross-entropy of the confidence with whether the likeliest token is the text's."""
        if not self.module.rank:
            return None
        total, length = batch.embeddings_BLE.new_zeros(()), batch.tokens_BL.shape[1]
        anchors = torch.arange(0, length, _CONFIDENCE_STRIDE, device=batch.tokens_BL.device)
        for each in predictions:
            states = each.states_BLK[:, anchors].detach()
            right = self._is_right(states, following(batch.tokens_BL, each.shift)[:, anchors])
            losses = F.binary_cross_entropy_with_logits(
                self.module.confidence(states)[..., 0].float(), right.float(), reduction="none"
            )
            inside = anchors + each.shift < batch.lengths_B[:, None]
            total = total + (losses * inside).sum() / inside.sum().clamp(min=1)
        return total / len(predictions)

    @torch.no_grad()
    def calibrate(self, batches: Iterable[TextBatch]) -> list[float]:
        """Scale the confidences to what held-out text shows, place by place.

        Sequential temperature scaling: a draft's length is decided by products of confidences, so
        each place is scaled by how well the product up to it predicts that all tokens up to it are
        right, the places before it being scaled already.

        Returns:
            The scale of each place; they are kept with the weights.
        """
        if not self.module.rank:
            return []
        found = [self._places(batch) for batch in batches]
        if not sum(len(logits) for logits, _ in found):  # no text is as long as a block
            return []
        logits_NS = torch.cat([logits for logits, _ in found])
        right_NS = torch.cat([right for _, right in found]).cumprod(1)
        survival_N = torch.ones(len(logits_NS), dtype=torch.float64)
        for place in range(self.module.block_size):
            chances_NC = (logits_NS[:, place, None] * _SCALES).sigmoid() * survival_N[:, None]
            right_NC = right_NS[:, place, None].expand_as(chances_NC).double()
            chances_NC = chances_NC.clamp(1e-6, 1 - 1e-6)
            losses_NC = F.binary_cross_entropy(chances_NC, right_NC, reduction="none")
            best = int(losses_NC.mean(0).argmin())
            self.module.confidence_scale_S[place] = _SCALES[best]
            survival_N = chances_NC[:, best]
        return [float(scale) for scale in self.module.confidence_scale_S]

    def _places(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Unscaled confidences of blocks [N, S] inside the texts, and which tokens are right."""
        length = batch.tokens_BL.shape[1]
        anchors_L = torch.arange(length, device=batch.tokens_BL.device)
        inside_BL = anchors_L + self.module.block_size + 1 < batch.lengths_B[:, None]
        logits, right = [], []
        for each in self.predictions(batch, self.module.block_size):
            states_NK = each.states_BLK[inside_BL]
            tokens_N = following(batch.tokens_BL, each.shift)[inside_BL]
            logits.append(self.module.confidence(states_NK)[:, 0].double().cpu())
            right.append(self._is_right(states_NK, tokens_N).cpu())
        return torch.stack(logits, 1), torch.stack(right, 1)

    @torch.no_grad()
    def _is_right(self, states: Tensor, tokens: Tensor) -> Tensor:
        likeliest = (states @ self.module.output_RK.T).argmax(-1)
        ids_R = self.module.output_ids_R
        return (likeliest if ids_R is None else ids_R[likeliest]) == tokens


def _over_all_anchors(layer: LlamaLayer, x_BSLE: Tensor, context_BLE: Tensor) -> Tensor:
    """One layer of the backbone for the blocks of all anchors.

    The block of anchor i stands at positions i + 1 to i + S, and sees the text up to i and itself.
    """
    batch, size, length, _ = x_BSLE.shape
    positions_L = torch.arange(length, device=x_BSLE.device)
    heads = [layer.heads(x_BSLE[:, s], positions_L + s + 1) for s in range(size)]
    queries, keys, values = (torch.stack(parts, 2) for parts in zip(*heads, strict=True))
    _, text_keys, text_values = layer.heads(context_BLE, positions_L)
    repeat = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    text_keys, text_values = (x.repeat_interleave(repeat, 1) for x in (text_keys, text_values))
    queries = queries * queries.shape[-1] ** -0.5  # [B, H, S, L, D]
    seen = queries @ text_keys.unsqueeze(2).mT + behind_anchor(queries, length)
    own = torch.einsum("bhsld,bhtld->bhslt", queries, keys)
    weights = torch.cat((seen, own), -1).softmax(-1)
    attended = weights[..., :length] @ text_values.unsqueeze(2)
    attended = attended + torch.einsum("bhslt,bhtld->bhsld", weights[..., length:], values)
    flat = attended.flatten(2, 3)  # places and anchors side by side, as `finish` wants them
    return layer.finish(x_BSLE.flatten(1, 2), flat).view(batch, size, length, -1)


TRAINING = DsparkTraining
