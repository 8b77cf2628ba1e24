"""Random legal programs as a core sees them: instruction words, descriptors, contents of memories.

:func:`random_program` makes instructions in one order that a reader could follow, deals them to
their queues, and adds the semaphores that make every other order give the same bytes. Whatever
touches the same bytes is ordered; everything else is left to the machine.

Streams (weight loads, matmuls, instructions of each other engine, each DMA queue) complete in order
and count on a semaphore each. What each byte was last read and written by, per stream, gives the
waits.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from makalu.rtl.arch import formats
from makalu.rtl.arch.isa import (
    BITWISE_OPS,
    WORD_BYTES,
    AccessPattern,
    Activation,
    AffineSelect,
    AluOp,
    Compare,
    CopyPredicated,
    Descriptor,
    DescriptorSide,
    DmaStart,
    Engine,
    EventSemaphore,
    FindIndex8,
    Function,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    LoadStationary,
    MatchReplace8,
    MatmulMoving,
    Max8,
    Memset,
    ReduceOp,
    Rng,
    ScalarTensorTensor,
    Space,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)

__all__ = ["HBM_BYTES", "WATCHDOG_CYCLES", "Image", "contents", "random_program"]

WATCHDOG_CYCLES = 3000
HBM_BYTES = 1 << 16
DATA_BYTES = 1 << 14
"""Data lies at the end of HBM, so that some of it abuts what answers with an error."""
DATA = HBM_BYTES - DATA_BYTES

LOAD, MATMUL, VECTOR, SCALAR, GPSIMD, DMA = range(6)  # streams; DMA + q is queue q
DMA_ISSUERS = (Engine.SP, Engine.ACT, Engine.POOL, Engine.SP)


@dataclass
class Image:
    """A program in HBM from address 0 on."""

    instructions: list  # in an order that a single core could follow
    descriptors: list
    queues: dict = field(default_factory=dict)
    raw: bytes = b""

    def link(self):
        """Place queues and descriptors; fill in ``queues`` and ``raw``."""
        table = WORD_BYTES * len(self.instructions)
        words = {engine: [] for engine in Engine}
        for instruction in self.instructions:
            if isinstance(instruction, DmaStart):
                instruction = instruction.replace(table=table + instruction.table)
            words[instruction.engine].append(instruction.encode())
        image, self.queues = b"", {}
        for engine, found in words.items():
            if found:
                self.queues[engine] = len(image), len(found)
                image += b"".join(found)
        self.raw = image + b"".join(d.encode() for d in self.descriptors)
        assert len(self.raw) <= DATA
        return self


# Contents -----------------------------------------------------------------------------------------

SPECIAL = np.array(
    [
        0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
        0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FA00000, 0xFFFFFFFF, 0x3F800000,
        0x3F801000, 0x3F800FFF, 0x7F807F80, 0x00017C00, 0xFC007BFF, 0x80010001, 0x7E7F7C7B,
        0x7F7FE000, 0x7FFFFFFF, 0x80007FFF, 0x00800001,
    ],
    np.uint32,
)  # fmt: skip


SCALARS = np.array(
    [0, 0x80000000, 1, 0x3F800000, 0xBF800000, 0x40490FDB, 0x00800000, 0x7F7FFFFF, 0x7F800000,
     0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x33800000, 3, 31, 32, 0xFFFFFFFF],
    np.uint32,
)  # fmt: skip


def contents(rng, nbytes):
    """Bytes in blocks of one kind each: anything, numbers of some format, special values."""
    out = np.empty((nbytes // 64, 64), np.uint8)
    kinds = rng.integers(0, 6, len(out))
    out[:] = rng.integers(0, 256, out.shape)
    for kind, dtype in ((1, np.float32), (2, formats.BF16.dtype), (3, np.float16)):
        mine = np.flatnonzero(kinds == kind)
        shape = len(mine), 64 // np.dtype(dtype).itemsize
        values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, (len(mine), 1))
        out[mine] = values.astype(dtype).view(np.uint8)
    mine = np.flatnonzero(kinds >= 4)
    out[mine] = SPECIAL[rng.integers(0, len(SPECIAL), (len(mine), 16))].view(np.uint8)
    return out.reshape(-1)


# Patterns -----------------------------------------------------------------------------------------


def _counts(rng, n):
    """``n`` as a product of one to four counts."""
    counts = [n]
    while len(counts) < 4 and rng.random() < 0.6:
        i = rng.integers(len(counts))
        divisors = [d for d in range(1, counts[i] + 1) if counts[i] % d == 0]
        d = int(rng.choice(divisors))
        counts[i : i + 1] = [d, counts[i] // d]
    return counts


def _steps(rng, counts, first, slack, *, injective):
    """Steps for the counts; ``injective``: no two elements closer than ``first``."""
    steps = [0] * len(counts)
    span = first
    for i in rng.permutation(len(counts)) if rng.random() < 0.5 else range(len(counts)):
        if counts[i] == 1:
            steps[i] = int(rng.integers(-99, 100)) * first if rng.random() < 0.3 else 0
            continue
        if injective:
            step = span + slack * (int(rng.integers(1, 4)) if rng.random() < 0.4 else 0)
            span = span + step * (counts[i] - 1)
        else:
            step = int(rng.integers(0, 12)) * slack
        steps[i] = -step if rng.random() < 0.3 else step
    return steps


def _span(counts, steps):
    reach = [s * (c - 1) for s, c in zip(steps, counts, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)


def _partitions(rng, config, count):
    if count > 2 * config.quadrant:
        return 0
    unit = 2 * config.quadrant if count > config.quadrant else config.quadrant
    return unit * int(rng.integers(0, (config.partitions - count) // unit + 1))


class _Builder:
    def __init__(self, rng, config):
        self.rng, self.config = rng, config
        self.image = Image([], [])
        self.sbuf_size = config.partitions * config.sbuf_bytes
        self.psum_size = config.partitions * config.psum_bytes
        streams = DMA + config.dma_queues
        size = self.sbuf_size + self.psum_size + DATA_BYTES
        self.written = np.zeros((streams, size), np.int32)
        self.read = np.zeros((streams, size), np.int32)
        self.issued = [0] * streams
        self.known = {engine: [0] * streams for engine in Engine}
        numbers = [int(n) for n in rng.permutation(config.semaphores)]
        self.semaphores, self.fresh = numbers[:streams], numbers[streams:]
        self.units = [int(rng.choice([1, 1, 2, 1000, 1 << 24])) for _ in range(streams)]
        self.width = 0  # columns of the weights that the next matmul uses
        self.last_dst = None
        self.functions = rng.choice(list(Function), 3)

    def chance(self, p):
        return self.rng.random() < p

    def pick(self, items):
        return items[int(self.rng.integers(len(items)))]

    # Order ----------------------------------------------------------------------------------------

    def emit(self, instruction, stream, reads, writes, *, in_order=False):
        """Append an instruction after everything that it depends on."""
        engine, needs = instruction.engine, []
        for other, known in enumerate(self.known[engine]):
            if in_order and other == stream:
                continue
            need = 0
            for before, bytes_ in (
                (self.written, reads), (self.written, writes), (self.read, writes),
            ):  # fmt: skip
                if len(bytes_):
                    need = max(need, int(before[other][bytes_].max()))
            if need > known:
                self.known[engine][other] = need
                needs.append(Wait(self.semaphores[other], WaitMode.GE, need * self.units[other]))
        self.rng.shuffle(needs)
        while len(needs) > 2 or (needs and self.chance(0.05)):
            first, needs = needs[:2], needs[2:]
            self.image.instructions.append(EventSemaphore(engine=engine, waits=first))
        self.issued[stream] += 1
        self.image.instructions.append(
            instruction.replace(
                waits=needs,
                update=Update(self.semaphores[stream], UpdateMode.ADD, self.units[stream]),
            )
        )
        if len(reads):
            self.read[stream][reads] = self.issued[stream]
        if len(writes):
            self.written[stream][writes] = self.issued[stream]

    def handshake(self):
        """One queue sets a semaphore that another one waits to see."""
        first, second = self.rng.permutation(list(Engine))[:2]
        semaphore, value = self.fresh.pop(), int(self.rng.integers(1, 1 << 32))
        sets = EventSemaphore(engine=Engine(first), update=Update(semaphore, UpdateMode.SET, value))
        waits = EventSemaphore(engine=Engine(second), waits=[Wait(semaphore, WaitMode.EQ, value)])
        self.image.instructions += [sets, waits]

    # On chip --------------------------------------------------------------------------------------

    def pattern(self, fmt, space, partitions, n, *, start=None, injective=True, bank=False):
        config, size = self.config, fmt.bytes
        room = config.sbuf_bytes if space == Space.SBUF else config.psum_bytes
        if bank:
            room = config.psum_bank_bytes
        if start is None:
            start = _partitions(self.rng, config, partitions)
        while True:
            counts = _counts(self.rng, n)
            steps = _steps(self.rng, counts, 1, 1, injective=injective)
            low, high = _span(counts, steps)
            slots = room // size - (high - low)
            if slots > 0:
                break
        offset = (int(self.rng.integers(slots)) - low) * size
        if bank:
            offset += room * int(self.rng.integers(config.psum_banks))
        dims = tuple(zip(steps, counts, strict=True))
        if self.chance(0.02):
            dims = (*dims[:3], (1, 0))
        return AccessPattern(fmt, start, partitions, offset, dims, space)

    def bytes_of(self, ap):
        if not ap.elements or not ap.num_partitions:
            return np.empty(0, np.int64)
        sbuf = ap.space == Space.SBUF
        stride = self.config.sbuf_bytes if sbuf else self.config.psum_bytes
        parts = np.arange(ap.start_partition, ap.start_partition + ap.num_partitions) * stride
        offsets = ap.element_offsets()[:, None] + np.arange(ap.dtype.bytes)
        found = (parts[:, None] + offsets.reshape(-1)[None, :]).reshape(-1)
        return np.unique(found) + (0 if sbuf else self.sbuf_size)

    def load(self):
        rng, config = self.rng, self.config
        fmt = self.pick(formats.MATMUL_FORMATS)
        partitions, m = int(rng.integers(1, config.rows + 1)), int(rng.integers(1, config.cols + 1))
        src = self.pattern(fmt, Space.SBUF, partitions, m, injective=self.chance(0.8))
        if self.chance(0.03):
            src = replace(src, num_partitions=0)
        if src.elements and src.num_partitions:
            self.width = m
        self.emit(LoadStationary(src=src, half=int(rng.integers(3))), LOAD, self.bytes_of(src), [])

    def matmul(self):
        rng, config = self.rng, self.config
        if not self.width:
            return self.load()
        fmt = self.pick(formats.MATMUL_FORMATS)
        n = int(rng.integers(1, config.psum_bank_words + 1))
        repeat = self.last_dst is not None and self.chance(0.4)
        repeat = repeat and self.last_dst.num_partitions <= self.width
        if repeat:
            dst, n = self.last_dst, self.last_dst.elements
        else:
            m = int(rng.integers(1, self.width + 1))
            dst = self.pattern(formats.FP32, Space.PSUM, m, n, start=0, bank=True)
        partitions = int(rng.integers(1, config.rows + 1))
        src = self.pattern(fmt, Space.SBUF, partitions, n, injective=self.chance(0.8))
        if src.elements != dst.elements:  # a no-op on one side only
            return None
        if self.chance(0.06):  # nothing to do, for one of three reasons
            reason = int(rng.integers(3))
            if reason == 0:
                src = replace(src, num_partitions=0)
            elif reason == 1:
                dst = replace(dst, num_partitions=0)
            else:
                src, dst = (replace(ap, dims=(*ap.dims[:3], (1, 0))) for ap in (src, dst))
        self.last_dst = dst if dst.elements and dst.num_partitions else None
        accumulate = int(self.chance(0.5))
        writes = self.bytes_of(dst)
        self.emit(
            MatmulMoving(dst=dst, src=src, half=int(rng.integers(3)), accumulate=accumulate),
            MATMUL, self.bytes_of(src), writes, in_order=repeat,
        )  # fmt: skip
        return None

    def vector_size(self):
        return int(self.rng.integers(1, 90 if self.chance(0.2) else 24))

    def copy(self):
        rng = self.rng
        space = self.pick((Space.SBUF, Space.PSUM))
        allowed = [f for f in formats.FORMATS if space == Space.SBUF or f.bytes == 4]
        src_fmt = self.pick(allowed)
        dst_fmt = src_fmt if self.chance(0.2) else self.pick(formats.FORMATS)
        partitions, n = int(rng.integers(1, self.config.partitions + 1)), self.vector_size()
        while True:
            src = self.pattern(src_fmt, space, partitions, n, injective=self.chance(0.7))
            dst = self.pattern(dst_fmt, Space.SBUF, partitions, n, injective=self.chance(0.9))
            reads, writes = self.bytes_of(src), self.bytes_of(dst)
            if src.elements == dst.elements and not np.isin(reads, writes).any():
                break
        saturate = int(self.chance(0.5))
        self.emit(TensorCopy(dst=dst, src=src, saturate=saturate), VECTOR, reads, writes)

    def fill(self):
        rng = self.rng
        fmt, partitions = self.pick(formats.FORMATS), int(rng.integers(1, self.config.rows + 1))
        dst = self.pattern(
            fmt, Space.SBUF, partitions, self.vector_size(), injective=self.chance(0.9)
        )
        value = int(rng.integers(1 << 32))
        self.emit(Memset(dst=dst, value=value), VECTOR, [], self.bytes_of(dst))

    def sources(self, allowed, partitions, sizes, psum=True):
        """Patterns of so many elements in formats of ``allowed``, at most one of them in PSUM."""
        count = len(allowed)
        spaces = [Space.SBUF] * count
        if psum and self.chance(0.5):
            spaces[int(self.rng.integers(count))] = Space.PSUM
        found = []
        for space, some, n in zip(spaces, allowed, sizes, strict=True):
            fmt = self.pick([f for f in some if space == Space.SBUF or f.bytes == 4])
            found.append(self.pattern(fmt, space, partitions, n, injective=self.chance(0.7)))
        return found

    def scalar(self, name, like, values):
        """Fill in a scalar: a number, or numbers in SBUF. Returns the bytes that are read."""
        rng = self.rng
        flag = values[f"{name}_pointer"] = int(self.chance(0.4))
        if not flag:
            any_number = np.float32(rng.standard_normal() * 4).view(np.uint32)
            values[name] = int(self.pick((any_number, any_number, rng.choice(SCALARS))))
            return np.empty(0, np.int64)
        values[name] = 4 * int(rng.integers(0, self.config.sbuf_bytes // 4))
        return self.bytes_of(replace(
            like, dtype=formats.FP32, space=Space.SBUF, offset=values[name], dims=((0, 1),)
        ))  # fmt: skip

    def operation(self):
        """An operation, one on bits less often than the others."""
        return int(self.pick(BITWISE_OPS if self.chance(0.1) else tuple(AluOp)))

    def arithmetic(self, cls, scalars=(), stream=VECTOR, **more):
        """An instruction with sources, and scalars by name."""
        partitions, n = int(self.rng.integers(1, self.config.partitions + 1)), self.vector_size()
        ops = [name for name, item, _ in cls.scalars if item.values is AluOp]
        operands = [operand for _, operand, _ in cls.operands]
        psum = Space.PSUM in operands[-1].spaces
        while True:
            sizes = [operand.exactly or n for operand in operands]
            found = self.sources([o.formats for o in operands[1:]], partitions, sizes[1:], psum)
            if operands[-1].exactly and found[0].space == Space.SBUF and self.chance(0.3):
                # Look for what is there, or was, eight times.
                places = found[0].element_offsets() if found[0].elements else [found[0].offset]
                at = int(self.pick(places))
                found[-1] = replace(found[0], offset=at, dims=((0, operands[-1].exactly),))
            given = [operand.exactly for operand in operands]
            pairs = list(zip(found, given[1:], strict=True))
            if any(exactly not in (None, ap.elements) for ap, exactly in pairs):
                continue
            if len({ap.elements for ap, exactly in pairs if not exactly}) > 1:
                continue
            # The result may go where a source was, element by element.
            in_place = [
                ap for ap, exactly in pairs
                if ap.space == Space.SBUF and self.distinct(ap) and exactly is given[0] is None
            ]  # fmt: skip
            if in_place and self.chance(0.25):
                dst = self.pick(in_place)
            else:
                fmt = self.pick(operands[0].formats)
                dst = self.pattern(
                    fmt, Space.SBUF, partitions, sizes[0], injective=self.chance(0.9)
                )
            values = {name: self.operation() for name in ops}
            values |= {f"reverse{i}": int(self.chance(0.4)) for i in range(len(ops))
                       if "op0" in ops}  # fmt: skip
            reads = [self.bytes_of(ap) for ap in found if ap != dst]
            reads += [self.scalar(name, found[0], values) for name in scalars]
            writes = self.bytes_of(dst)
            apart = not np.isin(np.concatenate([*reads, np.empty(0, np.int64)]), writes).any()
            if dst.elements == (given[0] or found[0].elements) and apart:
                break
        names = [name for name, operand, _ in cls.operands if not operand.writes]
        values |= dict(zip(names, found, strict=True))
        values |= {"dst": dst, **more}
        if any(name == "saturate" for name, _, _ in cls.scalars):
            values["saturate"] = int(self.chance(0.5))
        reads = np.concatenate([*reads, *(writes for ap in found if ap == dst)])
        self.emit(cls(**values), stream, reads.astype(np.int64), writes)

    def distinct(self, ap):
        """Whether no two elements of a pattern share a byte."""
        size = ap.elements * ap.num_partitions * ap.dtype.bytes
        return len(self.bytes_of(ap)) == size

    def two_tensors(self):
        self.arithmetic(TensorTensor)

    def two_scalars(self):
        self.arithmetic(TensorScalar, ("scalar0", "scalar1"))

    def two_tensors_and_scalar(self):
        self.arithmetic(ScalarTensorTensor, ("scalar0",))

    def scan(self):
        self.arithmetic(TensorTensorScan, ("initial",))

    def copy_predicated(self):
        self.arithmetic(CopyPredicated, reverse=int(self.chance(0.4)))

    def greatest(self):
        self.arithmetic(Max8)

    def search(self):
        self.arithmetic(FindIndex8)

    def search_and_replace(self):
        self.arithmetic(MatchReplace8, value=int(self.rng.choice(SCALARS)))

    def activation(self):
        # A few functions in each program: the tables of all others would take most of the time.
        self.arithmetic(
            Activation, ("scale", "bias"), SCALAR,
            function=int(self.pick(self.functions)),
            alpha=int(self.rng.choice(SCALARS)),
        )  # fmt: skip

    def function_of_place(self):
        """Fields of an affine function, small, so that it passes zero, or any."""
        small = self.chance(0.7)
        names = ("offset", "channel_multiplier", *(f"step{i}" for i in range(4)))
        bound = 9 if small else 1 << 31
        return {name: int(self.rng.integers(-bound, bound)) & 0xFFFFFFFF for name in names}

    def iota(self):
        partitions = int(self.rng.integers(1, self.config.partitions + 1))
        fmt, n = self.pick(formats.FORMATS), self.vector_size()
        dst = self.pattern(fmt, Space.SBUF, partitions, n, injective=self.chance(0.9))
        saturate = int(self.chance(0.5))
        self.emit(
            Iota(dst=dst, saturate=saturate, **self.function_of_place()),
            GPSIMD, [], self.bytes_of(dst),
        )  # fmt: skip

    def random(self):
        partitions, n = int(self.rng.integers(1, self.config.partitions + 1)), self.vector_size()
        (operand,) = (operand for _, operand, _ in Rng.operands)
        while True:
            dst = self.pattern(
                self.pick(operand.formats), Space.SBUF, partitions, n, injective=self.chance(0.9)
            )
            values, writes = {}, self.bytes_of(dst)
            reads = self.scalar("seed", dst, values)
            if not np.isin(reads, writes).any():
                break
        if not values["seed_pointer"]:
            values["seed"] = int(self.rng.integers(1 << 32))
        self.emit(Rng(dst=dst, **values, **self.function_of_place()), GPSIMD, reads, writes)

    def affine_select(self):
        self.arithmetic(
            AffineSelect, stream=GPSIMD,
            compare=int(self.pick(list(Compare))), value=int(self.rng.choice(SCALARS)),
            **self.function_of_place(),
        )  # fmt: skip

    def two_integers(self):
        self.arithmetic(IntegerTensorTensor, stream=GPSIMD)

    def integer_and_scalars(self):
        self.arithmetic(IntegerTensorScalar, ("scalar0", "scalar1"), GPSIMD)

    def reduce(self):
        rng = self.rng
        partitions = int(rng.integers(1, self.config.partitions + 1))
        while True:
            (src,) = self.sources([formats.FORMATS], partitions, [self.vector_size()])
            inner = int(rng.integers(0, min(len(src.dims) + 1, 4)))
            rows = int(np.prod([count for _, count in src.dims[inner + 1 :]]))
            dst = self.pattern(
                self.pick(formats.FORMATS), Space.SBUF, partitions, rows or 1,
                injective=self.chance(0.9),
            )  # fmt: skip
            if not rows:
                dst = replace(dst, dims=(*dst.dims[:3], (1, 0)))
            reads, writes = self.bytes_of(src), self.bytes_of(dst)
            if dst.elements == rows and not np.isin(reads, writes).any():
                break
        # Rows without elements leave the results as they are.
        writes = writes if src.elements else np.empty(0, np.int64)
        on_bits = [op for op in ReduceOp if AluOp(op) in BITWISE_OPS]
        op = int(self.pick(on_bits if self.chance(0.15) else list(ReduceOp)))
        flags = {name: int(self.chance(0.4)) for name in ("negate", "saturate")}
        self.emit(
            TensorReduce(dst=dst, src=src, op=op, inner=inner, **flags), VECTOR, reads, writes
        )

    # DMA ------------------------------------------------------------------------------------------

    def side(self, in_sbuf, size, n, *, injective):
        rng, config = self.rng, self.config
        for _ in range(200):
            counts = _counts(rng, n)
            if not in_sbuf:
                slack = int(rng.choice([1, size, 8]))
                steps = _steps(rng, counts, size, slack, injective=injective)
                low, high = _span(counts, steps)
                slots = DATA_BYTES - (high - low) - size + 1
                if slots > 0:
                    at = DATA + int(rng.integers(slots)) - low
                    return DescriptorSide(at, tuple(zip(steps, counts, strict=True)))
                continue
            # Some dimensions go across partitions.
            across = [c <= config.partitions and self.chance(0.5) for c in counts]
            sides = []
            for kind, unit, room in (
                (True, 1, config.partitions), (False, size, config.sbuf_bytes),
            ):  # fmt: skip
                mine = [c if a == kind else 1 for c, a in zip(counts, across, strict=True)]
                steps = _steps(rng, mine, unit, unit, injective=injective)
                steps = [s if c > 1 else 0 for s, c in zip(steps, mine, strict=True)]
                low, high = _span(mine, steps)
                slots = (room - (high - low) - unit) // unit + 1
                at = unit * int(rng.integers(slots)) - low if slots > 0 else None
                sides.append((steps, at))
            (part_steps, partition), (byte_steps, offset) = sides
            if partition is None or offset is None:
                continue
            stride = config.sbuf_partition_stride
            steps = [
                p * stride if a else b
                for p, b, a in zip(part_steps, byte_steps, across, strict=True)
            ]
            if any(abs(s) >= stride for s, a in zip(steps, across, strict=True) if not a):
                continue
            return DescriptorSide(
                config.sbuf_address(partition, offset), tuple(zip(steps, counts, strict=True))
            )
        return None

    def bytes_of_side(self, side, size):
        addresses = (side.addresses(size)[:, None] + np.arange(size)).reshape(-1)
        base = self.config.sbuf_address(0, 0)
        if side.address >= base:
            return np.unique(addresses - base)
        return np.unique(addresses - DATA) + self.sbuf_size + self.psum_size

    def dma(self):
        rng = self.rng
        queue = int(rng.integers(self.config.dma_queues))
        reads, writes, table = [], [], len(self.image.descriptors)
        count = int(rng.choice([0, 1, 1, 1, 1, 2, 2, 3]))
        while len(self.image.descriptors) < table + count:
            size_log2 = int(rng.integers(3))
            size = 1 << size_log2
            n = int(rng.integers(1, 300 if self.chance(0.15) else 48))
            # Where bytes are written twice the last ones stay.
            injective = self.chance(0.95)
            from_sbuf, to_sbuf = self.chance(0.5), self.chance(0.5)
            src = self.side(from_sbuf, size, n, injective=self.chance(0.8))
            dst = self.side(to_sbuf, size, n, injective=injective)
            if src is None or dst is None:
                continue
            taken, given = self.bytes_of_side(src, size), self.bytes_of_side(dst, size)
            if np.isin(taken, given).any():
                continue
            self.image.descriptors.append(Descriptor(size_log2, src, dst))
            reads.append(taken)
            writes.append(given)
        none = np.empty(0, np.int64)
        start = DmaStart(
            engine=DMA_ISSUERS[queue], table=table * WORD_BYTES, first=0, engines_used=1,
            queue=queue, count=count,
        )  # fmt: skip
        self.emit(
            start, DMA + queue, np.concatenate([none, *reads]), np.concatenate([none, *writes]),
            in_order=self.chance(0.5),
        )  # fmt: skip


def random_program(rng, config, length):
    """An :class:`Image` of about ``length`` instructions that do something."""
    builder = _Builder(rng, config)
    weights = {
        builder.load: 2, builder.matmul: 4, builder.copy: 2, builder.fill: 1, builder.dma: 4,
        builder.handshake: 0.7, builder.two_tensors: 1.5, builder.two_scalars: 1.5,
        builder.two_tensors_and_scalar: 1.5, builder.reduce: 1.5, builder.activation: 2,
        builder.iota: 1, builder.random: 1, builder.affine_select: 1.5, builder.two_integers: 1.5,
        builder.integer_and_scalars: 1.5, builder.scan: 1, builder.copy_predicated: 1.5,
        builder.greatest: 1, builder.search: 2, builder.search_and_replace: 2,
    }  # fmt: skip
    actions = list(weights)
    p = np.array(list(weights.values()))
    # The weights that an earlier program left behind are nobody's business.
    builder.load()
    while not builder.width:
        builder.load()
    for i in rng.choice(len(actions), length, p=p / p.sum()):
        actions[i]()
    return builder.image.link()
