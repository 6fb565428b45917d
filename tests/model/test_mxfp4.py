"""MXFP4 against a table of all its codes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3rl.model.mxfp4 import BLOCK, MAGNITUDES, pack_mxfp4, unpack_mxfp4

VALUES = [*MAGNITUDES, *(-x for x in MAGNITUDES)]


def test_every_code_has_its_value_and_the_even_column_is_in_the_low_half() -> None:
    for low, high in itertools.product(range(16), repeat=2):
        packed = torch.full((1, BLOCK // 2), low | high << 4, dtype=torch.uint8)
        values = unpack_mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8))
        assert values.flatten().tolist() == [2 * VALUES[low], 2 * VALUES[high]] * (BLOCK // 2)


@given(st.data())
def test_what_was_unpacked_packs_to_the_same_bytes(data: st.DataObject) -> None:
    seed, scale = data.draw(st.integers(0, 2**31)), data.draw(st.integers(1, 250))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (3, 4 * BLOCK), generator=generator)
    codes[codes == 8] = 0  # a negative zero is a zero
    codes[:, ::BLOCK] = torch.tensor([6, 7, 14, 15])[torch.randint(0, 4, (3, 4), generator=generator)]  # reaches (3, 6]
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scales = torch.randint(scale, scale + 5, (3, 4), generator=generator).to(torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        again = pack_mxfp4(unpack_mxfp4(packed, scales, dtype))
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scales)


@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_packing_takes_the_nearest_value_under_the_smallest_scale_that_fits(seed: int, log_size: float) -> None:
    weight = torch.randn(4, 2 * BLOCK, generator=torch.Generator().manual_seed(seed)) * 2**log_size
    packed, scale = pack_mxfp4(weight)
    for row in range(4):
        for block in range(2):
            columns = weight[row, block * BLOCK : (block + 1) * BLOCK].double()
            unit = 2.0 ** (int(scale[row, block]) - 127)
            assert 3.5 <= float(columns.abs().max()) / unit < 7
            got = unpack_mxfp4(packed, scale, torch.float32)[row, block * BLOCK : (block + 1) * BLOCK].double()
            table = torch.tensor(VALUES, dtype=torch.float64) * unit
            best = (columns.unsqueeze(1) - table).abs().amin(1)
            assert torch.equal((columns - got).abs(), best)
    again = pack_mxfp4(unpack_mxfp4(packed, scale))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


@pytest.mark.parametrize(("value", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)])
def test_a_value_halfway_between_two_codes_gets_the_even_one(value: float, code: int) -> None:
    weight = torch.full((1, BLOCK), value)
    weight[0, 0] = 6.0
    packed, scale = pack_mxfp4(torch.cat([weight, -weight]))
    assert scale.flatten().tolist() == [127, 127]
    assert int(packed[0, -1]) == code | code << 4
    assert int(packed[1, -1]) == ((code | 8) | (code | 8) << 4 if code else 0)


def test_what_has_no_code_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 columns, got 33"):
        pack_mxfp4(torch.zeros(2, 33))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            pack_mxfp4(torch.full((1, BLOCK), bad))
    packed, scale = pack_mxfp4(torch.zeros(1, BLOCK))
    assert unpack_mxfp4(packed, scale).abs().sum() == 0
