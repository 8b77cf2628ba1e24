"""The hash of random numbers: its first round and its numbers in hardware, and how random it is.

The statistics are of the words that :mod:`makalu.rtl.arch.mixing` makes, which the hardware is
compared with elsewhere. Each is a chi-square or a sum of signs whose distribution is known; the
limits are six standard deviations, which independent words pass but for one in 500 million.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makalu.rtl.arch.mixing import fraction, mix
from makalu.rtl.arith.mixing import FRACTION_CYCLES, MIX_CYCLES, Fraction, MixRound
from makalu.sim.harness import simulate

from ..engines.gpsimd_model import random_word
from .support import assert_equal_bits, run_vectors

WORDS = st.integers(0, (1 << 32) - 1)
SPECIAL = [0, 1, 2, 0xFF, 0x100, 0x1FF, 0xFFFF, 0x10000, 0x20000, 1 << 31, (1 << 32) - 1]
LIMIT = 6


# Hardware -----------------------------------------------------------------------------------------


def waveform(component):
    lines = component.__doc__.split("::\n\n")[1].split("\n\n")[0]
    rows = [line.split() for line in lines.splitlines() if line.strip()]
    return {name: values for name, *values in rows}


@pytest.mark.parametrize("component", [MixRound, Fraction])
def test_the_waveform_of_the_docstring_is_true(component):
    rows, dut, compared = waveform(component), component(), 0
    cycles = [int(cycle) for cycle in rows.pop("cycle")]

    async def testbench(ctx):
        nonlocal compared
        for cycle in cycles:
            for name, values in rows.items():
                if values[cycle] == ".":
                    continue
                if name in ("result", "number"):
                    assert ctx.get(getattr(dut, name)) == int(values[cycle], 0)
                    compared += 1
                else:
                    ctx.set(getattr(dut, name), int(values[cycle], 0))
            await ctx.tick()

    simulate(dut, testbench)
    assert compared >= 2


def test_the_first_round(rng):
    pairs = [*itertools.product(SPECIAL, SPECIAL), *rng.integers(1 << 32, size=(2000, 2)).tolist()]
    value, seed = np.array(pairs, np.uint32).T
    want = [((x := v ^ s) ^ x >> 17) * 0xED5AD4BB & 0xFFFFFFFF for v, s in pairs]
    got = run_vectors(MixRound(), latency=MIX_CYCLES, value=value, seed=seed)["result"]
    assert_equal_bits(got, np.array(want, np.uint32), value=value, seed=seed)


def test_words_as_numbers(rng):
    """Every number of leading zeros, with and without bits behind."""
    few = [1 << k for k in range(32)] + [(2 << k) - 1 for k in range(32)] + SPECIAL
    word = np.array(few + rng.integers(1 << 32, size=2000).tolist(), np.uint32)
    want = np.array([w // 256 / 2**24 for w in word.tolist()], np.float32)
    got = run_vectors(Fraction(), latency=FRACTION_CYCLES, word=word)["number"]
    assert_equal_bits(got, want.view(np.uint32), word=word)


# The hash -----------------------------------------------------------------------------------------


def test_without_a_seed_it_is_the_published_function():
    """``triple32`` of hash-prospector."""
    known = {0: 0, 1: 0x042741D6, 2: 0xF1DFE8E9, 0xFFFFFFFF: 0x127F588F}
    assert {place: int(mix(place, 0)) for place in known} == known


@given(WORDS, WORDS)
def test_it_is_the_hash_in_integers(place, seed):
    assert int(mix(place, seed)) == random_word(place, seed)


@given(WORDS)
def test_numbers_are_below_one_and_multiples_of_the_smallest(word):
    number = float(fraction(word))
    assert 0 <= number < 1
    assert number * 2**24 == word >> 8


@given(WORDS, WORDS)
def test_words_can_be_turned_back(place, seed):
    """So no two places of a seed have the same word."""
    x, entry = random_word(place, seed), (seed ^ seed >> 17) * 0xED5AD4BB & 0xFFFFFFFF
    for shift, multiplier in ((14, 0x31848BAB), (15, 0xAC4C1B51), (11, 0xED5AD4BB)):
        x ^= x >> shift ^ x >> 2 * shift
        x ^= entry if shift == 11 else 0
        x = x * pow(multiplier, -1, 1 << 32) & 0xFFFFFFFF
    assert x ^ x >> 17 ^ (seed << 13 & 0xFFFFFFFF | seed >> 19) == place


# Statistics ---------------------------------------------------------------------------------------

N = 1 << 20
PLACES = np.arange(N, dtype=np.uint32)
SEEDS = [0, 1, 0x80000000, 0xFFFFFFFF, 0x2545F491]
LANES = [1 << 25, 1 << 26, 1 << 28, 1 << 31]
"""Distances of partitions."""


def deviations(cells, number):
    """How far a chi-square over cells of equal share is from its mean, in standard deviations."""
    counts = np.bincount(cells.reshape(-1), minlength=number)
    share = cells.size / number
    free = number - 1
    return float((((counts - share) ** 2).sum() / share - free) / np.sqrt(2 * free))


def high(words, bits):
    return (words >> np.uint32(32 - bits)).astype(np.int64)


def signs(words):
    """How far each bit is from being one half of the time, in standard deviations."""
    ones = np.array([int((words >> np.uint32(k) & np.uint32(1)).sum()) for k in range(32)])
    return (2 * ones - words.size) / np.sqrt(words.size)


def assert_independent(a, b):
    """Pairs of the high bytes, of the low bytes, and every bit of the one against the other's."""
    assert abs(deviations(high(a, 8) * 256 + high(b, 8), 1 << 16)) < LIMIT
    assert abs(deviations((a & 255).astype(np.int64) * 256 + (b & 255), 1 << 16)) < LIMIT
    for turn in range(0, 32, 3):
        turned = b << np.uint32(turn) | b >> np.uint32(-turn % 32)
        assert np.abs(signs(a ^ turned)).max() < LIMIT


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_balanced(seed):
    assert np.abs(signs(mix(PLACES, seed))).max() < LIMIT


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_uniform(seed):
    words = mix(PLACES, seed)
    for k in range(0, 32, 8):
        assert abs(deviations((words >> np.uint32(k) & np.uint32(255)).astype(np.int64), 256)) < 6
    assert abs(deviations(high(words, 16), 1 << 16)) < LIMIT


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 64, 4096])
def test_neighbours_are_independent(distance):
    words = mix(PLACES, 5)
    assert_independent(words[:-distance], words[distance:])


