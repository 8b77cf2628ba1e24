"""GpSimd engine on a real state buffer, alone and beside the vector engine, its ports shared."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from amaranth.lib.wiring import connect
from makalu.rtl.arch.formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    INT8,
    INT16,
    INT32,
    INTEGER_FORMATS,
    UINT8,
    UINT32,
)
from makalu.rtl.arch.isa import (
    AccessPattern,
    AffineSelect,
    AluOp,
    Compare,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    Rng,
    Space,
    UpdateMode,
)
from makalu.rtl.engines.gpsimd import CONTROLS, GpSimdEngine, GpSimdLane
from makalu.rtl.engines.vector import GAP_CYCLES, LANE_CYCLES, VECTOR_CYCLES
from makalu.rtl.memory.sbuf import DMA_PATIENCE_CYCLES
from makalu.sim.harness import simulate

from . import gpsimd_model, vector_bench
from .vector_bench import (
    CONFIG,
    EIGHT_ROWS,
    HALF,
    copy,
    line,
    random_pattern,
    random_starts,
    special_codes,
    update,
)

BIG = 1 << 31
RANDOM_FORMATS = next(operand.formats for _, operand, _ in Rng.operands)
CORNERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, BIG - 1, BIG, BIG + 1, 0xFFFFFFFF, 31]


class Machine(vector_bench.Machine):
    """The GpSimd engine, joined with the vector engine as in the core."""

    def join(self, m):
        vector, gpsimd = self.vector, GpSimdEngine(config=self.config)
        m.submodules.gpsimd = gpsimd
        for read, through in zip(vector.sbuf_read, gpsimd.vector_read, strict=True):
            connect(m, read, through)
        connect(m, vector.sbuf_write, gpsimd.vector_write)
        m.d.comb += [
            vector.hold.eq(gpsimd.vector_hold),
            vector.occupied.eq(gpsimd.occupied),
            gpsimd.vector_start.eq(vector.start),
            gpsimd.vector_running.eq(vector.running),
            gpsimd.vector_wants.eq(vector.wants),
        ]
        return [gpsimd, vector]


class Bench(vector_bench.Bench):
    machine_class = Machine
    model = staticmethod(gpsimd_model.execute)

    def __init__(self, config, rng):
        super().__init__(config, rng)
        (self.vector,) = self.others


async def together(ctx, *bodies):
    """Run testbenches side by side until all have ended."""
    running = list(bodies)
    while running:
        for body in list(running):
            try:
                body.send(None)
            except StopIteration:
                running.remove(body)
        if running:
            await ctx.tick()


def function(offset=0, channel_multiplier=0, *steps):
    """Fields of an affine function."""
    fields = {"offset": offset, "channel_multiplier": channel_multiplier}
    fields |= {f"step{i}": step for i, step in enumerate(steps)}
    return {name: value & 0xFFFFFFFF for name, value in fields.items()}


def random_function(rng):
    """Often one that passes zero, else any."""
    bound = 6 if rng.random() < 0.7 else BIG
    return function(*(int(v) for v in rng.integers(-bound, bound, size=6)))


KINDS_OF_INSTRUCTION = (Iota, AffineSelect, IntegerTensorTensor, IntegerTensorScalar, Rng)


def seed_of(rng):
    """Any seed, or a corner value."""
    return int(rng.choice(CORNERS) if rng.random() < 0.3 else rng.integers(1 << 32))


def random_program(rng, config, length, longest):
    """Sources and scalars in the lower half, results in the upper one."""
    program = []
    for i in range(length):
        cls = KINDS_OF_INSTRUCTION[rng.integers(len(KINDS_OF_INSTRUCTION))]
        operands = [(name, operand.formats) for name, operand, _ in cls.operands]
        partitions, starts = random_starts(rng, config, len(operands))
        counts = []
        for _ in range(int(rng.integers(1, 5))):
            room = longest // int(np.prod(counts, dtype=int))
            counts.append(int(rng.integers(1, max(2, 1 + room))))
        values = {"update": update(i) if rng.random() < 0.8 else None}
        for (name, formats), start in zip(operands, starts, strict=True):
            fmt = formats[rng.integers(len(formats))]
            low, high = (HALF, config.sbuf_bytes) if name == "dst" else (0, HALF)
            shape = [int(n) for n in rng.permutation(counts)]
            if rng.random() < 0.3:
                shape = [int(np.prod(shape))]
            offset, dims = random_pattern(rng, fmt, low, high, shape)
            values[name] = AccessPattern(fmt, start, partitions, offset, dims)
        if cls in (Iota, AffineSelect, Rng):
            values |= random_function(rng)
        if cls in (Iota, AffineSelect):
            values["saturate"] = int(rng.integers(2))
        if cls is Rng:
            pointer = values["seed_pointer"] = int(rng.integers(2))
            values["seed"] = 4 * int(rng.integers(HALF // 4)) if pointer else seed_of(rng)
        if cls is AffineSelect:
            values["compare"] = list(Compare)[rng.integers(6)]
            values["value"] = int(special_codes(rng, FP32, values["dst"].dtype, 1)[0])
        if cls is IntegerTensorTensor:
            values["op"] = list(AluOp)[rng.integers(len(AluOp))]
        if cls is IntegerTensorScalar:
            for k in range(2):
                pointer = int(rng.integers(2))
                values[f"op{k}"] = list(AluOp)[rng.integers(len(AluOp))]
                values[f"reverse{k}"] = int(rng.integers(2))
                values[f"scalar{k}_pointer"] = pointer
                number = CORNERS[rng.integers(len(CORNERS))]
                values[f"scalar{k}"] = 4 * int(rng.integers(HALF // 4)) if pointer else number
        program.append(cls(**values))
    return program


def corners(rng, bench):
    """Replace about half of the memory's words by corner values of integers."""
    words = bench.bytes.view(np.uint32)
    chosen = np.array(CORNERS, np.uint32)[rng.integers(len(CORNERS), size=words.shape)]
    words[...] = np.where(rng.random(words.shape) < 0.5, chosen, words)


