"""Exact witnesses: fused sums in integer arithmetic, operand words, the values of codes.

Written from the contract's sentences, not from the hardware: sums are 62-bit integers with an
exponent, rounded by comparing the remainder with one half.
"""

from fractions import Fraction

import numpy as np

NUMBER, INF, NAN, VOID = range(4)
CANONICAL_NAN = 0x7FC00000


def pack_operand(sig, exp, sign, kind=NUMBER):
    """Words of :class:`~makalu.rtl.arith.operand.Operand`."""
    sig, exp, sign, kind = (np.asarray(a, np.int64) for a in (sig, exp, sign, kind))
    return (sig | (exp & 0x1FF) << 12 | sign << 21 | kind << 22).astype(np.uint32)


def unpack_operand(words):
    """Fields ``sig, exp, sign, kind, pad`` of operand words, as int64."""
    words = np.asarray(words, np.int64)
    exp = words >> 12 & 0x1FF
    return (
        words & 0xFFF,
        np.where(exp >= 256, exp - 512, exp),
        words >> 21 & 1,
        words >> 22 & 3,
        words >> 24,
    )


def operand_value(words):
    """float64 values of operand words (exact), and where they are void."""
    sig, exp, sign, kind, _ = unpack_operand(words)
    value = np.ldexp(sig.astype(np.float64), exp - 11)
    value = np.where(kind == INF, np.inf, value)
    value = np.where(kind == NAN, np.nan, np.where(sign == 1, -value, value))
    return np.where(kind == VOID, 0.0, value), kind == VOID


def bit_length(values):
    """Bits of non-negative int64 numbers below 2**62."""
    _, bits = np.frexp(values.astype(np.float64))
    return bits - (values < np.int64(1) << np.maximum(bits - 1, 0).astype(np.int64))


def exact_sum(sign, mag, lsb, acc, *, details=None):
    """``RNE_fp32((-1)**sign * mag * 2**lsb + acc)`` of finite ``acc``, ``mag`` below 2**25.

    Parameters
    ----------
    sign, mag, lsb : int64 arrays
    acc : uint32 array
    details : :class:`dict`, optional
        Filled with what happened to each vector, for coverage.
    """
    acc = np.asarray(acc, np.int64)
    acc_sign, acc_exp, acc_mag = acc >> 31, acc >> 23 & 0xFF, acc & 0x7FFFFF
    acc_mag = np.where(acc_exp > 0, acc_mag | 0x800000, acc_mag)
    acc_lsb = np.maximum(acc_exp, 1) - 150
    term = np.where(sign == 1, -mag, mag)
    base = np.where(acc_sign == 1, -acc_mag, acc_mag)

    # Bring both to the lower of the two last places. Where they lie so far apart that the lower one
    # is less than the last place of the sum times 2**-13, one unit there stands for it.
    term_higher = lsb >= acc_lsb
    high, low = np.where(term_higher, term, base), np.where(term_higher, base, term)
    high_lsb, low_lsb = np.maximum(lsb, acc_lsb), np.minimum(lsb, acc_lsb)
    gap = high_lsb - low_lsb
    near = gap <= 36
    total = np.where(
        near,
        (high << np.minimum(gap, 36)) + low,
        np.where(high == 0, low, (high << 37) + np.sign(low)),
    )
    place = np.where(near | (high == 0), low_lsb, high_lsb - 37)

    size = np.abs(total)
    bits = bit_length(size)
    target = np.maximum(place + bits - 24, -149)
    drop = np.clip(target - place, 0, 62)
    grow = np.clip(place - target, 0, 62)
    whole = size >> drop
    rest = size - (whole << drop)
    half = np.where(drop > 0, np.int64(1) << np.maximum(drop - 1, 0), 0)
    up = (drop > 0) & ((rest > half) | ((rest == half) & (whole & 1 == 1)))
    rounded = np.where(drop > 0, whole + up, size << grow)
    bits32 = np.where(rounded == 0, 0, rounded + (target + 149 << 23))
    overflow = bits32 >= 0x7F800000
    bits32 = np.where(overflow, 0x7F800000, bits32)
    negative = np.where(total == 0, sign & acc_sign, total < 0)
    if details is not None:
        details.update(
            gap=lsb - acc_lsb,
            term=mag,
            acc=acc_mag,
            cancelled=np.maximum(
                bit_length(np.abs(high)) + np.minimum(gap, 37), bit_length(np.abs(low))
            )
            - bits,
            opposite=sign != acc_sign,
            zero=total == 0,
            odd=whole & 1,
            guard=(drop > 0) & (rest >= half),
            sticky=(drop > 0) & (rest != 0) & (rest != half),
            up=up,
            carry=up & (whole == 0xFFFFFF),
            subnormal=(bits32 > 0) & (bits32 < 0x800000),
            into_normal=up & (whole == 0x7FFFFF) & (target == -149),
            overflow=overflow,
            into_infinity=overflow & up & (whole == 0xFFFFFF) & (target == 104),
        )
    return (bits32 | negative.astype(np.int64) << 31).astype(np.uint32)


