"""Vector engine on a real state buffer: values, patterns, shifts, cycles, ownership, gaps."""

from dataclasses import replace

import numpy as np
import pytest
from makalu.rtl.arch.formats import (
    BF16,
    FORMATS,
    FP8_E3M4,
    FP8_E4M3,
    FP8_E4M3FN,
    FP8_E5M2,
    FP16,
    FP32,
    INT8,
    INT16,
    INT32,
    INTEGER_FORMATS,
    TF32,
    UINT8,
    UINT16,
    UINT32,
)
from makalu.rtl.arch.isa import (
    BITWISE_OPS,
    AccessPattern,
    AluOp,
    CopyPredicated,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    ReduceOp,
    ScalarTensorTensor,
    Space,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
    UpdateMode,
)
from makalu.rtl.engines.vector import GAP_CYCLES, SCAN_CYCLES, VECTOR_CYCLES, VectorEngine
from makalu.rtl.memory.sbuf import DMA_PATIENCE_CYCLES

from .vector_bench import (
    CONFIG,
    EIGHT_ROWS,
    HALF,
    Bench,
    copy,
    line,
    random_pattern,
    random_starts,
    special_codes,
    update,
)
from .vector_model import cast, gather, unsigned

SMALL_FLOATS = (BF16, FP16, FP8_E4M3, FP8_E4M3FN, FP8_E5M2, FP8_E3M4)