def batches(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


# Functions of the place ---------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_iota_in_every_format(fmt, rng):
    """Small numbers, and numbers beyond what the format holds."""
    bench, program = Bench(CONFIG, rng), []
    for i, fields in enumerate(
        (
            function(-3, 7, 1), function(0, 1), function(5, 0, -2), function(-200, 100, 40),
            function(-40_000, 20_000, 9_999), function(BIG - 9, 3, 1), function(-BIG, 1 << 29, 1),
            function((1 << 24) - 3, 1, 1),
        )
    ):  # fmt: skip
        dst = line(fmt, 8 * fmt.bytes * i, 8)
        program.append(Iota(dst=dst, saturate=i % 2, update=update(i), **fields))
        program.append(
            Iota(dst=replace(dst, offset=HALF + dst.offset), saturate=1 - i % 2, **fields)
        )
    bench.execute(program)


@pytest.mark.parametrize(
    "dims",
    [
        ((1, 9),),
        ((-1, 12),),
        ((1, 4), (-20, 3)),
        ((3, 3), (1, 2), (-30, 2)),
        ((1, 3), (5, 2), (-40, 2), (90, 2)),
        ((7, 1), (9, 1), (2, 6), (-3, 2)),
    ],
    ids=["one", "down", "two", "three", "four", "ones"],
)
def test_the_function_runs_along_every_dimension_of_the_destination(dims, rng):
    bench = Bench(CONFIG, rng)
    elements = int(np.prod([n for _, n in dims]))
    program = []
    for i in range(4):
        steps = [0] * 4
        steps[i] = -5
        dst = AccessPattern(INT16, 0, 4, 712, dims)
        for fields in (function(3, 0, *steps), function(-9, 11, 1, -20, 300, -4000)):
            program.append(Iota(dst=dst, update=update(i), **fields))
            program.append(
                AffineSelect(
                    dst=replace(dst, dtype=BF16), src=line(FP32, 4 * i, elements), value=0,
                    compare=Compare.GREATER, **fields,
                )
            )  # fmt: skip
            program.append(copy(line(INT16, 32 * len(program) % 400, elements), dst))

    # What an instruction wrote the next one may only read once it is complete.
    async def body(ctx):
        for instruction in program:
            engine = bench if "channel_multiplier" in instruction.values else bench.vector
            await engine.feed(ctx, [instruction])
        await ctx.tick()
        bench.expect(program)

    bench.run(body)


def test_the_function_wraps_around_as_int32(rng):
    bench = Bench(EIGHT_ROWS, rng)
    fields = [
        function(BIG - 3, 1, 1), function(-BIG, -1, -1), function(0, BIG - 1, BIG - 1),
        function(5, -BIG, 0x40000000, 0x20000001), function(0, 0x12345678, -0x0FEDCBA9, BIG),
    ]  # fmt: skip
    program = []
    for i, (where, fmt) in enumerate(itertools.product(fields, (INT32, UINT32, FP32, INT8))):
        dims = ((1, 3), (3, 3))
        dst = AccessPattern(fmt, 0, 8, HALF + 24 * i, dims)
        program.append(Iota(dst=dst, update=update(i), **where))
        program.append(
            AffineSelect(
                dst=replace(dst, dtype=UINT8, offset=16 * i), src=line(UINT8, 0, 9, partitions=8),
                value=0x40E00000, compare=list(Compare)[i % 6], **where,
            )
        )  # fmt: skip
        program[-1] = program[-1].replace(src=program[-1].dst)
    bench.execute(program)


@pytest.mark.parametrize("compare", Compare, ids=lambda c: c.name.lower())
def test_every_comparison_with_zero(compare, rng):
    bench, program = Bench(CONFIG, rng), []
    for i, fields in enumerate(
        (function(-2, 0, 1), function(2, -1, 0), function(0, 1, -1), function(BIG - 1, 0, 1),
         function(-BIG, 0, -1), function(-BIG, BIG - 1, 1), function(0, 0, BIG))
    ):  # fmt: skip
        program.append(
            AffineSelect(
                dst=line(INT8, HALF + 8 * i, 5), src=line(INT8, 8 * i, 5), compare=compare,
                value=0x42F60000, update=update(i), **fields,
            )
        )  # fmt: skip
    bench.execute(program)


@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
def test_affine_select_in_every_pair_of_formats(saturate, rng):
    """What is kept is cast as a copy is; between equal formats every bit stays."""
    count = 16
    pairs = list(itertools.product(FORMATS, FORMATS))
    for some in batches(pairs, CONFIG.sbuf_bytes // 128):
        bench, program = Bench(CONFIG, rng), []
        for i, (src, dst) in enumerate(some):
            codes = special_codes(rng, src, dst, count * CONFIG.partitions)
            codes = rng.permutation(codes).reshape(CONFIG.partitions, count)
            bench.bytes[:, 128 * i : 128 * i + count * src.bytes] = codes.view(np.uint8)
            program.append(
                AffineSelect(
                    dst=line(dst, 128 * i + 64, count), src=line(src, 128 * i, count),
                    compare=Compare.NOT_EQUAL, value=0x3FC00000, saturate=saturate,
                    update=update(i), **function(-3, 2, 1),
                )
            )  # fmt: skip
        bench.execute(program)
        assert set(np.diff([cycle for cycle, *_ in bench.updates])) <= {count}


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_numbers_of_the_other_elements_are_cast_from_binary32(fmt, rng):
    values = [
        0, BIG, 1, BIG + 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
        0x7F800001, 0x3F800000, 0xC2FF0000, 0x4F000000, 0xCF000000, 0x4F800000, 0x3F000000,
        0x3FC00000, 0x40200000, 0x47800000, 0x33800000, 0xF149F2CA,
    ]  # fmt: skip
    for saturate in (0, 1):
        bench, program = Bench(CONFIG, rng), []
        for i, value in enumerate(values):
            program.append(
                AffineSelect(
                    dst=line(fmt, HALF + 3 * fmt.bytes * i, 3), src=line(fmt, 3 * fmt.bytes * i, 3),
                    compare=Compare.LESS, value=value, saturate=saturate, update=update(i),
                    **function(-1, 0, 1),
                )
            )  # fmt: skip
        bench.execute(program)


# Random numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", RANDOM_FORMATS, ids=lambda fmt: fmt.name)
def test_random_numbers_in_every_format(fmt, rng):
    """Seeds that are numbers, and seeds of the partitions; any steps."""
    bench, program = Bench(CONFIG, rng), []
    for i in range(12):
        dst = line(fmt, HALF + 8 * fmt.bytes * i, 8)
        seeds = [{"seed": seed_of(rng)}, {"seed": 4 * i, "seed_pointer": 1}]
        program.append(Rng(dst=dst, update=update(i), **seeds[i % 2], **random_function(rng)))
    bench.execute(program)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 255, 256])
