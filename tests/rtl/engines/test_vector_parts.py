"""Parts of the vector engine by themselves: the walker of patterns, a lane."""

import numpy as np
from amaranth.lib import data
from makalu.rtl.arch import formats
from makalu.rtl.arch.isa import BITWISE_OPS, AccessPattern, AluOp, ReduceOp
from makalu.rtl.engines.sequencer import PatternWalker
from makalu.rtl.engines.vector import CONTROLS, LANE_CYCLES, Operand, Partial, VectorLane
from makalu.sim.harness import simulate

from .vector_model import operate


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


def element(
    rng, first=0, second=0, /, *, port="sbuf", port1="sbuf1", shift=0, shift1=0, **controls
):
    """Inputs of a lane for an element: its sources in one place each, noise in all others."""
    inputs = {name: rng.integers(1 << 32, size=4).tolist() for name in ("sbuf", "psum", "sbuf1")}
    inputs |= dict.fromkeys(CONTROLS, 0)
    inputs |= {
        "value": first if port == "value" else 0x33,
        "constant": int(port == "value"),
        "from_psum": int(port == "psum"),
        "from_psum1": int(port1 == "psum"),
        "shift0": shift,
        "shift1": shift1,
    }
    if port != "value":
        inputs[port][shift] = first
    inputs[port1][shift1] = second
    return inputs | {name: int(value) for name, value in controls.items()}


def run_lane(rng, elements, check):
    """One element per cycle, ``None``: a cycle without. ``check(i, raw)`` of what comes out."""
    dut, results = VectorLane(), 0
    nothing = [element(rng)] * LANE_CYCLES
    steps = [inputs or element(rng) for inputs in elements] + nothing

    async def testbench(ctx):
        nonlocal results
        for cycle in range(len(steps)):
            for name in ("sbuf", "psum", "sbuf1"):
                for k, bits in enumerate(steps[cycle][name]):
                    ctx.set(getattr(dut, name)[k], bits)
            for name, (_, late) in CONTROLS.items():
                ctx.set(getattr(dut, name), steps[cycle - late][name] if cycle >= late else 0)
            if cycle >= LANE_CYCLES:
                check(cycle - LANE_CYCLES, ctx.get(dut.raw))
                results += 1
            await ctx.tick()

    simulate(dut, testbench, max_cycles=20_000)
    assert results == len(elements)


def test_a_lane_takes_its_source_and_casts_it(rng):
    """Through the first operand, and through the second of an operation that gives that one."""
    swap = {"reverse0": 1, "operand0": Operand.ELEMENT}
    elements, wanted = [], []
    for number, (src, dst, saturate, copy, bits, want) in enumerate(LANE):
        size = {F32: 2, TF32: 2, I32: 2, I8: 0, E4M3FN: 0}.get(src, 1)
        common = {"bits": copy, "raw_bits": copy, "dst_dtype": dst, "saturate": saturate}
        for port in ("sbuf", "psum", "value"):
            shift = number % 4
            elements.append(
                element(rng, bits, port=port, shift=shift, dtype0=src, size0=size, **common)
            )
        for port in ("sbuf1", "psum"):
            second = {"dtype1": src, "size1": size, "shift1": (number + 1) % 4}
            elements.append(element(rng, 0, bits, port1=port, **second, **swap, **common))
        wanted += 5 * [(src, dst, bits, want)]

    def check(i, got):
        src, dst, bits, want = wanted[i]
        width = {F32: 32, TF32: 32, I8: 8, E4M3FN: 8}.get(dst, 16)
        got &= (1 << width) - 1
        assert got == want, f"{bits:#x} from {src} to {dst}: {got:#x}, not {want:#x}"

    run_lane(rng, elements, check)


SPECIAL = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x3F800000, 5, 31, 33]


def some_bits(rng):
    """A number of moderate size, or one that is special, or any bits."""
    kind = rng.random()
    if kind < 0.6:
        return int(np.float32(rng.integers(-64, 65) / 8).view(np.uint32))
    return int(rng.choice(SPECIAL) if kind < 0.85 else rng.integers(1 << 32))


def quiet(bits):
    """A NaN becomes canonical, but for its sign."""
    return bits & 1 << 31 | 0x7FC00000 if bits & 0x7FFFFFFF > 0x7F800000 else bits


