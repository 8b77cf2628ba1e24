"""The vector engine's operations against the golden model's, which numpy computes."""

import itertools

import numpy as np
import pytest
from makalu.rtl.arch.isa import AluOp
from makalu.rtl.arith.alu import ALU_CYCLES, LATE_CYCLES, Alu
from makalu.sim.elementwise import operate
from makalu.sim.harness import simulate

from .support import assert_equal_bits, run_vectors

SPECIAL = [
    0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000,
    0x4B800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 5, 31, 32, 33, 255,
]  # fmt: skip


def run(op, a, b, *, late=False):
    ports = {"b": 0xDEADBEEF, "late": b} if late else {"b": b, "late": 0xDEADBEEF}
    return run_vectors(
        Alu(), latency=ALU_CYCLES, delays={"take_late": LATE_CYCLES, "late": LATE_CYCLES},
        op=op, a=a, take_late=int(late), **ports,
    )["result"]  # fmt: skip


def numbers(rng, n):
    """Random bits, many near each other in value and many with the same magnitude."""
    a = rng.integers(0, 1 << 32, n, np.uint32)
    near = a + rng.integers(-2, 3, n).astype(np.uint32)
    b = np.where(rng.random(n) < 0.5, near, rng.integers(0, 1 << 32, n, np.uint32))
    flipped = np.where(rng.random(n) < 0.2, a ^ np.uint32(1 << 31), b)
    return a, flipped.astype(np.uint32)


FEW = [0, 1 << 31, 0x3F800000, 0xBF800000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7FC00000, 5, 35]


def test_every_operation_on_a_few_numbers():
    """One operation per cycle; where the second operand may come late, it does so in turn."""
    dut = Alu()
    pairs = np.array(list(itertools.product(FEW, FEW)), np.uint32).T
    wanted = [int(bits) for op in AluOp for bits in operate(op, *pairs)]
    vectors = [
        (op, a, b, op != AluOp.MULTIPLY and i % 2)
        for i, (op, a, b) in enumerate(itertools.product(AluOp, FEW, FEW))
    ]

    async def testbench(ctx):
        for cycle in range(len(vectors) + ALU_CYCLES):
            op, a, b, late = vectors[min(cycle, len(vectors) - 1)]
            ctx.set(dut.op, op)
            ctx.set(dut.a, a)
            ctx.set(dut.b, 0xDEADBEEF if late else b)
            if cycle >= LATE_CYCLES:
                *_, b, late = vectors[min(cycle - LATE_CYCLES, len(vectors) - 1)]
                ctx.set(dut.late, b if late else 0xDEADBEEF)
                ctx.set(dut.take_late, int(late))
            if cycle >= ALU_CYCLES:
                op, a, b, _ = vectors[cycle - ALU_CYCLES]
                got, want = ctx.get(dut.result), wanted[cycle - ALU_CYCLES]
                assert got == want, f"{op.name} {a:#x} {b:#x}: {got:#x}, not {want:#x}"
            await ctx.tick()

    simulate(dut, testbench)


@pytest.mark.verilator
def test_every_operation_on_every_pair_of_specials():
    values = [v | sign for v in SPECIAL for sign in (0, 1 << 31)]
    triples = np.array(list(itertools.product(AluOp, values, values)), np.uint32)
    op, a, b = triples.T
    expected = np.concatenate([operate(o, a[op == o], b[op == o]) for o in AluOp])
    assert_equal_bits(run(op, a, b), expected, op=op, a=a, b=b)
    takes_late = op != AluOp.MULTIPLY
    op, a, b = op[takes_late], a[takes_late], b[takes_late]
    assert_equal_bits(run(op, a, b, late=True), expected[takes_late], op=op, a=a, b=b)


@pytest.mark.verilator
def test_every_operation_on_random_bits():
    rng = np.random.default_rng(1)
    n = 20_000
    a, b = numbers(rng, n * len(AluOp))
    op = np.repeat(np.array(list(AluOp), np.uint32), n)
    shifts = (op == AluOp.LEFT_SHIFT) | (op == AluOp.RIGHT_SHIFT)
    b = np.where(shifts, b % 40, b).astype(np.uint32)
    expected = np.concatenate([operate(o, a[op == o], b[op == o]) for o in AluOp])
    # Operations in any order: none depends on the one before.
    order = rng.permutation(len(op))
    assert_equal_bits(
        run(op[order], a[order], b[order]), expected[order], op=op[order], a=a[order], b=b[order]
    )
