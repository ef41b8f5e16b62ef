"""bfloat16 weights laid out for tiles: nothing is lost, and they lie beside each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.models.native.quant import TILES, Shelf


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(("shape", "num_parts"), [((32, 64), 1), ((50, 45), 1), ((70, 130), 2)])
def test_weights_come_back_as_they_were(shape: tuple[int, int], num_parts: int) -> None:
    weight_RK = noise(*shape)
    matrix = TILES.of_weight(weight_RK, num_parts)
    assert matrix.shape == shape
    assert torch.equal(matrix.dequantised(torch.bfloat16), weight_RK)


def test_rows_come_back_alone() -> None:
    weight_RK, indices_R = noise(1030, 45), torch.tensor([5, 0, 17, 1029, 5])
    matrix = TILES.of_weight(weight_RK)
    assert torch.equal(matrix.rows(indices_R, torch.float32), weight_RK[indices_R].float())


def test_a_tile_holds_pairs_of_inputs_of_sixteen_rows() -> None:
    weight_RK = noise(16, 64)
    [[first, second]] = (
        TILES.of_weight(weight_RK).packed_GCN.view(torch.bfloat16).view(1, 2, 16, 16, 2)
    )
    assert torch.equal(first[3, 7], weight_RK[7, 6:8])
    assert torch.equal(second[0, 15], weight_RK[15, 32:34])


def test_a_shelf_puts_one_tensor_beside_the_other() -> None:
    shelf = Shelf()
    first, second = shelf.empty((3, 5)), shelf.empty((64,))
    assert (first.shape, second.shape) == ((3, 5), (64,))
    assert first.data_ptr() % (2 << 20) == 0
    assert second.data_ptr() == first.data_ptr() + 64
    large = shelf.empty((70 << 20,))  # more than a piece
    large[::4096] = 1
    assert len(large) == 70 << 20