def test_a_lane_computes_with_every_kind_of_second_operand(rng):
    """Every element another operation, operand, order, source: what belongs to one goes with it."""
    elements, wanted = [], []
    scalars = [0, 0]
    arithmetic = [op for op in AluOp if op not in BITWISE_OPS]
    kinds = (Operand.NUMBER, Operand.SCALAR, Operand.ELEMENT)
    for i in range(600):
        is_bits = rng.random() < 0.3
        among = [AluOp.BYPASS, *BITWISE_OPS] if is_bits else arithmetic
        ops = [among[k] for k in rng.integers(len(among), size=2)]
        bits, bits1 = some_bits(rng), some_bits(rng)
        port1 = str(rng.choice(["sbuf1", "sbuf1", "psum"]))
        port = str(rng.choice(["sbuf", "value"] if port1 == "psum" else ["sbuf", "psum", "value"]))
        shift, shift1, size, size1 = (int(v) for v in rng.integers([4, 4, 3, 3]))
        negate = rng.integers(2)
        load = (rng.random(2) < 0.2).tolist() if i > 1 else [True, True]
        operand = [kinds[k] for k in rng.integers(3, size=2)]
        numbers = [some_bits(rng) for _ in range(2)]
        reverse = rng.integers(2, size=2).tolist()
        elements.append(
            element(
                rng, bits, bits1, port=port, port1=port1, shift=shift, shift1=shift1,
                dtype0=F32, dtype1=F32, bits=is_bits, size0=size, size1=size1,
                operand0=operand[0], number0=numbers[0], reverse0=reverse[0], op0=ops[0],
                operand1=operand[1], number1=numbers[1], reverse1=reverse[1], op1=ops[1],
                load0=load[0], load1=load[1], negate=negate, dst_dtype=F32, raw_bits=is_bits,
            )
        )  # fmt: skip
        x, y = quiet(bits), quiet(bits1)
        if is_bits:
            x, y = bits & (1 << (8 << size)) - 1, bits1 & (1 << (8 << size1)) - 1
        for n in range(2):
            other = (numbers[n], scalars[n], y)[operand[n]]
            x = operate(ops[n], *((other, x) if reverse[n] else (x, other)))
        x ^= int(negate) << 31
        wanted.append(x if is_bits else quiet(x))
        for n in range(2):
            scalars[n] = (bits, bits1)[n] if load[n] else scalars[n]

    def check(i, got):
        assert got == wanted[i], f"element {i}, {elements[i]}: {got:#x}, not {wanted[i]:#x}"

    run_lane(rng, elements, check)


def partial_of(times, k):
    """What element ``k`` of a row is combined with, of results that take two cycles."""
    if k < 2:
        return Partial.IDENTITY
    if times[k - 2] + 2 == times[k]:
        return Partial.NOW
    return Partial.LAST if times[k - 1] + 2 >= times[k] else Partial.LAST_BUT_ONE


def test_a_lane_reduces_rows_with_gaps_in_them(rng):
    elements, wanted = [], {}
    seen = set()
    for i in range(60):
        op = list(ReduceOp)[i % len(ReduceOp)]
        is_bits, count, negate = op in BITWISE_OPS, int(rng.integers(1, 8)), int(rng.integers(2))
        gaps = rng.choice([0, 0, 1, 2, 4], size=count).tolist()
        partials, times = [op.identity, op.identity], []
        for k, gap in enumerate(gaps):
            elements += [None] * gap
            times.append(len(elements))
            bits, last = some_bits(rng), k == count - 1
            partial = partial_of(times, k)
            seen.add(partial)
            elements.append(
                element(
                    rng, bits, shift=i % 4, dtype0=F32, bits=is_bits, size0=2, op0=op,
                    operand0=Operand.NUMBER, reduces=1, partial=partial, identity=op.identity,
                    keep=1, operand1=Operand.RESULT, op1=AluOp.BYPASS if count == 1 else op,
                    negate=negate, dst_dtype=F32, raw_bits=is_bits,
                )
            )  # fmt: skip
            x = bits if is_bits else quiet(bits)
            partials[k % 2] = operate(op, partials[k % 2], x)
            if last:
                x = partials[0] if count == 1 else operate(op, *partials)
                x ^= negate << 31
                wanted[times[k]] = (op, gaps, x if is_bits else quiet(x))
    assert seen == set(Partial)

    def check(i, got):
        if i in wanted:
            op, gaps, want = wanted[i]
            assert got == want, f"{op.name} {gaps}: {got:#x}, not {want:#x}"

    run_lane(rng, elements, check)
