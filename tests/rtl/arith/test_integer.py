"""The GpSimd engine's operations against Python's integers."""

import itertools

import numpy as np
import pytest
from makalu.rtl.arch.isa import AluOp
from makalu.rtl.arith.integer import INTEGER_ALU_CYCLES, IntegerAlu
from makalu.sim.harness import simulate

from ..engines.gpsimd_model import operate
from .support import assert_equal_bits, run_vectors

BIG = 1 << 31
SPECIAL = [
    0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x10001, 0x55555555,
    BIG - 2, BIG - 1, BIG, BIG + 1, 0xFFFF0000, 0xFFFF0001, 0xFFFFFFFE, 0xFFFFFFFF,
]  # fmt: skip
FEW = [0, 1, 5, 32, 0x10001, BIG - 1, BIG, 0xFFFFFFFF]


def expected(op, signed, a, b):
    columns = (v.tolist() for v in (op, a, b, signed))
    return np.array([operate(*row) for row in zip(*columns, strict=True)], np.uint32)


def run(op, signed, a, b):
    return run_vectors(
        IntegerAlu(), latency=INTEGER_ALU_CYCLES, op=op, is_signed=signed, a=a, b=b
    )["result"]  # fmt: skip


def test_every_operation_on_a_few_numbers():
    """One operation per cycle, each other than the one before; int32 and uint32 in turn."""
    dut = IntegerAlu()
    vectors = [
        (op, signed, a, b)
        for a, b, op, signed in itertools.product(FEW, FEW, AluOp, (0, 1))
    ]  # fmt: skip

    async def testbench(ctx):
        for cycle in range(len(vectors) + INTEGER_ALU_CYCLES):
            op, signed, a, b = vectors[min(cycle, len(vectors) - 1)]
            ctx.set(dut.op, op)
            ctx.set(dut.is_signed, signed)
            ctx.set(dut.a, a)
            ctx.set(dut.b, b)
            if cycle >= INTEGER_ALU_CYCLES:
                op, signed, a, b = vectors[cycle - INTEGER_ALU_CYCLES]
                got, want = ctx.get(dut.result), operate(op, a, b, signed)
                what = f"{op.name} {a:#x} {b:#x}, {signed=}: {got:#x}, not {want:#x}"
                assert got == want, what
            await ctx.tick()

    simulate(dut, testbench)


def test_the_waveform_of_the_docstring_is_true():
    lines = IntegerAlu.__doc__.split("65537 * 65536::\n\n")[1].split("\n\n")[0]
    rows = {name: values for name, *values in map(str.split, lines.splitlines())}
    dut = IntegerAlu()
    compared = 0

    async def testbench(ctx):
        nonlocal compared
        for cycle in range(len(rows["cycle"])):
            for name in ("op", "a", "b"):
                if rows[name][cycle] != ".":
                    ctx.set(getattr(dut, name), int(rows[name][cycle], 0))
            if (want := rows["result"][cycle]) != ".":
                assert ctx.get(dut.result) == int(want, 0)
                compared += 1
            await ctx.tick()

    simulate(dut, testbench)
    assert compared == 2
    assert [int(code) for code in rows["op"][:2]] == [AluOp.SUBTRACT, AluOp.MULTIPLY]


@pytest.mark.verilator
def test_every_operation_on_every_pair_of_specials():
    cases = np.array(list(itertools.product(AluOp, (0, 1), SPECIAL, SPECIAL)), np.uint32)
    op, signed, a, b = cases.T
    assert_equal_bits(
        run(op, signed, a, b), expected(op, signed, a, b), op=op, is_signed=signed, a=a, b=b
    )


@pytest.mark.verilator
def test_every_operation_on_random_integers(rng):
    """Many near each other, many of the same magnitude, shifts near the width."""
    n = 5_000 * len(AluOp)
    op = rng.choice(np.array(list(AluOp), np.uint32), n)
    signed = rng.integers(0, 2, n, np.uint32)
    a = rng.integers(0, 1 << 32, n, np.uint32)
    near = a + rng.integers(-2, 3, n).astype(np.uint32)
    opposite = (-a.astype(np.int64)).astype(np.uint32)
    b = np.select(
        [rng.random(n) < 0.3, rng.random(n) < 0.2], [near, opposite],
        rng.integers(0, 1 << 32, n, np.uint32),
    ).astype(np.uint32)  # fmt: skip
    shifts = (op == AluOp.LEFT_SHIFT) | (op == AluOp.RIGHT_SHIFT)
    b = np.where(shifts, b % 40, b).astype(np.uint32)
    assert_equal_bits(
        run(op, signed, a, b), expected(op, signed, a, b), op=op, is_signed=signed, a=a, b=b
    )