def exact_fma(x, w, acc, *, details=None):
    """Result bits of a processing element for operand words ``x``, ``w`` and sum bits ``acc``."""
    x_sig, x_exp, x_sign, x_kind, _ = unpack_operand(x)
    w_sig, w_exp, w_sign, w_kind, _ = unpack_operand(w)
    acc = np.asarray(acc, np.int64)
    acc_nan = (acc & 0x7FFFFFFF) > 0x7F800000
    acc_inf = (acc & 0x7FFFFFFF) == 0x7F800000
    sign = x_sign ^ w_sign
    void = (x_kind == VOID) | (w_kind == VOID)
    inf = (x_kind == INF) | (w_kind == INF)
    zero = ((x_kind == NUMBER) & (x_sig == 0)) | ((w_kind == NUMBER) & (w_sig == 0))
    nan = (x_kind == NAN) | (w_kind == NAN) | (inf & zero)
    finite_acc = np.where(acc_nan | acc_inf, 0, acc)
    number = ~(void | nan | inf)
    result = exact_sum(
        sign, np.where(number, x_sig * w_sig, 0), x_exp + w_exp - 22, finite_acc, details=details
    ).astype(np.int64)
    result = np.where(acc_inf, acc, result)
    result = np.where(inf, sign << 31 | 0x7F800000, result)
    result = np.where(nan | (inf & acc_inf & (sign != acc >> 31)), CANONICAL_NAN, result)
    result = np.where(void, acc, result)
    if details is not None:
        details["plain"] = number & ~acc_nan & ~acc_inf
    return np.where(acc_nan, CANONICAL_NAN, result).astype(np.uint32)


def exact_add(a, b):
    """Result bits of a binary32 addition; see :func:`exact_fma` for NaN."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    exp, frac = a >> 23 & 0xFF, a & 0x7FFFFF
    special = np.zeros(a.shape, bool)
    nan = np.zeros(a.shape, bool)
    for value in (a, b):
        special |= (value >> 23 & 0xFF) == 255
        nan |= (value & 0x7FFFFFFF) > 0x7F800000
    nan |= special & ((a ^ b) == 0x80000000) & ((a & 0x7FFFFFFF) == 0x7F800000)
    plain_a, plain_b = np.where(special, 0, a), np.where(special, 0, b)
    exp, frac = plain_a >> 23 & 0xFF, plain_a & 0x7FFFFF
    total = exact_sum(
        plain_a >> 31,
        np.where(exp > 0, frac | 0x800000, frac),
        np.maximum(exp, 1) - 150,
        plain_b,
    ).astype(np.int64)
    infinite = np.where((a & 0x7FFFFFFF) == 0x7F800000, a, b)
    total = np.where(special, infinite, total)
    return np.where(nan, CANONICAL_NAN, total).astype(np.uint32)


def round_fraction(value):
    """Bits of the binary32 nearest to a non-zero :class:`~fractions.Fraction`, ties to even."""
    sign, value = int(value < 0), abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    place = max(exponent, -126) - 23
    units = round(value / Fraction(2) ** place)  # Python rounds a Fraction half to even
    if units >= 1 << 24:
        units, place = units >> 1, place + 1
    if place > 104:
        return sign << 31 | 0x7F800000
    return sign << 31 | (units if units < 1 << 23 else units + (place + 149 << 23))


def float_fraction(bits):
    """Exact value of finite binary32 ``bits``."""
    bits = int(bits)
    exp, frac = bits >> 23 & 0xFF, bits & 0x7FFFFF
    value = Fraction(frac | (0x800000 if exp else 0)) * Fraction(2) ** (max(exp, 1) - 150)
    return -value if bits >> 31 else value


def canonical(values):
    """Bits of a float32 array with every NaN replaced by the canonical one."""
    values = np.ascontiguousarray(values, np.float32)
    return np.where(np.isnan(values), np.uint32(CANONICAL_NAN), values.view(np.uint32))
