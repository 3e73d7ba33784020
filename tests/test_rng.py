"""Counter-based noise against a naive integer SplitMix64, and against the distributions it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from steelman.rng import Key

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The published SplitMix64 finaliser on Python integers."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def naive_bits(key: Key, index: int, count: int) -> list[int]:
    start = mix(mix(index * GOLDEN + key.integer()) + GOLDEN)
    return [mix(start + (draw + 1) * GOLDEN) for draw in range(count)]


def test_finaliser_matches_the_published_sequence() -> None:
    # The first outputs of SplitMix64 from state 0, as the reference C program prints them.
    from steelman.rng import _mix, _signed

    states = torch.tensor([_signed(GOLDEN * step) for step in (1, 2, 3)])
    assert [value & MASK for value in _mix(states).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(
    seed=st.integers(-(2**70), 2**70),
    index=st.lists(st.integers(-(2**40), 2**62), min_size=1, max_size=4),
    count=st.integers(1, 5),
)
def test_bits_match_naive_integers(seed: int, index: list[int], count: int) -> None:
    key = Key(seed).fold("a", 3)
    got = key.bits(torch.tensor(index), count)
    assert [[v & MASK for v in row] for row in got.tolist()] == [naive_bits(key, i, count) for i in index]


def test_uniform_takes_two_draws_of_24_bits_from_each_integer() -> None:
    key = Key(5)
    (bits,) = naive_bits(key, 9, 1)
    expected = [(bits >> 40) / 2**24, ((bits >> 8) & 0xFFFFFF) / 2**24]
    assert key.uniform(torch.tensor([9]), (2,)).tolist() == [expected]


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 2, 2)])
def test_float32_and_float64_agree(shape: tuple[int, ...]) -> None:
    index = torch.arange(50)
    single, double = Key(1).uniform(index, shape), Key(1).uniform(index, shape, torch.float64)
    assert torch.equal(single.double(), double)
    assert torch.equal(Key(1).normal(index, shape), Key(1).normal(index, shape, torch.float64).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_neither_overflows_nor_collapses(dtype: torch.dtype) -> None:
    half = Key(1).uniform(torch.arange(50), (20,), dtype)
    assert half.dtype == dtype
    torch.testing.assert_close(half.double(), Key(1).uniform(torch.arange(50), (20,), torch.float64), atol=4e-3, rtol=0)


def test_uniform_is_uniform_and_stays_below_one() -> None:
    draws = Key(3).uniform(torch.arange(4000), (5,), torch.float64)
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    for column in draws.T:
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-3
    # Within a sample too: 20,000 draws of one index.
    assert stats.kstest(Key(3).uniform(torch.tensor([0]), (20000,), torch.float64)[0].numpy(), "uniform").pvalue > 1e-3


def test_normal_is_normal() -> None:
    draws = Key(3).normal(torch.arange(4000), (5,), torch.float64)
    assert torch.isfinite(draws).all()
    for column in draws.T:
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-3
    correlation = torch.corrcoef(draws.T) - torch.eye(5)
    assert float(correlation.abs().max()) < 5 / math.sqrt(4000)


def correlated(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(abs(stats.pearsonr(a.flatten().numpy(), b.flatten().numpy()).statistic) > 5 / math.sqrt(a.numel()))


def test_neighbouring_indexes_streams_and_seeds_are_independent() -> None:
    index = torch.arange(4000)
    draws = Key(0).uniform(index, (4,), torch.float64)
    assert not correlated(draws[:-1], draws[1:])
    assert not correlated(draws[:, 0], draws[:, 1])
    for other in (Key(1), Key(0).fold("a"), Key(0).fold(0), Key(-1)):
        assert not correlated(draws, other.uniform(index, (4,), torch.float64))


def test_streams_are_told_apart() -> None:
    keys = [
        Key(0), Key(1), Key(-1), Key(2**64), Key(0).fold(0), Key(0).fold("0"), Key(0).fold("a", "b"),
        Key(0).fold("ab"), Key(0).fold("a", 1), Key(0).fold("a1"), Key(0).fold("a', 'b"), Key(0).fold(1, 0),
        Key(0).fold(0, 1), Key(0).fold(10),
    ]  # fmt: skip
    assert len({key.integer() for key in keys}) == len(keys)
    assert Key(0).fold("a").fold(1) == Key(0).fold("a", 1)
    assert all(-(2**63) <= key.integer() < 2**63 for key in keys)


def test_integers_are_the_same_key_whatever_their_type() -> None:
    assert Key(int(np.int64(5))).fold(3).integer() == Key(np.int64(5)).fold(np.int64(3)).integer()  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Key(0).fold(1.5).integer()  # type: ignore[arg-type]


def test_a_sample_gets_the_same_noise_in_any_batch() -> None:
    key, index = Key(4), torch.tensor([7, 3, 11, 3])
    whole = key.normal(index, (2, 3))
    assert torch.equal(whole[1], whole[3])
    for row, i in enumerate(index.tolist()):
        assert torch.equal(key.normal(torch.tensor([i]), (2, 3))[0], whole[row])
    assert torch.equal(key.normal(index.flip(0), (2, 3)).flip(0), whole)
    assert torch.equal(key.uniform(index.int(), (3,)), key.uniform(index, (3,)))


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutation_is_one(n: int) -> None:
    order = Key(1).permutation(n)
    assert sorted(order.tolist()) == list(range(n))
    if n == 1000:
        assert not torch.equal(order, Key(2).permutation(n))
        assert not torch.equal(order, torch.arange(n))


def test_permutations_are_fair() -> None:
    counts = torch.zeros(6, dtype=torch.int64)
    for seed in range(1200):
        a, b, c = Key(seed).permutation(3).tolist()
        counts[a * 2 + int(b > c)] += 1
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_no_samples_and_no_pixels() -> None:
    assert Key(0).uniform(torch.arange(0), (2, 2)).shape == (0, 2, 2)
    assert Key(0).normal(torch.arange(0), (3,)).shape == (0, 3)
    assert Key(0).uniform(torch.arange(3), (0,)).shape == (3, 0)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    Key(0).normal(torch.arange(3), (3,))
    Key(0).permutation(10)
    assert torch.equal(before, torch.get_rng_state())