@pytest.mark.parametrize("distance", LANES)
def test_partitions_are_independent(distance):
    assert_independent(mix(PLACES, 5), mix(PLACES + np.uint32(distance), 5))


@pytest.mark.parametrize("difference", [1, 2, 3, 256, 1 << 16, 1 << 30, 1 << 31, 0x80000001])
def test_seeds_are_independent(difference):
    """Those that follow one another, too: the word of a place, that of the place beside it, and
    those of the places that would be the same in the first round."""
    words, others = mix(PLACES, 1000), mix(PLACES, 1000 ^ difference)
    assert_independent(words, others)
    assert_independent(words[:-1], others[1:])
    turned = (difference << 13 | difference >> 19) & 0xFFFFFFFF
    assert_independent(words, mix(PLACES ^ np.uint32(turned), 1000 ^ difference))
    assert_independent(words, mix(PLACES ^ np.uint32(difference), 1000 ^ difference))


def test_one_seed_after_another_at_one_place():
    """A new seed for every step of a training: its first word is random, too."""
    words = mix(np.uint32(0), PLACES)
    assert np.abs(signs(words)).max() < LIMIT
    assert abs(deviations(high(words, 16), 1 << 16)) < LIMIT
    assert_independent(words[:-1], words[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_triples_fill_the_cube(seed):
    """Three in a row, by their five high bits."""
    a = high(mix(PLACES, seed), 5)
    assert abs(deviations((a[:-2] * 32 + a[1:-1]) * 32 + a[2:], 1 << 15)) < LIMIT


def test_runs_of_small_numbers_are_as_long_as_they_should_be():
    """Gaps between numbers below a tenth: geometric."""
    small = np.flatnonzero(fraction(mix(PLACES, 3)) < 0.1)
    gaps = np.minimum(np.diff(small) - 1, 40)
    share = 0.1 * 0.9 ** np.arange(40)
    share = np.append(share, 0.9**40) * len(gaps)
    counts = np.bincount(gaps, minlength=41)
    chi = ((counts - share) ** 2 / share).sum()
    assert abs(chi - 40) < LIMIT * np.sqrt(80)


def test_numbers_have_the_mean_and_the_variance_of_uniform_ones():
    x = fraction(mix(PLACES, 11)).astype(np.float64)
    assert abs(x.mean() - 0.5) < LIMIT * np.sqrt(1 / 12 / N)
    assert abs(x.var() - 1 / 12) < LIMIT * np.sqrt(1 / 180 / N)


def test_two_rounds_would_not_do():
    """Why the lanes have a multiplier more: of the best shorter hash these checks notice places
    that differ in a high bit."""

    def shorter(places):
        x = (places ^ places >> np.uint32(16)) * np.uint32(0x21F0AAAD)
        x = (x ^ x >> np.uint32(15)) * np.uint32(0xD35A2D97)
        return x ^ x >> np.uint32(15)

    noticed, rng = 0, np.random.default_rng(3)
    for _ in range(6):
        first = PLACES + rng.integers(1 << 32, dtype=np.uint32)
        try:
            assert_independent(shorter(first), shorter(first + np.uint32(1 << 26)))
        except AssertionError:
            noticed += 1
    assert noticed
