"""Parts of the vector engine by themselves: the walker of patterns, a lane."""

from amaranth.lib import data
from makalu.rtl.arch import formats
from makalu.rtl.arch.isa import AccessPattern
from makalu.rtl.engines.vector import LANE_CYCLES, PatternWalker, VectorLane
from makalu.sim.harness import simulate


def test_a_walker_visits_the_elements_of_a_pattern_in_order(rng):
    dut = PatternWalker(addr_bits=12)
    patterns = [((1, 40), (-2, 2)), ((0, 3), (5, 2)), ((3, 1), (-1, 1), (0, 1), (2, 1))]
    for _ in range(20):
        sizes = rng.integers(1, 5, int(rng.integers(1, 5)))
        patterns.append(tuple((int(rng.integers(-3, 6)), int(n)) for n in sizes))
    compared = 0

    async def testbench(ctx):
        nonlocal compared
        for i, dims in enumerate(patterns):
            fmt = (formats.INT8, formats.BF16, formats.FP32)[i % 3]
            wanted = [
                int(at) % 4096 for at in AccessPattern(fmt, 0, 1, 1024, dims).element_offsets()
            ]
            fields = {"offset": 1024}
            for d in range(4):
                step, count = dims[d] if d < len(dims) else (0, 1)
                fields |= {f"step{d}": step, f"count{d}": count}
            layout = data.Layout.cast(dut.pattern.shape())
            ctx.set(dut.pattern.as_value(), layout.const(fields).as_bits())
            ctx.set(dut.size_log2, fmt.bytes.bit_length() - 1)
            ctx.set(dut.load, 1)
            await ctx.tick()
            ctx.set(dut.load, 0)
            for k, at in enumerate(wanted):
                where = f"{fmt.name} {dims} element {k}"
                while rng.random() < 0.3:
                    ctx.set(dut.advance, 0)
                    await ctx.tick()
                assert ctx.get(dut.address) == at, where
                assert ctx.get(dut.moved) == (k == 0 or at // 16 != wanted[k - 1] // 16), where
                assert ctx.get(dut.last) == (k == len(wanted) - 1), where
                compared += 1
                ctx.set(dut.advance, 1)
                await ctx.tick()
            ctx.set(dut.advance, 0)

    simulate(dut, testbench, max_cycles=20_000)
    assert compared > 200


F32, F16, BF16, I8, I32, TF32 = (
    fmt.code
    for fmt in (
        formats.FP32, formats.FP16, formats.BF16, formats.INT8, formats.INT32, formats.TF32,
    )
)  # fmt: skip
E4M3FN = formats.FP8_E4M3FN.code
HUGE = 0x7149F2CA  # 1e30
LANE = [  # src, dst, saturate, copy, bits, wanted
    (F32, F16, 1, 0, HUGE, 0x7BFF), (F32, F16, 0, 0, HUGE, 0x7C00),
    (F32, I8, 1, 0, 0x42FE0000, 127), (F32, I8, 0, 0, HUGE, 127), (F32, I8, 0, 0, 0xFF800000, 128),
    (F32, I8, 0, 0, 0x7FC00000, 0), (F32, I8, 0, 0, 0xBFC00000, 0xFE),
    (I8, F32, 0, 0, 0xFF, 0xBF800000),
    (I32, F32, 0, 0, 0x01000001, 0x4B800000), (I32, F32, 0, 0, 0x01000003, 0x4B800002),
    (I8, BF16, 0, 0, 0x80, 0xC300), (F32, BF16, 0, 0, 0x3F808001, 0x3F81),
    (F32, BF16, 0, 0, 0x3F808000, 0x3F80), (F32, BF16, 0, 0, 0x3F818000, 0x3F82),
    (F32, BF16, 0, 0, 0xFF800001, 0xFFC0), (F32, F16, 0, 0, 0x33000001, 0x0001),
    (F32, F16, 0, 0, 0x33000000, 0x0000), (F32, F16, 0, 0, 0x387FE000, 0x0400),
    (F32, F16, 0, 0, 0x38000000, 0x0200), (F32, F16, 0, 0, 1, 0),
    (F16, F32, 0, 0, 0x3C00, 0x3F800000),
    (F16, F32, 0, 0, 0x0001, 0x33800000), (F16, F32, 0, 0, 0xFC00, 0xFF800000),
    (F16, F32, 0, 0, 0xFC01, 0xFFC00000), (F32, E4M3FN, 0, 0, 0x7F800000, 0x7F),
    (F32, E4M3FN, 1, 0, 0x7F800000, 0x7E), (F32, F32, 0, 1, 0x7F800001, 0x7F800001),
    (F32, F32, 0, 0, 0x7F800001, 0x7FC00000), (TF32, F32, 0, 0, 0x3F801000, 0x3F800000),
    (TF32, F32, 0, 0, 0x3F803000, 0x3F804000), (F32, BF16, 0, 0, 0xB8D1B717, 0xB8D2),
]  # fmt: skip


def test_a_lane_takes_its_source_and_casts_it():
    dut = VectorLane()

    async def testbench(ctx):
        for number, (src, dst, saturate, copy, bits, want) in enumerate(LANE):
            for source in ("sbuf", "psum", "value"):
                shift = number % 4
                for k in range(4):
                    here = k == shift
                    ctx.set(dut.sbuf[k], bits if here and source == "sbuf" else 0x11 + k)
                    ctx.set(dut.psum[k], bits if here and source == "psum" else 0x22 + k)
                ctx.set(dut.value, bits if source == "value" else 0x33)
                for name, value in (
                    ("from_psum", source == "psum"), ("constant", source == "value"),
                    ("shift", shift), ("src_dtype", src), ("dst_dtype", dst),
                    ("saturate", saturate), ("copy", copy),
                ):  # fmt: skip
                    ctx.set(getattr(dut, name), int(value))
                await ctx.tick().repeat(LANE_CYCLES)
                width = {F32: 32, TF32: 32, I8: 8, E4M3FN: 8}.get(dst, 16)
                got = ctx.get(dut.raw) & (1 << width) - 1
                assert got == want, f"{bits:#x} from {src} to {dst}: {got:#x}, not {want:#x}"

    simulate(dut, testbench, max_cycles=20_000)
