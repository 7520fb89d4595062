"""Changed bits are listed and overwritten exactly; fingerprints see every bit and its place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.kernels import weight_delta
from temper.kernels.weight_delta import BITS, GOLDEN, MIX_1, MIX_2, delta_apply, delta_encode, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=gen, dtype=torch.uint8)
    return raw.view(dtype)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.sampled_from(DTYPES), st.integers(0, 2**31), st.integers(1, 64))
def test_round_trip_of_every_bit(count: int, dtype: torch.dtype, seed: int, block: int) -> None:
    base, other = random_bits(count, dtype, seed), random_bits(count, dtype, seed + 1)
    change = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.3
    integer = BITS[dtype.itemsize]
    new = torch.where(change, other.view(integer), base.view(integer)).view(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_delta, "BLOCK", block)
        indices, values = delta_encode(base, new)
        assert fingerprint(base.clone()) == fingerprint(base)
        assert (fingerprint(base) == fingerprint(new)) == (indices.numel() == 0)
    different = (base.view(integer) != new.view(integer)).nonzero()[:, 0]
    assert torch.equal(indices, different)
    target = base.clone()
    for _ in range(2):  # a retry is harmless
        delta_apply(target, indices, values)
        assert torch.equal(target.view(integer), new.view(integer))


def test_signs_of_zero_and_payloads_of_nan_count() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    new.view(torch.int32)[1] += 1
    assert delta_encode(base, new)[0].tolist() == [0, 1]
    assert delta_encode(base, base.clone())[0].numel() == 0


def test_fingerprint_is_splitmix64_and_knows_places() -> None:
    tensor = torch.tensor([1.0, -2.0, 3.5], dtype=torch.bfloat16)
    total = 0
    for place, bits in enumerate(tensor.view(torch.int16).tolist()):
        x = (bits % 2**16 + (place + 1) * GOLDEN) % 2**64
        x = (x ^ x >> 30) * MIX_1 % 2**64
        x = (x ^ x >> 27) * MIX_2 % 2**64
        total += x ^ x >> 31
    assert fingerprint(tensor) == total % 2**64
    assert fingerprint(tensor.flip(0)) != fingerprint(tensor)
    assert fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(3))
    assert fingerprint(torch.zeros(0)) == 0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"base: found torch\.float32\[2\]"):
        delta_encode(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="new: found strides"):
        delta_encode(torch.zeros(3, 2), torch.zeros(2, 3).T)
    with pytest.raises(ValueError, match="expected a dtype of 1, 2 or 4 bytes"):
        fingerprint(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"indices: found 5\.\.5"):
        delta_apply(torch.zeros(3), torch.tensor([5]), torch.zeros(1))
    with pytest.raises(ValueError, match="values: found"):
        delta_apply(torch.zeros(3), torch.tensor([0]), torch.zeros(1, dtype=torch.float16))
