"""Which tiles are computed, against every pair of positions, one by one."""

import numpy as np
import pytest

from ringcoll.layers.context_parallel import tiles
from ringcoll.layers.context_parallel.layouts import LAYOUTS
from ringcoll.layers.context_parallel.tiles import Mask, plan


def test_a_side_divides_the_length_or_is_filled_up():
    assert tiles.side(4096, 32) == 256
    assert tiles.side(4096, 1) == 1024
    assert tiles.side(100, 32) == 100
    assert tiles.side(1021, 32) == 256  # a prime
    assert tiles.side(3 * 192, 32) == 192


def test_rows_share_a_tile_as_far_as_it_has_room():
    assert tiles.rows_together(8, 4, 512) == 2
    assert tiles.rows_together(7, 4, 512) == 1
    assert tiles.rows_together(8, 4, 64) == 8
    assert tiles.rows_together(3, 1, 4096) == 1


MASKS = [Mask(True), Mask(False), Mask(True, 5), Mask(False, 7), Mask(True, 1)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [8, 6, 22])  # the last is filled up
def test_a_tile_is_left_out_or_unmasked_only_if_all_pairs_agree(small_tiles, mask, layout, length):
    for sizes, exchanged in (((3,), ()), ((2, 2), (1,))):
        planned = plan(mask, layout, length, sizes, exchanged, 1, sizes[:1])
        n, held = planned.positions.shape
        cut = held // planned.tile
        assert planned.tile < 5 <= held
        for rank in range(n):
            for origin in range(n):
                seen = mask.visible(
                    planned.positions[rank][:, None], planned.positions[origin][None]
                )
                seen = seen & (planned.positions[rank] < tiles.NOWHERE)[:, None]
                assert not seen[:, planned.positions[origin] == tiles.NOWHERE].any()
                each = seen.reshape(cut, planned.tile, cut, planned.tile)
                some, every = each.any((1, 3)), each.all((1, 3))
                kinds = planned.kinds(rank, origin)
                assert not (some & (kinds == 0)).any()
                assert not (~every & (kinds == 2)).any()
                if layout != "striped" and not exchanged and length == 8:  # then nothing is lost
                    assert (some == (kinds > 0)).all()
                    assert (every == (kinds == 2)).all()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_causal_mask_gives_all_ranks_the_same_work_by_zigzag(n):
    """Tiles of all rounds, at 32768 positions. Contiguous takes nearly twice as long."""
    length = 32768 // n // 2 * 2
    busiest = {}
    for layout in LAYOUTS:
        planned = plan(Mask(True), layout, length, (n,), (), 32, (n,))
        each = np.sum([planned.counted(offset) for offset in range(n)], 0) * planned.tile**2
        in_rounds = sum(planned.counted(offset).max() for offset in range(n)) * planned.tile**2
        busiest[layout] = in_rounds
        if layout != "contiguous":
            assert each.max() <= 1.02 * each.min()
    if n == 8:
        assert busiest["contiguous"] >= 1.8 * busiest["zigzag"]
