"""A processing element against a fused multiply-add in numpy."""

import cocotb
import numpy as np
from makalu.rtl.arith.operand import Kind, Operand
from pins import begin, cycle, fused, generator, pack, random_sums

VOID = pack(Operand, {"kind": Kind.VOID})
LATENCY = 3


def operands(rng, n, special=0.15):
    """Random operand words, their float64 values, and whether each is there at all."""
    sig = rng.integers(0x800, 0x1000, n)
    exp = np.where(rng.random(n) < 0.7, rng.integers(-4, 5, n), rng.integers(-149, 128, n))
    sign = rng.integers(2, size=n)
    kind = np.where(rng.random(n) < special, rng.integers(4, size=n), 0)
    sig = np.where((kind == 0) & (rng.random(n) < 0.1), 0, sig)
    sig = np.where(kind == Kind.INF, 0x800, sig)
    value = np.ldexp(sig.astype(float), exp - 11)
    value = np.where(kind == Kind.INF, np.inf, np.where(kind == Kind.NAN, np.nan, value))
    value = np.where(sign == 1, -value, value)
    words = sig | (exp & 0x1FF) << 12 | sign << 21 | kind << 22
    return words.tolist(), value, kind != Kind.VOID


async def start(dut):
    await begin(dut, moving=VOID, swap=0, weight=VOID, capture=0, psum_in=0)


async def stream(dut, moving, sums, swaps=(), captures=()):
    """One moving word per cycle; returns the sums. ``swaps`` and ``captures`` by cycle."""
    swaps, captures = dict(swaps), dict(captures)
    out = []
    for t in range(len(moving) + LATENCY):
        if t >= LATENCY:
            out.append(int(dut.psum_out.value))
        dut.moving.value = moving[t] if t < len(moving) else VOID
        dut.psum_in.value = int(sums[t - 1]) if 1 <= t <= len(sums) else 0
        dut.swap.value = int(t in swaps)
        dut.capture.value = int(t in captures)
        dut.weight.value = captures.get(t, VOID)
        await cycle(dut)
    return np.array(out, np.uint32)


@cocotb.test()
async def test_is_void_after_reset(dut):
    await start(dut)
    rng = generator("void")
    sums = random_sums(rng, 60)
    words, _, _ = operands(rng, 60)
    got = await stream(dut, words, sums)
    np.testing.assert_array_equal(got, sums)


@cocotb.test()
async def test_random_products_with_changing_weights(dut):
    await start(dut)
    rng = generator("products")
    compared = 0
    for _ in range(60):
        (word, *_), (w, *_), (there, *_) = operands(rng, 1)
        n = 12
        words, x, present = operands(rng, n)
        sums = random_sums(rng, n)
        # Loaded and swapped in two cycles with nothing moving.
        await stream(dut, [VOID, VOID], [0, 0], swaps={1: 1}, captures={0: word})
        got = await stream(dut, words, sums)
        want = fused(sums, x, np.full(n, w), present & there)
        np.testing.assert_array_equal(got, want, err_msg=f"weight {word:#x}")
        compared += n
    assert compared == 720


@cocotb.test()
async def test_background_load_takes_effect_at_the_swap_only(dut):
    await start(dut)
    rng = generator("swap")
    weights, w, there = operands(rng, 40, special=0)
    n = 40 * 6
    words, x, present = operands(rng, n, special=0.05)
    sums = random_sums(rng, n)
    # Weight i is captured in the middle of wave i - 1 and used from wave i on.
    captures = {6 * i + int(rng.integers(6)): weights[i] for i in range(40)}
    swaps = {6 * i + 5: 1 for i in range(40)}
    got = await stream(dut, words, sums, swaps, captures)
    # A capture in the cycle of a swap is for the swap after it.
    shadow, active, used, valid = None, None, [], []
    for t in range(n):
        used.append(w[active] if active is not None else 0.0)
        valid.append(active is not None and there[active])
        if t in swaps:
            active = shadow
        if t in captures:
            shadow = t // 6
    want = fused(sums, x, np.array(used), present & np.array(valid))
    np.testing.assert_array_equal(got, want)
    assert len({a for a in used}) > 20


@cocotb.test()
async def test_reset_forgets_the_weight(dut):
    await start(dut)
    rng = generator("reset")
    (word, *_), _, _ = operands(rng, 1, special=0)
    await stream(dut, [VOID, VOID], [0, 0], swaps={1: 1}, captures={0: word})
    await begin(dut, clock=False)
    words, _, _ = operands(rng, 20, special=0)
    sums = random_sums(rng, 20)
    np.testing.assert_array_equal(await stream(dut, words, sums), sums)