def test_random_numbers_from_one_to_all_that_fit(count, rng):
    bench = Bench(CONFIG, rng)
    all_words = CONFIG.sbuf_bytes // 4
    assert all_words == 256
    first = line(INT32, 4 * (all_words - count), count)
    bench.execute([Rng(dst=first, seed=seed_of(rng), update=update(1), **function(9, 1 << 25, 1))])


def test_the_seed_of_a_partition_may_be_where_the_numbers_go(rng):
    bench = Bench(CONFIG, rng)
    dst = line(UINT32, 64, 5)
    bench.execute([Rng(dst=dst, seed=64, seed_pointer=1, update=update(1), **function(0, 7, 1))])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_seeds_of_instructions_that_follow_one_another_at_once(count, rng):
    """Each has its own seeds, and reads them in a cycle more than a number takes."""
    bench = Bench(CONFIG, rng)
    program = [
        Rng(
            dst=line(UINT32, HALF + 12 * i, count), seed=4 * i, seed_pointer=1, update=update(i),
            **function(i, 1 << 25, 1),
        )
        for i in range(12)
    ]  # fmt: skip
    bench.execute(program)
    assert set(np.diff([cycle for cycle, *_ in bench.updates])) == {count + 1}


def test_equal_words_of_equal_places_whatever_the_shape(rng):
    """Rows of any length, steps in memory and partitions: the place and the seed decide."""
    bench, program = Bench(CONFIG, rng), []
    shapes = [
        (((1, 24),), (1,)), (((1, 4), (4, 6)), (1, 4)), (((6, 4), (1, 6)), (6, 1)),
        (((-1, 2), (2, 3), (-6, 4)), (-1, 2, -6)),
    ]  # fmt: skip
    for i, (dims, steps) in enumerate(shapes):
        low = sum(step * (n - 1) for step, n in dims if step < 0)
        dst = AccessPattern(UINT32, 0, 4, 4 * (64 * i - low), dims)
        fields = function(1000 - low, 1 << 25, *steps)
        program.append(Rng(dst=dst, seed=77, update=update(i), **fields))
    bench.execute(program)
    first, *others = (bench.memory()[:, 256 * i : 256 * i + 96] for i in range(4))
    assert all(np.array_equal(other, first) for other in others)
    words = np.ascontiguousarray(first).view(np.uint32)
    assert len(set(words.reshape(-1).tolist())) == words.size