def random_program(rng, config, length, longest):
    program = []
    for i in range(length):
        src_fmt, dst_fmt = (FORMATS[k] for k in rng.integers(len(FORMATS), size=2))
        from_psum = rng.random() < 0.3
        if from_psum:
            src_fmt = (FP32, TF32, INT32)[rng.integers(3)]
        if rng.random() < 0.3:
            dst_fmt = src_fmt
        counts = [1]
        for _ in range(int(rng.integers(1, 5))):
            counts.append(int(rng.integers(1, max(2, 1 + longest // int(np.prod(counts))))))
        counts = counts[1:]
        rng.shuffle(counts)
        partitions, start = random_starts(rng, config, 2)
        offset, dims = random_pattern(rng, dst_fmt, HALF, config.sbuf_bytes, counts)
        dst = AccessPattern(dst_fmt, start[0], partitions, offset, dims)
        # The same number of elements in another shape.
        counts = [int(np.prod(counts))] if rng.random() < 0.3 else counts[::-1]
        high = config.psum_bytes if from_psum else HALF
        offset, dims = random_pattern(rng, src_fmt, 0, high, counts)
        space = Space.PSUM if from_psum else Space.SBUF
        src = AccessPattern(src_fmt, start[1], partitions, offset, dims, space)
        owes = update(i) if rng.random() < 0.8 else None
        if rng.random() < 0.2:
            program.append(Memset(dst=dst, value=int(rng.integers(1 << 32)), update=owes))
        else:
            program.append(copy(dst, src, saturate=int(rng.integers(2)), update=owes))
    return program


def random_arithmetic(rng, config, length, longest):
    """Instructions that compute: sources and scalars in the lower half, results in the upper."""
    ops, reduce_ops = list(AluOp), list(ReduceOp)
    arithmetic = [op for op in ops if op not in BITWISE_OPS]
    # Elements that make sums, comparisons and logical operations interesting.
    program = []
    while len(program) < length:
        (instruction,) = random_program(rng, config, 1, longest)
        if isinstance(instruction, Memset):
            continue
        dst, src = instruction.dst, instruction.src
        bitwise = rng.random() < 0.3
        among = [AluOp.BYPASS, *BITWISE_OPS] if bitwise else arithmetic
        op0, op1 = (among[k] for k in rng.integers(len(among), size=2))
        pointers = rng.integers(2, size=2)
        scalars = [
            int(4 * rng.integers(HALF // 4)) if pointer else int(rng.integers(1 << 32))
            for pointer in pointers
        ]
        reverse0, reverse1 = (int(r) for r in rng.integers(2, size=2))
        common = {"dst": dst, "update": instruction.update, "saturate": instruction.saturate}
        first = {
            "op0": op0, "reverse0": reverse0, "scalar0": scalars[0],
            "scalar0_pointer": int(pointers[0]), "op1": op1, "reverse1": reverse1,
        }  # fmt: skip
        kind = rng.integers(6)
        # A second source with as many elements; only one of them lies in PSUM.
        swap = src.space == Space.SBUF and rng.random() < 0.3
        fmt = FP32 if swap else FORMATS[rng.integers(len(FORMATS))]
        counts = [count for _, count in src.dims]
        rng.shuffle(counts)
        offset, dims = random_pattern(rng, fmt, 0, config.psum_bytes if swap else HALF, counts)
        other = AccessPattern(
            fmt, src.start_partition, src.num_partitions, offset, dims,
            Space.PSUM if swap else Space.SBUF,
        )  # fmt: skip
        if kind == 0:
            program.append(TensorTensor(src0=src, src1=other, op=op0, **common))
        elif kind == 1:
            program.append(
                TensorScalar(
                    src=src, scalar1=scalars[1], scalar1_pointer=int(pointers[1]), **first, **common
                )
            )
        elif kind == 2:
            program.append(ScalarTensorTensor(src0=src, src1=other, **first, **common))
        elif kind == 3:
            program.append(
                TensorTensorScan(
                    src0=src, src1=other, op0=op0, op1=op1, reverse0=reverse0, reverse1=reverse1,
                    initial=scalars[0], initial_pointer=int(pointers[0]), **common,
                )
            )  # fmt: skip
        elif kind == 4:
            integers = [f for f in INTEGER_FORMATS if f.bytes == other.dtype.bytes]
            predicate = replace(other, dtype=integers[rng.integers(len(integers))])
            program.append(CopyPredicated(src=src, predicate=predicate, reverse=reverse0, **common))
        else:
            inner = int(rng.integers(len(src.dims)))
            outer = [count for _, count in src.dims[inner + 1 :]] or [1]
            offset, dims = random_pattern(rng, dst.dtype, HALF, config.sbuf_bytes, outer)
            op = reduce_ops[rng.integers(len(reduce_ops))]
            common["dst"] = replace(dst, offset=offset, dims=dims)
            program.append(
                TensorReduce(src=src, op=op, inner=inner, negate=int(rng.integers(2)), **common)
            )
    return program


def random_eights(rng, config, length, longest):
    """Instructions on eight numbers, with many equal elements in one of four."""
    program = []
    while len(program) < length:
        (instruction,) = random_program(rng, config, 1, longest)
        if isinstance(instruction, Memset):
            continue
        dst, src = instruction.dst, instruction.src
        common = {"src": src, "update": instruction.update}
        swap = src.space == Space.SBUF and rng.random() < 0.3
        fmt = FP32 if swap else FORMATS[rng.integers(len(FORMATS))]
        if rng.random() < 0.5:
            fmt = src.dtype if fmt.bytes == src.dtype.bytes else fmt
        counts = [[8], [2, 4], [4, 2], [2, 2, 2], [1, 8]][rng.integers(5)]
        offset, dims = random_pattern(rng, fmt, 0, config.psum_bytes if swap else HALF, counts)
        start = (dst if rng.random() < 0.5 else src).start_partition
        vals = AccessPattern(
            fmt, start, src.num_partitions, offset, dims,
            Space.PSUM if swap else Space.SBUF,
        )  # fmt: skip
        if src.space == Space.SBUF and rng.random() < 0.5:
            # Elements that are there, in some partition.
            place = int(rng.choice(src.element_offsets()))
            vals = replace(src, start_partition=start, offset=place, dims=((0, 8),))
        kind = rng.integers(3)
        if kind == 2:
            value = int(rng.integers(1 << 32))
            program.append(
                MatchReplace8(
                    dst=dst, vals=vals, value=value, saturate=instruction.saturate, **common
                )
            )
            continue
        index = (UINT16, UINT32)[rng.integers(2)]
        fmt = dst.dtype if kind == 0 else index
        offset, dims = random_pattern(rng, fmt, HALF, config.sbuf_bytes, counts[::-1])
        dst = replace(dst, dtype=fmt, offset=offset, dims=dims)
        if kind == 0:
            program.append(Max8(dst=dst, saturate=instruction.saturate, **common))
        else:
            program.append(FindIndex8(dst=dst, vals=vals, **common))
    return program


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
def test_every_pair_of_formats(saturate, rng):
    """16 elements in each of 4 partitions, as many special values as fit."""
    count = 16
    pairs = [
        (src, dst)
        for src in FORMATS
        for dst in FORMATS
        if not saturate or dst.is_float  # integers saturate anyway
    ]
    while pairs:
        bench, program = Bench(CONFIG, rng), []
        for at in range(0, min(CONFIG.sbuf_bytes, 128 * len(pairs)), 128):
            src, dst = pairs.pop()
            codes = special_codes(rng, src, dst, count * CONFIG.partitions)
            codes = rng.permutation(codes).reshape(CONFIG.partitions, count)
            bench.bytes[:, at : at + count * src.bytes] = codes.view(np.uint8)
            program.append(
                copy(
                    line(dst, at + 64, count),
                    line(src, at, count),
                    saturate=saturate,
                    update=update(len(program)),
                )
            )
        bench.execute(program)
        # Issue interval N for each of them, back to back.
        cycles = [cycle for cycle, *_ in bench.updates]
        assert set(np.diff(cycles)) <= {count}
        assert np.ptp(bench.reads) == count * len(program) - 1


@pytest.mark.parametrize("fmt", SMALL_FLOATS, ids=lambda fmt: fmt.name)
def test_equal_subnormals_are_cast_equally_in_every_lane(fmt, seed):
    """pytorch 177870: odd lanes cast subnormals otherwise than even ones."""
    rng = np.random.default_rng(seed)
    bench = Bench(CONFIG, rng)
    count, program = 7, []
    values = fmt.min_subnormal * np.array([0.5, 0.75, 1, 1.5, 2.5, -1.5])
    for i, value in enumerate(values):
        at = 4 * count * i
        bench.bytes[:, at : at + 4 * count] = np.tile(
            np.float32(value).reshape(1).view("u1"), count
        )
        program.append(copy(line(fmt, HALF + at, count), line(FP32, at, count), update=update(i)))
    for i, code in enumerate(fmt.encode(values)):
        # One rounding of one number, for all lanes.
        expected = cast(gather(bench.bytes, program[i].src), FP32, fmt, False)
        assert (expected == code.view(unsigned(fmt))).all()
    bench.execute(program)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_memset_writes_the_bits(fmt, rng):
    bench = Bench(CONFIG, rng)
    program = [
        Memset(dst=line(fmt, 0, 9, step=3), value=0xFFC12345, update=update()),
        Memset(dst=line(fmt, 512, 5, start=2, partitions=1), value=0x0F81F3A5, update=update()),
    ]
    bench.execute(program)
    assert np.diff([cycle for cycle, *_ in bench.updates]) == [5]


def ordinary(rng, shape):
    """Bits of binary32 numbers, most of them of moderate size, a few special."""
    values = rng.standard_normal(shape).astype(np.float32) * 2.0 ** rng.integers(-4, 5, shape)
    bits = np.rint(values * 8).astype(np.float32).view(np.uint32) | 0
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 1, 0x80000001], np.uint32)
    chosen = rng.random(shape) < 0.1
    return np.where(chosen, special[rng.integers(len(special), size=shape)], bits)


@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["4-partitions", "8-partitions"])
@pytest.mark.parametrize("content", ["numbers", "bits"])
def test_random_arithmetic(config, content, rng):
    bench = Bench(config, rng)
    if content == "numbers":
        for memory in (bench.bytes, bench.psum):
            memory.view(np.uint32)[...] = ordinary(rng, memory.view(np.uint32).shape)
    program = random_arithmetic(rng, config, 60 if config is CONFIG else 25, 30)
    pauses = rng.integers(0, 20, size=len(program)).tolist()
    pauses = [p if p > 15 else 0 for p in pauses]
    bench.execute(program, pause=lambda: pauses.pop())


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_every_operation_beside_a_bypass(place, rng):
    bench = Bench(CONFIG, rng)
    bench.bytes.view(np.uint32)[...] = ordinary(rng, bench.bytes.view(np.uint32).shape)
    program = []
    for i, op in enumerate(AluOp):
        ops = (op, AluOp.BYPASS) if place == 0 else (AluOp.BYPASS, op)
        dst = line(INT32 if op in BITWISE_OPS else FP32, HALF + 20 * i, 5)
        program.append(
            TensorScalar(
                dst=dst, src=line(BF16, 8, 5), op0=ops[0], op1=ops[1], reverse0=0, reverse1=0,
                scalar0=4 * i, scalar0_pointer=1, scalar1=4 * i, scalar1_pointer=1, saturate=0,
                update=update(i),
            )
        )  # fmt: skip
    bench.execute(program)


def test_every_reduction_of_short_rows(rng):
    bench = Bench(CONFIG, rng)
    bench.bytes.view(np.uint32)[...] = ordinary(rng, bench.bytes.view(np.uint32).shape)
    program = []
    for op in ReduceOp:
        for count in (1, 2, 3, 5):
            i = len(program)
            src = AccessPattern(FP32, 0, 4, 8 * i, ((1, count), (count, 2)))
            dst = line(FP32, HALF + 8 * i, 2)
            program.append(
                TensorReduce(
                    dst=dst, src=src, op=op, inner=0, negate=i % 3 == 0, saturate=0,
                    update=update(i),
                )
            )  # fmt: skip
    bench.execute(program)


def test_arithmetic_with_refused_reads(rng):
    """Either source may be refused; what the other one read is kept."""
    bench = Bench(CONFIG, rng)

    def noise(ctx, now):
        moving = bench.sbuf.moving
        ctx.set(moving.valid, bool(rng.random() < 0.6))
        ctx.set(moving.new, 1)
        ctx.set(moving.word, int(rng.integers(CONFIG.sbuf_words)))
        ctx.set(bench.dut.occupied, int(rng.choice([0, 0, 1, 2, 3])))

    bench.hook = noise
    bench.execute(random_arithmetic(rng, CONFIG, 40, 30))
    assert bench.counts["wait_sbuf"] > 100


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16])
def test_issue_interval_of_arithmetic(count, rng):
    """N elements in N cycles, with two sources in different banks, reductions included; one cycle
    more for scalars in SBUF."""
    bench = Bench(CONFIG, rng)
    program = []
    for i in range(3):
        dst, a, b = line(FP32, 512, count), line(FP32, 0, count), line(FP32, 272, count)
        one = line(FP32, 512, 1)
        program += [
            TensorTensor(dst=dst, src0=a, src1=b, op=AluOp.ADD, saturate=0, update=update(i)),
            TensorReduce(
                dst=one, src=a, op=AluOp.ADD, inner=0, negate=0, saturate=0, update=update(i)
            ),
        ]
    bench.execute(program)
    assert set(np.diff([cycle for cycle, *_ in bench.updates])) == {max(count, 2)}
    assert bench.counts["wait_sbuf"] == 0


def scan(count, *, dst=FP32, op0=AluOp.MULTIPLY, op1=AluOp.ADD, **fields):
    return TensorTensorScan(
        dst=line(dst, 512, count), src0=line(FP32, 0, count), src1=line(FP32, 272, count),
        op0=op0, op1=op1, **fields,
    )  # fmt: skip


def test_an_element_of_a_scan_follows_the_one_before_in_eight_cycles(rng):
    """The instruction behind it does not wait any longer than behind another."""
    bench = Bench(CONFIG, rng)
    after = copy(line(FP32, 768, 4), line(FP32, 0, 4), update=update(1))
    bench.execute([scan(5, update=update()), after])
    assert SCAN_CYCLES == 8
    steps = [SCAN_CYCLES] * 4 + [1] * 4
    assert list(np.diff(bench.reads)) == steps


def test_a_scan_goes_on_with_its_result_however_late_an_element_is(rng):
    """Reads that are refused come later than the result, which is kept."""
    bench = Bench(CONFIG, rng)
    numbers = rng.uniform(0.5, 1.5, (CONFIG.partitions, HALF // 4)).astype(np.float32)
    bench.bytes[:, :HALF] = numbers.view(np.uint8)

    def noise(ctx, now):
        moving = bench.sbuf.moving
        ctx.set(moving.valid, bool(rng.random() < 0.9))
        ctx.set(moving.new, 1)
        ctx.set(moving.word, int(rng.integers(CONFIG.sbuf_words)))

    bench.hook = noise
    bench.execute([scan(16, update=update(i), initial_pointer=1, initial=64) for i in range(3)])
    assert bench.counts["wait_sbuf"] > 10
    assert max(np.diff(bench.reads)) > SCAN_CYCLES


def test_the_binary32_result_goes_on_and_not_what_is_stored(rng):
    bench = Bench(CONFIG, rng)
    row = np.zeros(HALF // 4, np.float32)
    row[:8], row[68:76] = 1, [1, *[2.0**-9] * 7]
    bench.bytes[:, :HALF] = row.view(np.uint8)
    bench.execute([scan(8, dst=BF16, update=update())])
    last = bench.memory()[0, 512 + 14 : 512 + 16].copy().view("<u2")[0]
    assert last == 0x3F82  # 1 + 7 / 512, rounded; each sum by itself would stay 1


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("fmt", INTEGER_FORMATS, ids=lambda fmt: fmt.name)
def test_a_predicate_is_any_bit_of_its_element(fmt, reverse, rng):
    """Bits of the neighbours in its word do not count; elements left out keep their bytes."""
    bench = Bench(CONFIG, rng)
    count = 64
    codes = np.array([0, 1, 1 << fmt.bits - 1], unsigned(fmt))
    chosen = rng.choice(codes, (CONFIG.partitions, count))
    bench.bytes[:, 256 : 256 + count * fmt.bytes] = chosen.view(np.uint8)
    bench.execute(
        [
            CopyPredicated(
                dst=line(dst, 512, count), src=line(FP32, 0, count),
                predicate=line(fmt, 256, count), reverse=reverse, update=update(),
            )
            for dst in (FP32, INT8, FP16)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("content", ["anything", "few"])
@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["TINY", "eight rows"])
def test_random_instructions_on_eight_numbers(config, content, rng):
    """Casts, patterns, partitions, PSUM; ``few``: bytes of which whole elements are often equal."""
    for _ in range(3):
        bench = Bench(config, rng)
        if content == "few":
            few = rng.choice(np.array([0, 0, 0x80, 0x3F], np.uint8), bench.bytes.shape)
            bench.bytes[:] = few
        bench.execute(random_eights(rng, config, 20, 40))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_eight_numbers_are_those_of_numpy(count, rng):
    """The greatest, where they are, and what is left without them; equal ones one after another."""
    numbers = rng.integers(-9, 9, (CONFIG.partitions, 64)).astype(np.float32)
    greatest = np.full((CONFIG.partitions, 8), np.nan, np.float32)
    places = np.full((CONFIG.partitions, 8), 0xFFFFFFFF, np.uint32)
    left = numbers.copy()
    for p, row in enumerate(numbers[:, :count]):
        order = np.argsort(-row, kind="stable")[:8]
        greatest[p, : len(order)], places[p, : len(order)] = row[order], order
        left[p, order] = 7.5
    bench = Bench(CONFIG, rng)
    bench.bytes[:, :256] = numbers.view(np.uint8)
    bench.bytes[:, 256:288] = greatest.view(np.uint8)
    src, vals = line(FP32, 0, count), line(FP32, 256, 8)
    to = line(FP32, 512, 8), line(UINT32, 544, 8), line(FP32, 576, count)
    bench.execute(
        [
            Max8(dst=to[0], src=src, update=update(0)),
            FindIndex8(dst=to[1], src=src, vals=vals, update=update(1)),
            MatchReplace8(dst=to[2], src=src, vals=vals, value=0x40F00000, update=update(2)),
        ]
    )
    memory = bench.memory()
    found = [gather(memory, ap).view(t) for ap, t in zip(to, "fIf", strict=True)]
    assert np.array_equal(found[0], greatest, equal_nan=True)
    assert (found[1] == places).all()
    assert (found[2] == left[:, :count]).all()


@pytest.mark.parametrize("bank", [256, 272], ids=["same bank", "other bank"])
def test_eight_numbers_cost_eight_cycles_before_and_after(bank, rng):
    bench = Bench(CONFIG, rng)
    src, vals, count = line(FP32, 0, 20), line(FP32, bank, 8), 20
    program = []
    for i in range(2):
        program += [
            Max8(dst=line(FP32, 512, 8), src=src, update=update(i)),
            FindIndex8(dst=line(UINT16, 544, 8), src=src, vals=vals, update=update(i)),
            MatchReplace8(dst=line(BF16, 576, count), src=src, vals=vals, update=update(i)),
        ]
    bench.execute(program)
    steps = np.diff([cycle for cycle, *_ in bench.updates])
    assert steps.tolist() == [count + 16, count + 8, count + 8, count + 16, count + 8]
    assert bench.counts["wait_sbuf"] == 0


def test_two_sources_in_a_bank_take_turns(rng):
    """Both want a new word for every element: the one that has its word keeps it meanwhile."""
    bench = Bench(CONFIG, rng)
    dims = ((8, 6),)  # 32 bytes: always the same bank
    a, b = (AccessPattern(FP32, 0, 4, offset, dims) for offset in (0, 192))
    dst = line(FP32, 512, 6)
    bench.execute(
        [TensorTensor(dst=dst, src0=a, src1=b, op=AluOp.ADD, saturate=0, update=update())]
    )
    assert set(np.diff(bench.reads)) == {2}
    assert bench.counts["wait_sbuf"] == 6


def test_contiguous_sources_in_a_bank_meet_once_in_a_word(rng):
    bench = Bench(CONFIG, rng)
    a, b, dst = (line(FP32, offset, 32) for offset in (0, 256, 512))
    bench.execute(
        [TensorTensor(dst=dst, src0=a, src1=b, op=AluOp.ADD, saturate=0, update=update())]
    )
    assert np.ptp(bench.reads) == 32 + 32 // 4 - 2  # the first one waited before
    assert bench.counts["wait_sbuf"] == 32 // 4


def test_nothing_is_written_to_a_bank_that_is_occupied(rng):
    """Of the other bank nothing is noticed."""
    bench = Bench(CONFIG, rng)
    occupied, writes = [0], []

    def other_engine(ctx, now):
        if now.write:
            writes.append((bench.cycle, now.write_word & 1))
        occupied.append(int(rng.integers(1, 3)))
        ctx.set(bench.dut.occupied, occupied[-1])

    bench.hook = other_engine
    a, b = line(FP32, 0, 60), line(FP32, 272, 60)  # in different banks
    program = [
        copy(replace(b, offset=512), a),
        TensorTensor(dst=replace(a, offset=768), src0=a, src1=b, op=AluOp.ADD, saturate=0),
        TensorReduce(dst=line(FP32, 512, 1), src=a, op=AluOp.ADD, inner=0, negate=0, saturate=0),
    ]
    bench.execute(program)
    assert len(writes) == 121
    for cycle, bank in writes:
        assert not occupied[cycle - VECTOR_CYCLES] >> bank & 1, f"write in cycle {cycle}"
    waits = np.diff([cycle for cycle, _ in writes])[:119] - 1
    assert bench.counts["wait_sbuf"] >= waits.sum() > 40
    assert len(bench.reads) == 180
    bank_of = dict(writes)
    first, last = bench.reads[0], bench.reads[119]
    stalled = [cycle for cycle in range(first, last) if cycle not in bench.reads]
    following = {cycle: min(r for r in bench.reads if r > cycle) for cycle in stalled}
    for cycle in stalled:
        assert occupied[cycle] >> bank_of[following[cycle] + VECTOR_CYCLES] & 1


def test_a_row_begins_anew_after_one_without_elements(rng):
    bench = Bench(CONFIG, rng)
    a, common = line(FP32, 0, 3), {"op": AluOp.MAX, "inner": 0, "negate": 0, "saturate": 0}
    program = []
    for i, count in enumerate((3, 1)):
        dst = line(FP32, 512 + 4 * i, 1)
        program += [
            TensorReduce(dst=dst, src=line(FP32, 0, 0), update=update(), **common),
            TensorReduce(dst=dst, src=line(FP32, 64, count), update=update(), **common),
            TensorReduce(dst=replace(dst, offset=640 + 4 * i), src=a, update=update(), **common),
        ]
    bench.execute(program)
    assert bench.counts["elements"] == 3 + 1 + 6


def test_scalars_in_sbuf_cost_one_cycle(rng):
    bench = Bench(CONFIG, rng)
    a, dst = line(FP32, 0, 8), line(FP32, 512, 8)
    program = [
        TensorScalar(
            dst=dst, src=a, op0=AluOp.MULTIPLY, op1=AluOp.ADD, reverse0=0, reverse1=0,
            scalar0=64, scalar0_pointer=1, scalar1=80, scalar1_pointer=1, saturate=0,
            update=update(i),
        )
        for i in range(4)
    ]  # fmt: skip
    bench.execute(program)
    assert set(np.diff([cycle for cycle, *_ in bench.updates])) == {9}


# Patterns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["4-partitions", "8-partitions"])
def test_random_programs(config, rng):
    bench = Bench(config, rng)
    program = random_program(rng, config, 60 if config is CONFIG else 25, 40)
    pauses = rng.integers(0, 12, size=len(program)).tolist()
    pauses = [p if p > 7 else 0 for p in pauses]
    bench.execute(program, pause=lambda: pauses.pop())
    assert bench.counts["elements"] == sum(i.dst.elements for i in program)


@pytest.mark.parametrize(
    "dims",
    [
        ((1, 1),),
        ((0, 5),),
        ((-1, 17),),
        ((3, 4), (-20, 3)),
        ((1, 3), (5, 2), (-40, 2), (90, 2)),
        ((7, 1), (0, 1), (2, 6), (-3, 2)),
    ],
    ids=["one", "in-place", "backwards", "two-dims", "four-dims", "ones"],
)
def test_patterns_on_both_sides(dims, rng):
    bench = Bench(CONFIG, rng)
    count = int(np.prod([c for _, c in dims]))
    strided = AccessPattern(INT16, 0, 4, 200, dims)
    program = [
        copy(line(INT16, 512, count), strided, update=update(1)),
        copy(replace(strided, offset=712), line(INT16, 0, count), update=update(2)),
        copy(replace(strided, offset=712, dtype=FP16), strided, update=update(3)),
    ]
    bench.execute(program)


@pytest.mark.parametrize("config", [CONFIG, EIGHT_ROWS], ids=["4-partitions", "8-partitions"])
@pytest.mark.parametrize("space", Space, ids=lambda s: s.name.lower())
def test_partitions_shift_by_whole_quadrants(config, space, rng):
    bench = Bench(config, rng)
    q = config.quadrant
    program = []
    for src in range(4):
        for dst in range(4):
            at = 4 * len(program)
            program.append(
                copy(
                    line(FP32, HALF + at, 1, start=dst * q, partitions=q),
                    line(FP32, at, 1, start=src * q, partitions=q, space=space),
                )
            )
    program += [
        copy(
            line(FP32, HALF + 64 + 4 * i, 1, start=dst * q, partitions=q + 1),
            line(FP32, 4 * i, 1, start=src * q, partitions=q + 1, space=space),
            update=update(i),
        )
        for i, (src, dst) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)])
    ]
    bench.execute(program)


def test_source_and_destination_may_be_the_same_elements(rng):
    bench = Bench(CONFIG, rng)
    bench.execute(
        [
            copy(line(FP32, 0, 37), line(INT32, 0, 37), update=update(1)),
            copy(line(UINT8, 512, 67), line(INT8, 512, 67), update=update(2)),
        ]
    )


def test_an_instruction_reads_what_the_update_before_it_announced(rng):
    """The read that follows an update as soon as can be sees the last element."""
    bench = Bench(CONFIG, rng)
    chain = [
        copy(line(FP16, 512, 3), line(INT8, 0, 3), update=update(1)),
        copy(line(BF16, 256, 3), line(FP16, 512, 3), update=update(2)),
        copy(line(FP32, 0, 3), line(BF16, 256, 3), update=update(3)),
    ]

    async def body(ctx):
        for i, instruction in enumerate(chain):
            await bench.issue(ctx, instruction)
            while len(bench.updates) <= i:
                await ctx.tick()
        await bench.drain(ctx)
        bench.expect(chain)

    bench.run(body)


@pytest.mark.parametrize("offset", [0, 4, 12, CONFIG.sbuf_bytes - 4])
def test_an_element_may_be_the_last_of_all_in_any_word(offset, rng):
    """Nothing comes after it that would complete its word."""
    Bench(CONFIG, rng).execute([Memset(dst=line(FP32, offset, 1), value=1, update=update())])
    down = line(FP32, offset % 512 + 16, 5, step=-1) if offset < 16 else line(FP32, offset, 1)
    Bench(CONFIG, rng).execute([Memset(dst=down, value=2), Memset(dst=down, value=3)])


@pytest.mark.parametrize("zero", ["first-count", "last-count", "partitions"])
def test_nothing_to_do_completes_with_its_update(zero, rng):
    bench = Bench(CONFIG, rng)
    dims = {"first-count": ((1, 0), (1, 3)), "last-count": ((1, 3), (1, 3), (1, 2), (1, 0))}
    dims = dims.get(zero, ((1, 4),))
    partitions = 0 if zero == "partitions" else 4
    empty = AccessPattern(FP32, 0, partitions, 512, dims)
    in_psum = replace(empty, offset=0, space=Space.PSUM)
    program = [
        copy(empty, replace(empty, offset=0), update=update(1)),
        copy(line(FP32, 512, 5), line(FP32, 0, 5), update=update(2)),
        copy(empty, in_psum, update=update(3)),
        Memset(dst=empty, value=7, update=update(4)),
    ]
    bench.execute(program)
    assert bench.counts["elements"] == 5


# Cycles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", Space, ids=lambda s: s.name.lower())
def test_latency_is_as_documented(space, rng):
    bench = Bench(CONFIG, rng)
    bench.execute([copy(line(FP32, 512, 2), line(FP32, 0, 2, space=space), update=update())])
    issued = bench.issues[0]
    setup = 2 if space == Space.SBUF else 4
    assert bench.reads == [issued + setup, issued + setup + 1]
    assert bench.commits == [issued + setup + 1 + VECTOR_CYCLES]
    assert bench.updates[0][0] == issued + setup + 2 + VECTOR_CYCLES == issued + setup + 19


def test_the_waveform_of_the_docstring_is_true(rng):
    bench = Bench(CONFIG, rng)
    dut = bench.dut
    lines = VectorEngine.__doc__.split("With ``N`` = 2, from SBUF::\n\n")[1].split("\n\n")[0]
    header, *rows = lines.rstrip().splitlines()
    columns = len(header.split()) - 1
    assert len(rows) == 4

    async def body(ctx):
        bench.offer(ctx, copy(line(BF16, 512, 2), line(FP32, 0, 2), update=update()))
        for cycle in range(columns):
            for row in rows:
                name, *values = row.split()
                port, member = name.split(".")
                port = dut.sbuf_read[0] if port == "sbuf_read" else getattr(dut, port)
                got = ctx.get(getattr(port, member))
                assert got == int(values[cycle]), f"{name} at cycle {cycle}: {got}"
            await ctx.tick()
            bench.offer(ctx, None)

    bench.run(body)


@pytest.mark.parametrize("kind", ["sbuf", "psum", "memset"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17])
def test_issue_interval_is_the_number_of_elements(kind, count, rng):
    bench = Bench(CONFIG, rng)
    program = []
    for i in range(6):
        dst = line(BF16, 512 + 34 * i, count)
        space = Space.PSUM if kind == "psum" else Space.SBUF
        if kind == "memset":
            program.append(Memset(dst=dst, value=i + 1, update=update(i)))
        else:
            src = line(FP32, 16 * i, count, space=space)
            program.append(copy(dst, src, update=update(i)))
    bench.execute(program)
    least = 4 if kind == "psum" else 2
    assert set(np.diff([cycle for cycle, *_ in bench.updates])) == {max(count, least)}
    assert bench.counts["elements"] == count * len(program)
    assert bench.counts["wait_sbuf"] == bench.counts["wait_psum"] == 0


def test_busy_lasts_until_the_update_is_taken(rng):
    bench = Bench(CONFIG, rng)
    dut = bench.dut
    bench.ready = lambda cycle: cycle >= 40

    async def body(ctx):
        assert not ctx.get(dut.busy)
        await bench.issue(ctx, copy(line(FP32, 512, 3), line(FP32, 0, 3), update=update(9)))
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
    program = [
        copy(
            line(FP16, 512 + 8 * i, 1 + i % 4),
            line(UINT8, 4 * i, 1 + i % 4),
            update=update(i) if i % 5 else None,
        )
        for i in range(40)
    ]
    bench.execute(program)


# Sharing the memories -----------------------------------------------------------------------------


def test_refused_reads_cost_cycles_and_nothing_else(rng):
    """Moving reads take random banks; the engine waits and counts."""
    bench = Bench(CONFIG, rng)
    program = random_program(rng, CONFIG, 25, 40)

    def noise(ctx, now):
        moving = bench.sbuf.moving
        ctx.set(moving.valid, bool(rng.random() < 0.8))
        ctx.set(moving.new, 1)
        ctx.set(moving.word, int(rng.integers(CONFIG.sbuf_words)))

    bench.hook = noise
    bench.execute(program)
    assert bench.counts["wait_sbuf"] > 20
    assert bench.counts["elements"] == sum(i.dst.elements for i in program)


def psum_copy(offset, dims, **kwargs):
    src = AccessPattern(FP32, 0, 4, offset, dims, Space.PSUM)
    return copy(line(FP32, 512, src.elements), src, **kwargs)


@pytest.mark.parametrize(
    ("offset", "dims", "banks"),
    [
        (0, ((1, 8),), 0b1),
        (28, ((1, 2),), 0b11),
        (4 * 63, ((-1, 20),), 0b11100000),
        (96, ((8, 3),), 0b111000),
        (96, ((-8, 2), (1, 4)), 0b1100),
        (128, ((-8, 2), (8, 4)), 0b11111000),
        (64, ((-30000, 1), (1, 3), (9, 1), (30000, 1)), 0b100),
    ],
    ids=["one", "border", "down", "stride", "mixed", "both-ways", "ones"],
)
def test_psum_banks_are_held_from_first_to_last_element(offset, dims, banks, rng):
    bench = Bench(CONFIG, rng)
    bench.execute([psum_copy(offset, dims, update=update())])
    cycles = [cycle for cycle, held in bench.held if held]
    assert {held for _, held in bench.held} == {0, banks}
    assert cycles[0] <= bench.reads[0]
    assert cycles[-1] == bench.reads[-1]


def test_psum_copy_starts_when_the_tensor_engine_leaves_its_banks(rng):
    bench = Bench(CONFIG, rng)
    dut = bench.dut

    async def body(ctx):
        program = [
            psum_copy(0, ((1, 6),), update=update(1)),
            psum_copy(32, ((1, 6),), update=update(2)),
            copy(line(FP32, 640, 4), line(FP32, 0, 4), update=update(3)),
        ]
        ctx.set(dut.psum_busy_others, 0b11111110)
        for instruction in program:
            await bench.issue(ctx, instruction)
            if len(bench.issues) == 2:
                for _ in range(30):
                    await ctx.tick()
                assert len(bench.reads) == 6  # the second one waits, nothing is held
                assert ctx.get(dut.psum_busy) == 0
                ctx.set(dut.psum_busy_others, 0b11111101)
        await ctx.tick()
        await bench.drain(ctx)
        bench.expect(program)
        assert [entry[1] for entry in bench.updates] == [1, 2, 3]
        assert 15 < bench.counts["wait_psum"] < 30

    bench.run(body)


def test_starving_makes_one_gap_in_sixteen_cycles(rng):
    bench = Bench(CONFIG, rng)

    async def body(ctx):
        program = [
            copy(line(INT8, 512, 100), line(INT8, 0, 100), update=update()) for _ in range(2)
        ]
        await bench.issue(ctx, program[0])
        for _ in range(20):
            await ctx.tick()
        ctx.set(bench.machine.starving, 1)
        await bench.issue(ctx, program[1])
        await ctx.tick()
        await bench.drain(ctx)
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
    program = [copy(replace(src, offset=512), src, update=update(i)) for i in range(2)]
    bench.execute(program)
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
                await bench.issue(ctx, psum_copy(0, ((1, 9),), update=update(i)))
            for _ in range(cut):
                await ctx.tick()
            ctx.hold_reset(1)
            await ctx.tick()
            ctx.hold_reset(0)
            assert not ctx.get(dut.busy)
            assert not ctx.get(dut.update.valid)
            assert not ctx.get(dut.psum_busy)
            await ctx.tick()
            bench.bytes = bench.memory()
            bench.updates.clear()
            bench.ready = lambda cycle: True
            program = [
                copy(line(INT16, 512, 11), line(INT8, cut, 11), update=update(3)),
                Memset(dst=line(INT8, 600, 3), value=cut, update=update(4)),
            ]
            for instruction in program:
                await bench.issue(ctx, instruction)
            await ctx.tick()
            await bench.drain(ctx)
            await ctx.tick()
            bench.expect(program)
            assert [entry[1] for entry in bench.updates] == [3, 4]

    bench.run(body)
