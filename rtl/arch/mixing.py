"""The hash behind :class:`~.isa.Rng`: a word of 32 bits from a place and a seed.

Three rounds of xorshift and multiplication, and a last xorshift. The shifts and multipliers are
those of ``triple32``, which Christopher Wellons found by search and put in the public domain
(https://github.com/skeeto/hash-prospector, which states a bias of 0.021, the least that a function
of this size can have). It is a permutation of the 32-bit words. The seed enters twice: only before
the first round, all seeds would have the same words, at other places; only behind it, seeds that
differ in one bit would have words that are correlated. Behind it enters what the first round makes
of the seed, before it the seed rotated, so that the two never cancel. Not for secrets.

Two rounds would do without the multiplier that the lanes have for the first one, and fail: places
that differ in a high bit, as those of partitions do, then have words that are clearly correlated.
"""

import numpy as np

__all__ = ["FRACTION_BITS", "LAST_SHIFT", "ROUNDS", "SEED_TURN", "fraction", "mix"]

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""Right shift and multiplier of each round."""
LAST_SHIFT = 14
"""Right shift after the rounds."""
SEED_TURN = 13
"""Bits by which the seed is rotated left before it enters the first time."""
FRACTION_BITS = 24
"""Bits of a random number from 0 to 1: the high ones of a word."""


def _round(words, number):
    shift, multiplier = ROUNDS[number]
    return (words ^ (words >> np.uint32(shift))) * np.uint32(multiplier)


def mix(places, seed):
    """The words of places.

    Parameters
    ----------
    places : uint32 array
    seed : :class:`int` or uint32 array that broadcasts

    Returns
    -------
    uint32 array
    """
    words, seed = np.asarray(places, np.uint32), np.asarray(seed, np.uint32)
    turned = seed << np.uint32(SEED_TURN) | seed >> np.uint32(32 - SEED_TURN)
    with np.errstate(over="ignore"):
        words = _round(words ^ turned, 0) ^ _round(seed, 0)
        words = _round(_round(words, 1), 2)
    return words ^ (words >> np.uint32(LAST_SHIFT))


def fraction(words):
    """Words as float32 numbers from 0 to below 1, exact."""
    numbers = np.asarray(words, np.uint32) >> np.uint32(32 - FRACTION_BITS)
    return numbers.astype(np.float32) * np.float32(2.0**-FRACTION_BITS)
