"""The checker against the contract: every error of every field, boundaries, random words."""

import math
import random
from dataclasses import replace

import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch.config import SMALL, TINY, TRN, CoreConfig
from makalu.rtl.arch.formats import FORMATS
from makalu.rtl.arch.isa import (
    BODY_BIT,
    DESCRIPTOR_BYTES,
    HEADER,
    INSTRUCTIONS,
    WORD_BITS,
    AccessPattern,
    DmaStart,
    Engine,
    ErrorCode,
    MatmulMoving,
    Space,
    TensorCopy,
    UpdateMode,
    WaitMode,
)
from makalu.rtl.control.check import FRAME_CYCLES, Checker
from makalu.sim import golden

SMALL_SEMAPHORES = replace(TINY, semaphores=8)
ODD = CoreConfig(
    name="ODD", rows=16, sbuf_bytes=3 * 64, psum_bank_bytes=32, psum_banks=4, dma_queues=2
)
CONFIGS = [SMALL_SEMAPHORES, ODD, SMALL, TRN]
CLASSES = list(INSTRUCTIONS.values())
LEGAL = (ErrorCode.NONE, 0)
HUGE = [(0x8000, 0x8000, 4, 1), (0x8000, 0x8000, 0x8000, 8), (0x8000,) * 4, (0x8000, 2, 0x8000, 2)]
"""Counts whose product is a multiple of a power of two that some width could lose."""
HEADER_BITS = {name: (bit, width) for name, bit, width in HEADER}
PATTERN_BITS = {name: (bit, width) for name, bit, width in AccessPattern.LAYOUT}


def put(word, bit, width, value):
    """``word`` with a field replaced."""
    mask = (1 << width) - 1 << bit
    return word & ~mask | value << bit & mask


def get(word, bit, width):
    return word >> bit & (1 << width) - 1


def put_header(word, name, value):
    return put(word, *HEADER_BITS[name], value)


def put_pattern(word, operand_bit, name, value):
    bit, width = PATTERN_BITS[name]
    return put(word, operand_bit + bit, width, value)


def verdicts(config, cases, gap=FRAME_CYCLES):
    """Run ``(queue, word)`` through the checker; list ``(queue, code, field)`` and latencies."""
    dut = Checker(config=config)
    out, sent, came = [], [], []
    cycle = 0

    async def send(ctx):
        nonlocal cycle
        for queue, word in cases:
            ctx.set(dut.i.p.queue, queue)
            ctx.set(dut.i.p.word, word)
            ctx.set(dut.i.valid, 1)
            sent.append(cycle)
            await ctx.tick()
            cycle += 1
            ctx.set(dut.i.valid, 0)
            for _ in range(gap - 1):
                await ctx.tick()
                cycle += 1
        for _ in range(Checker.LATENCY_CYCLES):
            await ctx.tick()
            cycle += 1

    async def receive(ctx):
        o = dut.o
        async for *_, valid, queue, code, field in ctx.tick().sample(
            o.valid, o.p.queue, o.p.code, o.p.field
        ):
            if valid:
                out.append((queue, ErrorCode(code), field))
                came.append(cycle)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(receive, background=True)
    simulator.add_testbench(send)
    simulator.run()
    assert len(out) == len(cases)
    return out, [b - a for a, b in zip(sent, came, strict=True)]


