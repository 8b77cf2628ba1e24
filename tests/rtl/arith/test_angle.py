"""Reduction of angles against the golden model, which is held to mpmath, and its timing."""

import numpy as np
import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch.functions import ANGLE_DIRECT
from makalu.rtl.arith.angle import ANGLE_CYCLES, AngleReducer
from makalu.sim.activation import reduce_angle

from .support import assert_equal_bits, run_vectors


def angles(rng, n):
    """All exponents, few turns, and the neighbours of multiples of pi."""
    multiples = np.float32(np.pi * np.round(np.exp2(rng.uniform(0, 60, n))))
    near = multiples.view(np.uint32) + rng.integers(-2, 3, n)
    borders = (np.arange(127, 255) << 23)[:, None] + np.arange(-2, 3)
    hard = np.float32([16367173 * 2.0**72, 3, np.pi]).view(np.uint32)
    parts = [
        hard, borders.ravel(), ANGLE_DIRECT + np.arange(-2, 3), near,
        rng.integers(0, 0x7F800000, n), rng.integers(ANGLE_DIRECT, 0x43000000, n),
    ]  # fmt: skip
    codes = np.concatenate(parts).astype(np.uint32)
    return codes[codes < 0x7F800000]


def check(codes, results):
    distance, odd = reduce_angle(codes)
    reduced = codes > ANGLE_DIRECT
    assert_equal_bits(results["reduced"], reduced, angle=codes)
    for name, want in (("distance", distance), ("odd", odd)):
        assert_equal_bits(results[name][reduced], want[reduced], angle=codes[reduced])


@pytest.mark.verilator
def test_every_angle_is_reduced_like_the_golden_model(rng):
    codes = angles(rng, 200_000)
    signs = rng.integers(0, 2, len(codes), np.uint32) << np.uint32(31)
    check(codes, run_vectors(AngleReducer(), latency=ANGLE_CYCLES, angle=codes | signs))


def test_an_angle_per_cycle(rng):
    codes = rng.permutation(angles(rng, 200))[:600]
    dut = AngleReducer()
    results = {"reduced": [], "distance": [], "odd": []}

    async def testbench(ctx):
        for cycle in range(len(codes) + ANGLE_CYCLES):
            ctx.set(dut.angle, int(codes[cycle]) if cycle < len(codes) else 0)
            if cycle >= ANGLE_CYCLES:
                for name, taken in results.items():
                    taken.append(ctx.get(getattr(dut, name)))
            await ctx.tick()

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(testbench)
    sim.run()
    check(codes, {name: np.array(taken) for name, taken in results.items()})