# Integers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", AluOp, ids=lambda op: op.name.lower())
def test_every_operation_on_every_pair_of_integer_formats(op, rng):
    bench, program = Bench(CONFIG, rng), []
    corners(rng, bench)
    for i, (a, b) in enumerate(itertools.product(INTEGER_FORMATS, INTEGER_FORMATS)):
        dst = INTEGER_FORMATS[(i + i // 6) % 6]
        offsets = [4 * int(k) for k in rng.integers(HALF // 4 - 3, size=2)]
        program.append(
            IntegerTensorTensor(
                dst=line(dst, HALF + 12 * i, 3), src0=line(a, offsets[0], 3),
                src1=line(b, offsets[1], 3), op=op, update=update(i),
            )
        )  # fmt: skip
    bench.execute(program)


@pytest.mark.parametrize("op", AluOp, ids=lambda op: op.name.lower())
def test_every_operation_with_scalars_of_either_kind(op, rng):
    bench, program = Bench(CONFIG, rng), []
    corners(rng, bench)
    for i in range(32):
        pointers, reverse = (i & 1, i >> 1 & 1), (i >> 2 & 1, i >> 3 & 1)
        ops = (op, AluOp.ADD)[:: 1 if i >> 4 else -1]
        scalars = [
            4 * int(rng.integers(HALF // 4)) if p else CORNERS[rng.integers(len(CORNERS))]
            for p in pointers
        ]
        fmt = INTEGER_FORMATS[i % 6]
        program.append(
            IntegerTensorScalar(
                dst=line(INT32, HALF + 12 * i, 3), src=line(fmt, 12 * i, 3), op0=ops[0],
                op1=ops[1], reverse0=reverse[0], reverse1=reverse[1], scalar0=scalars[0],
                scalar1=scalars[1], scalar0_pointer=pointers[0], scalar1_pointer=pointers[1],
                update=update(i),
            )
        )  # fmt: skip
    bench.execute(program)


# Patterns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["4-partitions", "8-partitions"])
def test_random_programs(config, rng):
    bench = Bench(config, rng)
    corners(rng, bench)
    program = random_program(rng, config, 80 if config is CONFIG else 40, 40)
    pauses = [p if p > 15 else 0 for p in rng.integers(0, 20, size=len(program)).tolist()]
    bench.execute(program, pause=lambda: pauses.pop())
    assert bench.counts["elements"] == sum(i.dst.elements for i in program)


@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["4-partitions", "8-partitions"])
def test_partitions_shift_by_whole_quadrants(config, rng):
    """The function counts partitions from the destination's first one; scalars lie where the first
    source does."""
    bench = Bench(config, rng)
    q, program = config.quadrant, []

    def at(i, start, partitions, low=0):
        return line(INT32, low + 4 * i, 1, start=start * q, partitions=partitions)

    shifts = [(dst, src, q) for dst in range(4) for src in range(4)]
    shifts += [(dst, src, q + 1) for dst in (0, 2) for src in (0, 2)]
    for i, (dst, src, n) in enumerate(shifts):
        third = (3 * src + dst) % 4 if n == q else src
        program += [
            IntegerTensorTensor(
                dst=at(5 * i, dst, n, HALF), src0=at(i, src, n), src1=at(i + 30, third, n),
                op=AluOp.SUBTRACT, update=update(i),
            ),
            IntegerTensorScalar(
                dst=at(5 * i + 1, dst, n, HALF), src=at(i, src, n), op0=AluOp.SUBTRACT,
                op1=AluOp.BITWISE_XOR, scalar0=4 * i, scalar0_pointer=1, scalar1=128 + 4 * i,
                scalar1_pointer=1,
            ),
            Iota(dst=at(5 * i + 2, dst, n, HALF), **function(i, 1 + i)),
            Rng(
                dst=at(5 * i + 3, dst, n, HALF), seed=4 * i, seed_pointer=1,
                **function(i, 1 << 25),
            ),
            AffineSelect(
                dst=at(5 * i + 4, dst, n, HALF), src=at(i, src, n), compare=Compare.EQUAL,
                **function(0, 1),
            ),
        ]  # fmt: skip
    bench.execute(program)


def test_source_and_destination_may_be_the_same_elements(rng):
    bench = Bench(CONFIG, rng)
    a, b = line(INT32, 0, 37), line(BF16, 512, 60)
    bench.execute(
        [
            IntegerTensorTensor(dst=a, src0=a, src1=a, op=AluOp.MULTIPLY, update=update(1)),
            AffineSelect(dst=b, src=b, compare=Compare.LESS, update=update(2), **function(-9, 1)),
        ]
    )


@pytest.mark.parametrize("zero", ["first-count", "last-count", "partitions"])
def test_nothing_to_do_completes_with_its_update(zero, rng):
    bench = Bench(CONFIG, rng)
    dims = {"first-count": ((1, 0), (1, 3)), "last-count": ((1, 3), (1, 3), (1, 2), (1, 0))}
    dims = dims.get(zero, ((1, 4),))
    partitions = 0 if zero == "partitions" else 4
    empty = AccessPattern(INT32, 0, partitions, 512, dims)
    program = [
        Iota(dst=empty, update=update(1), **function(1, 1, 1)),
        Iota(dst=line(INT32, 512, 5), update=update(2), **function(1, 1, 1)),
        AffineSelect(dst=empty, src=empty, compare=Compare.LESS, update=update(3)),
        IntegerTensorTensor(dst=empty, src0=empty, src1=empty, op=AluOp.ADD, update=update(4)),
        IntegerTensorScalar(
            dst=empty, src=empty, op0=AluOp.ADD, op1=AluOp.ADD, scalar0_pointer=1,
            scalar1_pointer=1, update=update(5),
        ),
        Rng(dst=empty, seed=3, update=update(7)),
        Rng(dst=empty, seed_pointer=1, seed=64, update=update(8)),
        Iota(dst=line(INT32, 560, 4), update=update(6), **function(-1, 2, -3)),
    ]  # fmt: skip
    bench.execute(program)
    assert bench.counts["elements"] == 9


# Cycles -------------------------------------------------------------------------------------------


def some(kind, count, i=0, fmt=INT32):
    """An instruction of ``count`` elements, its sources in different banks."""
    dst = line(fmt, 512 + fmt.bytes * i, count)
    a, b = line(fmt, 0, count), line(fmt, 272, count)
    return {
        "iota": lambda: Iota(dst=dst, update=update(i), **function(i, 1, 1)),
        "select": lambda: AffineSelect(
            dst=dst, src=a, compare=Compare.LESS, update=update(i), **function(-4, 1, 1)
        ),
        "pair": lambda: IntegerTensorTensor(
            dst=dst, src0=a, src1=b, op=AluOp.ADD, update=update(i)
        ),
        "chain": lambda: IntegerTensorScalar(
            dst=dst, src=a, op0=AluOp.ADD, op1=AluOp.MULTIPLY, scalar0=i, scalar1=3,
            update=update(i),
        ),
        "random": lambda: Rng(dst=dst, seed=i, update=update(i), **function(i, 1 << 25, 1)),
    }[kind]()  # fmt: skip


KINDS = ("iota", "select", "pair", "chain", "random")


@pytest.mark.parametrize("kind", KINDS)
def test_an_element_is_written_seventeen_cycles_after_it_was_read(kind, rng):
    bench = Bench(CONFIG, rng)
    bench.execute([some(kind, 2)])
    issued = bench.issues[0]
    assert bench.reads == [issued + 2, issued + 3]
    assert bench.commits == [bench.reads[-1] + 17]
    assert bench.updates[0][0] == bench.reads[-1] + 18


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_issue_interval_is_the_number_of_elements(kind, count, rng):
    bench = Bench(CONFIG, rng)
    bench.execute([some(kind, count, i) for i in range(6)])
    assert set(np.diff([cycle for cycle, *_ in bench.updates])) == {max(count, 2)}
    assert bench.counts["wait_sbuf"] == 0
    assert bench.counts["elements"] == 6 * count


def test_scalars_in_sbuf_cost_one_cycle(rng):
    bench = Bench(CONFIG, rng)
    program = [
        IntegerTensorScalar(
            dst=line(INT32, 512, 8), src=line(INT32, 0, 8), op0=AluOp.MULTIPLY, op1=AluOp.ADD,
            scalar0=64, scalar0_pointer=1, scalar1=80, scalar1_pointer=1, update=update(i),
        )
        for i in range(4)
    ]  # fmt: skip
    bench.execute(program)
    assert set(np.diff([cycle for cycle, *_ in bench.updates])) == {9}


def test_busy_lasts_until_the_update_is_taken(rng):
    bench = Bench(CONFIG, rng)
    dut = bench.dut
    bench.ready = lambda cycle: cycle >= 40

    async def body(ctx):
        assert not ctx.get(dut.busy)
        await bench.issue(ctx, some("pair", 3, 9))
        while bench.cycle < 40:
            assert ctx.get(dut.busy)
            await ctx.tick()
        await ctx.tick()
        assert not ctx.get(dut.busy)
        assert bench.updates == [(40, 9, UpdateMode.ADD, 10)]

    bench.run(body)


@pytest.mark.parametrize("pattern", ["late", "random", "always-but-one"])
def test_updates_may_be_taken_at_any_time(pattern, rng):
    bench = Bench(CONFIG, rng)
    taken = {
        "late": lambda cycle: cycle > 150 and cycle % 11 == 0,
        "random": lambda cycle: rng.random() < 0.1,
        "always-but-one": lambda cycle: cycle % 7 != 0,
    }
    bench.ready = taken[pattern]
    program = [some(KINDS[i % len(KINDS)], 1 + i % 3, i) for i in range(40)]
    bench.execute([i if k % 5 else i.replace(update=None) for k, i in enumerate(program)])


# Sharing the memory -------------------------------------------------------------------------------


def test_refused_reads_and_occupied_banks_cost_cycles_and_nothing_else(rng):
    """The function of the place waits with the elements."""
    bench = Bench(CONFIG, rng)

    def noise(ctx, now):
        moving = bench.sbuf.moving
        ctx.set(moving.valid, bool(rng.random() < 0.6))
        ctx.set(moving.new, 1)
        ctx.set(moving.word, int(rng.integers(CONFIG.sbuf_words)))
        ctx.set(bench.dut.occupied, int(rng.choice([0, 0, 1, 2, 3])))

    bench.hook = noise
    program = random_program(rng, CONFIG, 40, 30)
    bench.execute(program)
    assert bench.counts["wait_sbuf"] > 100
    assert bench.counts["elements"] == sum(i.dst.elements for i in program)


def test_nothing_is_written_to_a_bank_that_is_occupied(rng):
    bench = Bench(CONFIG, rng)
    occupied, writes = [0], []

    def other_engine(ctx, now):
        if now.write:
            writes.append((bench.cycle, now.write_word & 1))
        occupied.append(int(rng.integers(1, 3)))
        ctx.set(bench.dut.occupied, occupied[-1])

    bench.hook = other_engine
    bench.execute([some(kind, 60) for kind in KINDS])
    assert len(writes) == 60 * len(KINDS)
    for cycle, bank in writes:
        assert not occupied[cycle - VECTOR_CYCLES] >> bank & 1, f"write in cycle {cycle}"
    assert bench.counts["wait_sbuf"] > 80


def test_starving_makes_one_gap_in_sixteen_cycles(rng):
    bench = Bench(CONFIG, rng)

    async def body(ctx):
        program = [some("iota", 100, fmt=INT8), some("chain", 100, 1, fmt=INT8)]
        await bench.issue(ctx, program[0])
        for _ in range(20):
            await ctx.tick()
        ctx.set(bench.machine.starving, 1)
        await bench.feed(ctx, program[1:])
        await ctx.tick()
        bench.expect(program)

    bench.run(body)
    steps = np.diff(bench.reads)
    assert set(steps) == {1, 2}
    gaps = np.asarray(bench.reads)[1:][steps == 2]
    assert set(np.diff(gaps)) == {GAP_CYCLES}
    assert bench.counts["wait_sbuf"] == len(gaps)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_dma_waits_a_bounded_time_for_the_engine(kind, rng):
    """The engine reads and writes bank 0 in every cycle; DMA wants it as well."""
    bench = Bench(CONFIG, rng)
    waits = [0]

    def dma(ctx, now):
        ctx.set(getattr(bench.sbuf, f"dma_{kind}")[0].valid, 1)
        if getattr(now, f"dma_{kind}_ready"):
            waits.append(0)
        elif bench.cycle:
            waits[-1] += 1

    bench.hook = dma
    src = AccessPattern(INT8, 0, 4, 0, ((32, 16), (0, 10)))
    bench.execute(
        [
            AffineSelect(
                dst=replace(src, offset=512), src=src, compare=Compare.LESS, update=update(i),
                **function(-5, 0, 1, -1),
            )
            for i in range(2)
        ]
    )  # fmt: skip
    bound = DMA_PATIENCE_CYCLES + 1
    if kind == "write":
        bound += VECTOR_CYCLES + GAP_CYCLES
    assert DMA_PATIENCE_CYCLES <= max(waits) <= bound
    assert sum(w > 0 for w in waits) >= 8


def test_reset_in_mid_work_starts_clean(rng):
    bench = Bench(CONFIG, rng)
    dut = bench.dut

    async def body(ctx):
        for cut in (1, 3, 6, 12, 20):
            bench.ready = lambda cycle: False
            for i in range(2):
                await bench.issue(ctx, some("pair", 9, i))
            for _ in range(cut):
                await ctx.tick()
            ctx.hold_reset(1)
            await ctx.tick()
            ctx.hold_reset(0)
            assert not ctx.get(dut.busy)
            assert not ctx.get(dut.update.valid)
            await ctx.tick()
            bench.bytes = bench.memory()
            bench.updates.clear()
            bench.ready = lambda cycle: True
            program = [some("iota", 11, 3), some("select", 3, 4)]
            await bench.feed(ctx, program)
            await ctx.tick()
            bench.expect(program)
            assert [entry[1] for entry in bench.updates] == [3, 4]

    bench.run(body)


# Beside the vector engine -------------------------------------------------------------------------


def placed(program, offset, config=CONFIG):
    """A program whose results go to a quarter of the memory."""
    found = []
    for i in program:
        dst = i.dst
        at = dst.element_offsets()
        low, high = int(at.min()), int(at.max()) + dst.dtype.bytes
        if high - low <= config.sbuf_bytes // 4:
            found.append(i.replace(dst=replace(dst, offset=dst.offset - low + offset)))
    return found


@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["4-partitions", "8-partitions"])
@pytest.mark.parametrize("noisy", [False, True], ids=["quiet", "noisy"])
def test_both_engines_at_once_compute_what_each_alone_would(config, noisy, rng):
    from .test_vector import random_arithmetic
    from .test_vector import random_program as random_copies

    bench = Bench(config, rng)
    quarter = config.sbuf_bytes // 4
    ours = placed(random_program(rng, config, 60, 20), 2 * quarter)
    theirs = placed(
        random_copies(rng, config, 30, 20) + random_arithmetic(rng, config, 30, 20), 3 * quarter
    )
    assert min(len(ours), len(theirs)) > 40
    theirs = [theirs[k] for k in rng.permutation(len(theirs))]

    def pause():
        return int(rng.integers(12)) if rng.random() < 0.2 else 0

    def noise(ctx, now):
        moving = bench.sbuf.moving
        ctx.set(moving.valid, bool(rng.random() < 0.5))
        ctx.set(moving.new, 1)
        ctx.set(moving.word, int(rng.integers(config.sbuf_words)))
        ctx.set(bench.dut.occupied, int(rng.choice([0, 0, 1, 2])))
        ctx.set(bench.machine.vector.psum_busy_others, int(rng.integers(256)) & 0x81)

    async def body(ctx):
        await together(ctx, bench.feed(ctx, ours, pause), bench.vector.feed(ctx, theirs, pause))
        await ctx.tick()
        bench.expect(ours + theirs)
        bench.expect_updates(ours)
        bench.vector.expect_updates(theirs)

    if noisy:
        bench.hook = noise
    bench.run(body)
    assert not set(bench.reads) & set(bench.vector.reads), "both read at once"


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (3, 8), (9, 2), (5, 5)])
def test_engines_take_turns_and_change_in_the_second_cycle(ours, theirs, rng):
    """Both always have an instruction: neither starves, and no more cycles are lost than stated."""
    bench = Bench(CONFIG, rng)
    mine = [some(KINDS[i % len(KINDS)], ours, i) for i in range(12)]
    others = [
        copy(line(FP32, 768 + 4 * i, theirs), line(FP32, 0, theirs), update=update(i))
        for i in range(12)
    ]

    async def body(ctx):
        await together(ctx, bench.feed(ctx, mine), bench.vector.feed(ctx, others))
        await ctx.tick()
        bench.expect(mine + others)

    bench.run(body)
    reads = sorted([(c, "pool") for c in bench.reads] + [(c, "dve") for c in bench.vector.reads])
    turns = [(who, [c for c, _ in run]) for who, run in itertools.groupby(reads, lambda r: r[1])]
    assert len(turns) == 24, "an engine had two turns"
    for who, cycles in turns:
        assert len(cycles) == {"pool": ours, "dve": theirs}[who]
        assert np.ptp(cycles) == len(cycles) - 1
    for (_, before), (_, after) in itertools.pairwise(turns):
        assert after[0] == before[-1] + 2


@pytest.mark.parametrize("waits", ["pool", "dve"])
def test_an_engine_with_one_instruction_waits_for_one_of_the_other(waits, rng):
    bench = Bench(CONFIG, rng)
    length = 20
    mine = [some(KINDS[i % len(KINDS)], length, i) for i in range(8)]
    others = [
        copy(line(FP32, 768 + 4 * i, length), line(FP32, 0, length), update=update(i))
        for i in range(8)
    ]
    if waits == "pool":
        mine = mine[:1]
    else:
        others = others[:1]
    sides = {"pool": (bench, mine), "dve": (bench.vector, others)}

    async def late(ctx):
        for _ in range(47):
            await ctx.tick()
        side, program = sides[waits]
        await side.feed(ctx, program)

    async def body(ctx):
        ((side, program),) = (pair for name, pair in sides.items() if name != waits)
        await together(ctx, side.feed(ctx, program), late(ctx))
        await ctx.tick()
        bench.expect(mine + others)

    bench.run(body)
    side, _ = sides[waits]
    assert side.reads[0] - side.issues[0] <= length + 3
    assert np.ptp(side.reads) == length - 1


def test_an_instruction_that_waits_for_psum_holds_nobody_up(rng):
    bench = Bench(CONFIG, rng)
    vector = bench.machine.vector
    src = AccessPattern(FP32, 0, 4, 0, ((1, 6),), Space.PSUM)
    waiting = [copy(line(FP32, 768, 6), src, update=update(1))]
    mine = [some(KINDS[i % len(KINDS)], 4, i) for i in range(20)]

    async def release(ctx):
        ctx.set(vector.psum_busy_others, 0b1)
        while len(bench.issues) < 20:
            await ctx.tick()
        assert not bench.vector.reads
        ctx.set(vector.psum_busy_others, 0)

    async def body(ctx):
        await together(ctx, release(ctx), bench.feed(ctx, mine), bench.vector.feed(ctx, waiting))
        await ctx.tick()
        bench.expect(mine + waiting)

    bench.run(body)
    assert set(np.diff(bench.reads[:72])) == {1}, "the GpSimd engine lost cycles"
    assert len(bench.vector.reads) == 6


def test_an_engine_whose_updates_are_not_taken_does_not_hold_up_the_other(rng):
    bench = Bench(CONFIG, rng)
    mine = [some(KINDS[i % len(KINDS)], 2, i) for i in range(60)]
    others = [
        copy(line(FP32, 768 + 4 * i, 3), line(FP32, 0, 3), update=update(i)) for i in range(60)
    ]
    bench.ready = lambda cycle: cycle > 900

    async def body(ctx):
        await together(ctx, bench.feed(ctx, mine), bench.vector.feed(ctx, others))
        await ctx.tick()
        bench.expect(mine + others)

    bench.run(body)
    assert bench.vector.updates[-1][0] < 800
    assert bench.updates[0][0] == 901


def test_a_chain_through_both_engines_reads_what_the_updates_announced(rng):
    bench = Bench(CONFIG, rng)
    chain = [
        (bench, Iota(dst=line(INT16, 512, 3), update=update(1), **function(-4, 9, 3))),
        (bench.vector, copy(line(FP32, 256, 3), line(INT16, 512, 3), update=update(2))),
        (bench, AffineSelect(
            dst=line(BF16, 640, 3), src=line(FP32, 256, 3), compare=Compare.LESS,
            update=update(3), **function(-1, 0, 1),
        )),
        (bench.vector, copy(line(FP16, 0, 3), line(BF16, 640, 3), update=update(4))),
    ]  # fmt: skip

    async def body(ctx):
        for side, instruction in chain:
            before = len(side.updates)
            await side.issue(ctx, instruction)
            while len(side.updates) == before:
                await ctx.tick()
        await bench.drain(ctx)
        bench.expect([instruction for _, instruction in chain])

    bench.run(body)


# Lane ---------------------------------------------------------------------------------------------


def lane_element(rng, scalars):
    """An element for a lane: its inputs, and what comes out; ``scalars`` are those kept so far.

    Every element is of another kind, format, operation: what belongs to one goes with it.
    """
    row, first_partition = ROW, int(rng.integers(4))
    selects, iota, is_pair, converts = (int(v) for v in rng.integers(2, size=4))
    sources = [int(rng.choice(CORNERS) if k else v) for k, v in zip(
        rng.integers(2, size=2), rng.integers(1 << 32, size=2), strict=True)]  # fmt: skip
    formats = [INTEGER_FORMATS[k] for k in rng.integers(6, size=2)]
    ops = [list(AluOp)[k] for k in rng.integers(len(AluOp), size=2)]
    numbers = [int(rng.choice(CORNERS)) for _ in range(2)]
    own, reverse = rng.integers(2, size=2).tolist(), rng.integers(2, size=2).tolist()
    is_signed = int(rng.integers(2))
    load = (rng.random(2) < 0.2).tolist()
    shifts = rng.integers(4, size=2).tolist()
    multiplier = int(rng.integers(-3, 4))
    near = -multiplier * (row - first_partition) + int(rng.integers(-1, 2))
    affine = near if rng.random() < 0.7 else int(rng.integers(-BIG, BIG))
    compare = list(Compare)[rng.integers(6)]
    place = gpsimd_model.signed(affine + multiplier * (row - first_partition))
    mixes = (rng.random(3) < 0.3).tolist()
    fraction, load_seed = (rng.random(2) < 0.2).tolist()
    seeds, own_seeds = [seed_of(rng) for _ in range(2)], rng.integers(2, size=2).tolist()

    inputs = {
        "sbuf": rng.integers(1 << 32, size=4).tolist(),
        "sbuf1": rng.integers(1 << 32, size=4).tolist(),
        "multiplier": multiplier & 0xFFFFFFFF, "first_partition": first_partition,
        "affine": affine & 0xFFFFFFFF, "iota": iota, "shift0": shifts[0], "shift1": shifts[1],
        "dtype": INT32.code, "compare": compare, "converts": converts,
        "pair": is_pair, "op0": ops[0], "op1": ops[1], "is_signed": is_signed,
        "is_signed_late": is_signed, "selects": selects, "value": 0x42F60000,
        "dst_dtype": FP32.code, "saturate": 0, "raw_bits": 1,
        "seed": seeds[0], "seed_late": seeds[1], "own_seed": own_seeds[0],
        "own_seed_late": own_seeds[1], "load_seed": int(load_seed), "mixes": int(mixes[0]),
        "mixes_between": int(mixes[1]), "mixes_last": int(mixes[2]), "fraction": int(fraction),
    }  # fmt: skip
    for k, fmt in enumerate(formats):
        inputs |= {
            f"size{k}": fmt.bytes.bit_length() - 1, f"signed{k}": int(fmt.signed),
            f"number{k}": numbers[k], f"own{k}": own[k], f"reverse{k}": reverse[k],
            f"load{k}": int(load[k]),
        }  # fmt: skip
    inputs["sbuf"][shifts[0]], inputs["sbuf1"][shifts[1]] = sources

    first = place & 0xFFFFFFFF if iota else sources[0]
    x, y = (
        gpsimd_model.extended(code & (1 << fmt.bits) - 1, fmt)
        for code, fmt in zip((first, sources[1]), formats, strict=True)
    )
    if converts:
        x = int(np.float32(gpsimd_model.signed(first)).view(np.uint32))
    seed = scalars[2] if own_seeds[0] else seeds[0]
    seeded = first ^ (seed << 13 & 0xFFFFFFFF | seed >> 19)
    after_round = (seeded ^ seeded >> 17) * 0xED5AD4BB & 0xFFFFFFFF
    if mixes[0]:
        x = after_round ^ (scalars[0] if own_seeds[1] else seeds[1])
        x ^= x >> 11
    for k in range(2):
        other = scalars[k] if own[k] else numbers[k]
        other = y if is_pair and k == 0 else other
        pair = (other, x) if reverse[k] else (x, other)
        x = gpsimd_model.operate(ops[k], *pair, is_signed)
        x ^= x >> (15, 14)[k] if mixes[1 + k] else 0
    if fraction:
        x = int(np.float32((x >> 8) / 2**24).view(np.uint32))
    elif selects and not gpsimd_model.COMPARISONS[compare.name](place, 0):
        x = inputs["value"]
    for k, value in enumerate((after_round if mixes[0] else first, sources[1])):
        scalars[k] = value if load[k] else scalars[k]
    scalars[2] = first if load_seed else scalars[2]
    return inputs, x


ROW = 5


def test_a_lane_takes_another_kind_of_element_in_every_cycle(rng):
    dut, scalars, compared = GpSimdLane(), [0, 0, 0], 0
    elements = [lane_element(rng, scalars) for _ in range(700)]
    steps = [inputs for inputs, _ in elements] + [elements[0][0]] * (LANE_CYCLES + 1)
    late = {"sbuf": 0, "sbuf1": 0} | {name: cycle for name, (_, cycle) in CONTROLS.items()}

    async def testbench(ctx):
        nonlocal compared
        ctx.set(dut.row, ROW)
        for cycle in range(-1, len(elements) + LANE_CYCLES):
            for name, after in late.items():
                if 0 <= cycle - after < len(steps):
                    value = steps[cycle - after][name]
                    for k, bits in enumerate(value if isinstance(value, list) else [value]):
                        port = getattr(dut, name)
                        ctx.set(port[k] if isinstance(value, list) else port, int(bits))
            if cycle >= LANE_CYCLES:
                inputs, want = elements[cycle - LANE_CYCLES]
                got = ctx.get(dut.raw)
                assert got == want, f"{inputs}: {got:#x}, not {want:#x}"
                compared += 1
            await ctx.tick()

    simulate(dut, testbench, max_cycles=20_000)
    assert compared == len(elements)