def expected(word, queue, config):
    """The rules in plain Python: ``(code, field)``."""
    opcode = get(word, *HEADER_BITS["opcode"])
    cls = INSTRUCTIONS.get(opcode)
    if cls is None or queue not in cls.engines or get(word, *HEADER_BITS["engine"]) != queue:
        return ErrorCode.ILLEGAL_OPCODE, 0
    if word & ~cls.used_mask():
        return ErrorCode.RESERVED_BITS, 0
    bad_fields = []
    for name, modes in (("wait0", WaitMode), ("wait1", WaitMode), ("update", UpdateMode)):
        mode = get(word, *HEADER_BITS[f"{name}_mode"])
        if mode not in list(modes):
            bad_fields.append(HEADER_BITS[f"{name}_mode"][0])
        if mode and get(word, *HEADER_BITS[f"{name}_semaphore"]) >= config.semaphores:
            bad_fields.append(HEADER_BITS[f"{name}_semaphore"][0])
    for name, item, bit in cls.scalars:
        value = get(word, bit, item.width)
        if item.values is not None and value not in list(item.values):
            bad_fields.append(bit)
        points = item.pointer is not None and get(word, *_scalar(cls, item.pointer))
        if points and value not in range(0, config.sbuf_bytes, 4):
            bad_fields.append(bit)
        if cls is DmaStart:
            first = get(word, *_scalar(cls, "first"))
            wrong = {
                "table": value % DESCRIPTOR_BYTES != 0 or _table_end(word) > 1 << 40,
                "first": value >= config.dma_engines,
                "engines_used": value == 0 or first + value > config.dma_engines,
                "queue": value >= config.dma_queues,
                "count": False,
            }[name]
            if wrong:
                bad_fields.append(bit)
    aps, sources_in_psum = [], 0
    for _, operand, bit in cls.operands:
        ap = {name: get(word, bit + b, w) for name, (b, w) in PATTERN_BITS.items()}
        formats = [fmt for fmt in operand.formats if fmt.code == ap["dtype"]]
        if not formats or (ap["space"] == Space.PSUM and formats[0].bytes != 4):
            bad_fields.append(bit + PATTERN_BITS["dtype"][0])
        sources_in_psum += ap["space"] == Space.PSUM and not operand.writes
        second = ap["space"] == Space.PSUM and not operand.writes and sources_in_psum > 1
        if ap["space"] not in list(operand.spaces) or second:
            bad_fields.append(bit + PATTERN_BITS["space"][0])
        aps.append((ap, operand, bit, formats[0] if formats else None))
    if bad_fields:
        return ErrorCode.BAD_FIELD, min(bad_fields)

    q = config.rows // 4
    for ap, operand, bit, _ in aps:
        start, count = ap["start_partition"], ap["num_partitions"]
        if count > 2 * q:
            allowed = [0]
        elif count > q:
            allowed = [0, 2 * q]
        else:
            allowed = [0, q, 2 * q, 3 * q]
        if operand.start_zero:
            allowed = [0]
        if count and (start not in allowed or start + count > config.rows):
            return ErrorCode.BAD_PARTITION, bit + PATTERN_BITS["start_partition"][0]

    elements, compared = [], []
    for ap, operand, bit, fmt in aps:
        counts = [ap[f"count{i}"] for i in range(4)]
        steps = [(ap[f"step{i}"] ^ 1 << 15) - (1 << 15) for i in range(4)]
        total = math.prod(counts)
        elements.append(total)
        first = 0 if operand.reduced is None else 1 + get(word, *_scalar(cls, operand.reduced))
        if operand.exactly is None and cls.operands[0][1].exactly is None:
            compared.append(math.prod(counts[first:]))
        if total == 0 or ap["num_partitions"] == 0:
            continue
        corners = [
            sum(steps[i] * (counts[i] - 1) for i in range(4) if chosen >> i & 1)
            for chosen in range(16)
        ]
        low = ap["offset"] + fmt.bytes * min(corners)
        high = ap["offset"] + fmt.bytes * max(corners) + fmt.bytes - 1
        size = config.psum_bytes if ap["space"] == Space.PSUM else config.sbuf_bytes
        bank = config.psum_bank_bytes
        if (
            ap["offset"] % fmt.bytes
            or low < 0
            or high >= size
            or (operand.one_bank and ap["space"] == Space.PSUM and low // bank != high // bank)
        ):
            return ErrorCode.OUT_OF_RANGE, bit + PATTERN_BITS["offset"][0]

    for total, (_, operand, bit, _) in zip(elements, aps, strict=True):
        limit = {"cols": config.cols, "bank": config.psum_bank_bytes // 4, None: total}
        if total > limit.get(operand.limit, operand.limit):
            return ErrorCode.SIZE_MISMATCH, bit + PATTERN_BITS["count0"][0]
        if operand.exactly is not None and total != operand.exactly:
            return ErrorCode.SIZE_MISMATCH, bit + PATTERN_BITS["count0"][0]
    if any(total != compared[0] for total in compared):
        return ErrorCode.SIZE_MISMATCH, BODY_BIT + PATTERN_BITS["count0"][0]
    partitions = {ap["num_partitions"] for ap, *_ in aps}
    if len(partitions) > 1 and Engine.PE not in cls.engines:
        return ErrorCode.SIZE_MISMATCH, BODY_BIT + PATTERN_BITS["num_partitions"][0]
    return LEGAL


def _table_end(word):
    """Where the descriptors of a DmaStart end."""
    table, used, count = (
        get(word, *_scalar(DmaStart, name)) for name in ("table", "engines_used", "count")
    )
    return table + used * count * DESCRIPTOR_BYTES


def _scalar(cls, name):
    return next((bit, item.width) for n, item, bit in cls.scalars if n == name)


def split(n, places, rng):
    """``n`` as a product of up to two counts: each with its place, of ``places``."""
    chosen = rng.sample(places, min(2, len(places)))
    outer = rng.choice([d for d in range(1, n + 1) if n % d == 0]) if len(chosen) > 1 else 1
    return dict(zip(chosen, (n // outer, outer), strict=False))


def legal_word(cls, engine, config, rng):
    """A legal instruction with random values."""
    used = rng.randint(1, config.dma_engines)
    scalars = {
        # Room for as many descriptors as any count of engines would have.
        "table": rng.randrange((1 << 33) - 255 * 0xFFFF) * 128,
        "first": rng.randint(0, config.dma_engines - used),
        "engines_used": used,
        "queue": rng.randrange(config.dma_queues),
    }
    elements = rng.randint(1, min(config.cols, config.psum_bank_bytes // 4))
    if any(operand.reduced for _, operand, _ in cls.operands):
        scalars["inner"] = rng.randrange(4)
        elements = 1 if scalars["inner"] == 3 else elements
    word = 0
    for name, item, bit in cls.scalars:
        any_value = rng.randrange(1 << item.width) if item.values is None else rng.choice(
            list(item.values)
        )  # fmt: skip
        # Flags come before the pointers that they make.
        if item.pointer is not None and get(word, *_scalar(cls, item.pointer)):
            any_value = rng.randrange(0, config.sbuf_bytes, 4)
        word = put(word, bit, item.width, scalars.get(name, any_value))
    partitions = rng.choice([1, config.quadrant, 2 * config.quadrant, config.rows])
    psum_is_free = True
    for _, operand, bit in cls.operands:
        space = rng.choice([s for s in operand.spaces if psum_is_free or s != Space.PSUM])
        psum_is_free &= operand.writes or space != Space.PSUM
        fmt = rng.choice([f for f in operand.formats if space == Space.SBUF or f.bytes == 4])
        unit = config.rows if partitions > 2 * config.quadrant else max(partitions, config.quadrant)
        start = 0 if operand.start_zero else rng.randrange(0, config.rows, unit)
        size = config.psum_bytes if space == Space.PSUM else config.sbuf_bytes
        span = config.psum_bank_bytes if operand.one_bank else size
        # Up to two dimensions with a step of either sign, in any of the places.
        if operand.reduced is None:
            counts = split(operand.exactly or elements, range(4), rng)
        else:
            inner = scalars[operand.reduced] + 1
            row = split(rng.randint(1, span // fmt.bytes // elements), range(inner), rng)
            counts = row | split(elements, range(inner, 4), rng)
        counts = [counts.get(place, 1) for place in range(4)]
        steps = [rng.randrange(1 << 16) for _ in range(4)]
        reach_left, low = span // fmt.bytes - 1, 0
        for place, count in enumerate(counts):
            if count > 1:
                most = min(reach_left // (count - 1), 32767)
                step = rng.randint(0, most)
                reach_left -= step * (count - 1)
                if rng.random() < 0.5:
                    low -= step * (count - 1)
                    step = -step
                steps[place] = step & 0xFFFF
        first = rng.randint(0, reach_left) - low
        offset = first * fmt.bytes + span * rng.randrange(size // span)
        values = {
            "dtype": fmt.code, "space": space, "start_partition": start,
            "num_partitions": partitions, "offset": offset,
        }  # fmt: skip
        for i in range(4):
            values[f"step{i}"], values[f"count{i}"] = steps[i], counts[i]
        for name, value in values.items():
            word = put_pattern(word, bit, name, value)
    word = put_header(word, "opcode", cls.opcode)
    word = put_header(word, "engine", engine)
    for name, modes in (("wait0", WaitMode), ("wait1", WaitMode), ("update", UpdateMode)):
        word = put_header(word, f"{name}_mode", rng.choice(list(modes)))
        word = put_header(word, f"{name}_semaphore", rng.randrange(config.semaphores))
        word = put_header(word, f"{name}_value", rng.randrange(1 << 32))
    return word


def mutations(word, cls, queue, config, rng):
    """``(what, queue, word, (code, field))`` for each thing that can be wrong with a legal word."""
    field = ErrorCode.BAD_FIELD
    for other in Engine:
        if other != queue:
            yield "queue", other, word, (ErrorCode.ILLEGAL_OPCODE, 0)
    for value in range(16):
        if value != queue:
            yield "engine", queue, put_header(word, "engine", value), (ErrorCode.ILLEGAL_OPCODE, 0)
    for value in {0, 0xFF, *(cls.opcode ^ 1 << i for i in range(8))} - set(INSTRUCTIONS):
        yield "opcode", queue, put_header(word, "opcode", value), (ErrorCode.ILLEGAL_OPCODE, 0)

    reserved = [bit for bit in range(WORD_BITS) if not cls.used_mask() >> bit & 1]
    for bit in rng.sample(reserved, 40) + reserved[:1] + reserved[-1:]:
        yield f"bit {bit}", queue, word | 1 << bit, (ErrorCode.RESERVED_BITS, 0)

    for name, modes in (("wait0", WaitMode), ("wait1", WaitMode), ("update", UpdateMode)):
        mode_bit = HEADER_BITS[f"{name}_mode"][0]
        for value in (len(modes), 4, 0x80, 0xFF):
            yield name, queue, put_header(word, f"{name}_mode", value), (field, mode_bit)
        if config.semaphores < 256:
            bit = HEADER_BITS[f"{name}_semaphore"][0]
            active = put_header(word, f"{name}_mode", 1)
            for value in (config.semaphores, 255):
                wrong = put_header(active, f"{name}_semaphore", value)
                yield name, queue, wrong, (field, bit)
                idle = put_header(wrong, f"{name}_mode", 0)
                yield name, queue, idle, LEGAL
    for name, item, bit in cls.scalars:
        if item.values is not None:
            for value in set(range(1 << item.width)) - set(item.values):
                yield name, queue, put(word, bit, item.width, value), (field, bit)
        if item.pointer is not None:
            size, flag = config.sbuf_bytes, _scalar(cls, item.pointer)
            number, pointer = put(word, *flag, 0), put(word, *flag, 1)
            wrongs = [1, 2, 3, size - 3, size - 2, size - 1, size, size + 1, size + 4, 2 * size]
            wrongs += [1 << 31, (1 << 32) - 4, (1 << 32) - 1]
            for value in (0, 4, size - 4, *wrongs):
                yield f"{name} {value}", queue, put(number, bit, item.width, value), LEGAL
                want = (field, bit) if value in wrongs else LEGAL
                yield f"{name} at {value}", queue, put(pointer, bit, item.width, value), want

    for index, (name, operand, bit) in enumerate(cls.operands):

        def change(base=word, bit=bit, **values):
            for key, value in values.items():
                base = put_pattern(base, bit, key, value)
            return base

        def at(member, bit=bit):
            return bit + PATTERN_BITS[member][0]

        codes = {fmt.code for fmt in operand.formats}
        for value in {0, *(fmt.code for fmt in FORMATS), 15, 16, 17, 0x81, 0xFF} - codes:
            yield f"{name} dtype", queue, change(dtype=value), (field, at("dtype"))
        psum = Space.PSUM in operand.spaces
        for fmt in operand.formats:
            if psum and fmt.bytes != 4:
                wrong = change(dtype=fmt.code, space=Space.PSUM)
                yield f"{name} {fmt.name} in PSUM", queue, wrong, (field, at("dtype"))
        fp32 = next(fmt for fmt in operand.formats if fmt.bytes == 4).code
        for value in {0, 1, 2, 0x80, 0xFF} - {int(space) for space in operand.spaces}:
            wrong = change(space=value, dtype=fp32)
            yield f"{name} space", queue, wrong, (field, at("space"))

        q, rows = config.quadrant, config.rows
        partition = (ErrorCode.BAD_PARTITION, at("start_partition"))
        wrongs = [(rows, 1), (4 * rows, 1), (0, rows + 1), (0, 0xFFFF), (0xFFFF, 1), (3 * q, 2 * q)]
        wrongs += [(q, 2 * q), (q, q + 1), (2 * q, 2 * q + 1), (q, 3 * q)]
        wrongs += [(1, 1), (q - 1, 1)] if q > 1 else []
        wrongs += [(q, 1), (2 * q, 1)] if operand.start_zero else []
        for start, count in wrongs:
            wrong = change(start_partition=start, num_partitions=count)
            yield f"{name} partitions {start}+{count}", queue, wrong, partition

        # One dimension, so that what follows is easy to see.
        space = operand.spaces[0]
        size = config.psum_bytes if space == Space.PSUM else config.sbuf_bytes
        flat = {"space": space, "num_partitions": 1, "start_partition": 0}
        for i in range(4):
            flat |= {f"step{i}": 0, f"count{i}": 1}
        outside = (ErrorCode.OUT_OF_RANGE, at("offset"))
        for fmt in operand.formats:
            if space == Space.PSUM and fmt.bytes != 4:
                continue
            simple = change(**flat, dtype=fmt.code)
            for i in range(fmt.bytes.bit_length() - 1):
                yield f"{name} misaligned", queue, change(simple, offset=1 << i), outside
            for offset in (size, size + fmt.bytes, 1 << 31, (1 << 32) - fmt.bytes):
                yield f"{name} offset {offset}", queue, change(simple, offset=offset), outside
            before = change(simple, step0=-1 & 0xFFFF, count0=2, offset=0)
            yield f"{name} an element before the first", queue, before, outside
        for i in range(4):
            two = change(**flat, dtype=fp32)
            two = change(two, **{f"count{i}": 2})
            for step, offset in ((-1, 0), (1, size - 4), (-2, 4), (-32768, 0), (32767, size - 4)):
                wrong = change(two, **{f"step{i}": step & 0xFFFF}, offset=offset)
                yield f"{name} step{i} {step}", queue, wrong, outside
            wide = {f"step{j}": 0x8000 for j in range(4)} | {f"count{j}": 0xFFFF for j in range(4)}
            for offset in (0, size - 4, 0xFFFFFFFC):
                yield f"{name} all negative", queue, change(two, **wide, offset=offset), outside
            wide |= {f"step{j}": 0x7FFF for j in range(4)}
            for offset in (0, size - 4, 0xFFFFFFFC):
                yield f"{name} all positive", queue, change(two, **wide, offset=offset), outside
        if operand.one_bank and config.psum_bank_bytes > 4:
            wrong = change(**flat, dtype=fp32, offset=config.psum_bank_bytes - 4)
            wrong = change(wrong, step0=1, count0=2)
            yield f"{name} two banks", queue, wrong, outside
            wrong = change(wrong, step0=-1 & 0xFFFF, offset=config.psum_bank_bytes)
            yield f"{name} two banks down", queue, wrong, outside

        mismatch = ErrorCode.SIZE_MISMATCH
        if operand.exactly is not None:
            for counts in ((operand.exactly + 1, 1), (1, operand.exactly - 1), (0, 1), *HUGE):
                wrong = change(**flat, dtype=fp32, offset=0)
                wrong = change(wrong, **{f"count{i}": count for i, count in enumerate(counts)})
                yield f"{name} exactly {counts}", queue, wrong, (mismatch, at("count0"))
        elif operand.limit is not None:
            limits = {"cols": config.cols, "bank": config.psum_bank_bytes // 4}
            limit = limits.get(operand.limit, operand.limit)
            for counts in ((limit + 1, 1), (1, limit + 1), (limit, 2), (0xFFFF, 0xFFFF)):
                wrong = change(**flat, dtype=fp32, offset=0)
                wrong = change(wrong, count1=counts[0], count3=counts[1])
                yield f"{name} limit {counts}", queue, wrong, (mismatch, at("count0"))
            for counts in HUGE:
                wrong = change(**flat, dtype=fp32, offset=0)
                wrong = change(wrong, **{f"count{i}": count for i, count in enumerate(counts)})
                yield f"{name} limit {counts}", queue, wrong, (mismatch, at("count0"))
        elif len(cls.operands) > 1:
            count = (mismatch, BODY_BIT + PATTERN_BITS["count0"][0])
            for counts in ((3, 0), (0xFFFF, 0xFFFF), (0x8000, 2)):
                wrong = change(dtype=fp32, **flat, offset=0)
                wrong = change(wrong, count0=counts[0], count2=counts[1])
                if expected(wrong, queue, config)[0] == mismatch:
                    yield f"{name} elements", queue, wrong, count
            for counts in HUGE:
                # The other operand has no elements at all.
                wrong = word
                for _, item, other in cls.operands:
                    if item.exactly is not None:
                        continue
                    four = next(fmt for fmt in item.formats if fmt.bytes == 4).code
                    wrong = change(wrong, bit=other, **{**flat, "count0": 0}, dtype=four, offset=0)
                wrong = change(wrong, **{f"count{i}": c for i, c in enumerate(counts)})
                yield f"{name} elements {counts}", queue, wrong, count
        if index and cls is not MatmulMoving:
            where = BODY_BIT + PATTERN_BITS["num_partitions"][0]
            for partitions in {1, q, 2 * q, rows} - {get(word, where, 16)}:
                wrong = change(num_partitions=partitions, start_partition=0)
                yield f"{name} partitions differ", queue, wrong, (mismatch, where)

        # Nothing to do is legal wherever it lies.
        far = change(offset=0xFFFFFFFF, start_partition=0xFFFF, num_partitions=0)
        others = (ErrorCode.SIZE_MISMATCH, BODY_BIT + PATTERN_BITS["num_partitions"][0])
        legal = len(cls.operands) < 2 or cls is MatmulMoving
        yield f"{name} no partitions", queue, far, LEGAL if legal else others
        if len(cls.operands) < 2:
            yield f"{name} no elements", queue, change(offset=0xFFFFFFFF, count2=0), LEGAL

    sources = [bit for _, operand, bit in cls.operands if not operand.writes]
    if len(sources) > 1 and all(Space.PSUM in op.spaces for _, op, _ in cls.operands[1:]):
        both = word
        for bit, operand in zip(sources, (op for _, op, _ in cls.operands[1:]), strict=True):
            four = next(fmt.code for fmt in operand.formats if fmt.bytes == 4)
            flat = {"space": Space.PSUM, "dtype": four, "offset": 0}
            flat |= {f"step{i}": 0 for i in range(4)}
            for member, value in flat.items():
                both = put_pattern(both, bit, member, value)
        space = sources[1] + PATTERN_BITS["space"][0]
        yield "both sources in PSUM", queue, both, (field, space)
        # What comes after it in the order of errors, or in the word
        worse = put_pattern(both, sources[0], "offset", 1)
        yield "both in PSUM, one outside", queue, worse, (field, space)
        for bit in sources:
            one = put_pattern(both, bit, "space", Space.SBUF)
            yield "one source in PSUM", queue, one, LEGAL
        # Elements come before partitions, whichever operand they are of.
        others = config.rows if get(word, sources[0] + 32, 16) == 1 else 1
        wrong = put_pattern(word, sources[0], "num_partitions", others)
        wrong = put_pattern(wrong, sources[0], "start_partition", 0)
        wrong = put_pattern(wrong, sources[1], "count1", 0)
        of = BODY_BIT if cls.operands[2][1].exactly is None else sources[1]
        count = (ErrorCode.SIZE_MISMATCH, of + PATTERN_BITS["count0"][0])
        yield "partitions of one, elements of the other", queue, wrong, count

    for index, (name, operand, bit) in enumerate(cls.operands):
        if operand.reduced is None:
            continue
        assert index
        dst, mismatch = cls.operands[0][2], (
            ErrorCode.SIZE_MISMATCH, BODY_BIT + PATTERN_BITS["count0"][0]
        )  # fmt: skip
        for reduced in range(1, 5):
            one = put(word, *_scalar(cls, operand.reduced), reduced - 1)
            for base in (dst, bit):
                for i in range(4):
                    one = put_pattern(one, base, f"count{i}", 1)
                    one = put_pattern(one, base, f"step{i}", 0)
            yield f"{name} one row of {reduced} dimensions", queue, one, LEGAL
            for i in range(4):
                for value in (0, 2, 0xFFFF):
                    many = put_pattern(one, bit, f"count{i}", value)
                    what = f"{name} count{i} {value}, {reduced} dimensions reduced"
                    yield what, queue, many, LEGAL if i < reduced else mismatch
                    # As many results: what counts is one side's product or both.
                    same = put_pattern(many, dst, "count2", value)
                    yield f"{what}, in dst too", queue, same, mismatch if i < reduced else LEGAL
                nothing = put_pattern(one, bit, f"count{i}", 0)
                far = put_pattern(nothing, bit, "offset", 0xFFFFFFFF)
                yield f"{name} nothing, anywhere", queue, far, LEGAL if i < reduced else mismatch
            huge = put_pattern(one, bit, "count0", 0xFFFF)
            huge = put_pattern(huge, bit, "step0", 0x7FFF)
            outside = ErrorCode.OUT_OF_RANGE, bit + PATTERN_BITS["offset"][0]
            yield f"{name} a row beyond the end", queue, huge, outside

    if cls is DmaStart:
        bits = {name: (bit, item.width) for name, item, bit in cls.scalars}
        engines = config.dma_engines
        wrongs = [("table", 1 << i) for i in range(7)]
        wrongs += [("first", engines), ("first", 255), ("engines_used", 0)]
        wrongs += [("engines_used", engines + 1), ("engines_used", 255)]
        wrongs += [("queue", value) for value in {config.dma_queues, 15} if value < 16]
        for name, value in wrongs:
            wrong = put(word, *bits[name], value)
            yield name, queue, wrong, (field, bits[name][0])
        wrong = put(put(word, *bits["first"], engines - 1), *bits["engines_used"], 2)
        yield "last engine", queue, wrong, (field, bits["engines_used"][0])
        wrong = put(put(word, *bits["first"], 1), *bits["engines_used"], 255)
        first = bits["first"][0] if engines == 1 else bits["engines_used"][0]
        yield "sum wraps", queue, wrong, (field, first)
        for count in (0, 1, 2, 777, 0xFFFF):
            whole = put(put(word, *bits["first"], 0), *bits["engines_used"], engines)
            whole = put(whole, *bits["count"], count)
            last = (1 << 40) - max(engines * count, 1) * DESCRIPTOR_BYTES
            yield "table up to the end", queue, put(whole, *bits["table"], last), LEGAL
            if engines * count > 1:
                for beyond in (last + DESCRIPTOR_BYTES, (1 << 40) - DESCRIPTOR_BYTES):
                    wrong = put(whole, *bits["table"], beyond)
                    yield "table beyond the end", queue, wrong, (field, bits["table"][0])


def compare(config, labelled):
    """Run cases ``(what, queue, word, verdict)`` and list those that differ."""
    got, _ = verdicts(config, [(queue, word) for _, queue, word, _ in labelled])
    wrong = [
        f"{what}: queue {queue}, word {word:#x}: expected {want}, got {(code, field)}"
        for (what, queue, word, want), (got_queue, code, field) in zip(labelled, got, strict=True)
        if (code, field) != want or got_queue != queue
    ]
    assert not wrong, f"{len(wrong)} of {len(labelled)} differ:\n" + "\n".join(wrong[:8])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.mnemonic)
def test_every_wrong_field_is_reported(cls, config, seed):
    rng = random.Random(seed)
    cases = []
    for queue in cls.engines:
        word = legal_word(cls, queue, config, rng)
        cases.append(("legal", queue, word, LEGAL))
        cases += list(mutations(word, cls, queue, config, rng))
    for what, queue, word, want in cases:
        assert expected(word, queue, config) == want, f"the model disagrees about {what}"
    compare(config, cases)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_legal_words_pass(config, seed):
    rng = random.Random(seed)
    cases = []
    for cls in CLASSES:
        for _ in range(100):
            queue = rng.choice(cls.engines)
            cases.append((cls.mnemonic, queue, legal_word(cls, queue, config, rng), LEGAL))
    rng.shuffle(cases)
    for what, queue, word, want in cases:
        assert expected(word, queue, config) == want, what
    compare(config, cases)


def nearly_legal(config, rng):
    """A legal word with one to three fields set to values near a boundary, or flipped bits."""
    cls = rng.choice(CLASSES)
    queue = rng.choice(cls.engines)
    word = legal_word(cls, queue, config, rng)
    fields = [HEADER_BITS[name] for name, *_ in HEADER]
    fields += [(bit, item.width) for _, item, bit in cls.scalars]
    for _, _, first in cls.operands:
        fields += [(first + bit, width) for bit, width in PATTERN_BITS.values()] * 3
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.1:
            word ^= 1 << rng.randrange(WORD_BITS)
            continue
        bit, width = rng.choice(fields)
        near = rng.choice(
            [0, 1, 2, config.quadrant, config.rows, config.sbuf_bytes, config.psum_bytes,
             config.psum_bank_bytes, config.semaphores, config.cols, 1 << width, 1 << width - 1]
        )  # fmt: skip
        value = near + rng.randint(-4, 4) if rng.random() < 0.7 else rng.randrange(1 << width)
        word = put(word, bit, width, value)
    return queue, word


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_random_words_agree_with_the_rules(config, seed):
    rng = random.Random(seed)
    cases = []
    for _ in range(1200):
        queue, word = nearly_legal(config, rng)
        cases.append(("random", queue, word, expected(word, queue, config)))
    for _ in range(100):
        queue, word = rng.choice(list(Engine)), rng.getrandbits(WORD_BITS)
        if rng.random() < 0.5:
            word = put_header(word, "opcode", rng.choice(CLASSES).opcode)
        cases.append(("noise", queue, word, expected(word, queue, config)))
    reached = {want[0] for *_, want in cases}
    assert reached >= set(range(ErrorCode.SIZE_MISMATCH + 1)), f"only {reached} were tried"
    compare(config, cases)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_golden_model_checks_alike(config, seed):
    rng = random.Random(seed)
    for _ in range(2000):
        queue, word = nearly_legal(config, rng)
        try:
            golden.check_word(word.to_bytes(WORD_BITS // 8, "little"), queue, config)
            verdict = LEGAL
        except golden._Illegal as illegal:
            verdict = (illegal.code, illegal.field)
        assert verdict == expected(word, queue, config), f"queue {queue}, word {word:#x}"


def test_takes_a_word_in_four_cycles_and_answers_in_time(seed):
    rng = random.Random(seed)
    config = SMALL_SEMAPHORES
    assert FRAME_CYCLES <= 4
    word = legal_word(TensorCopy, Engine.DVE, config, rng)
    for gap in (FRAME_CYCLES, FRAME_CYCLES + 1, 17):
        got, latencies = verdicts(config, [(Engine.DVE, word)] * 10, gap=gap)
        assert got == [(Engine.DVE, *LEGAL)] * 10
        assert latencies == [Checker.LATENCY_CYCLES] * 10
