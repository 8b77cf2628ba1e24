"""The golden model: what every instruction means, in numpy, without cycles.

It executes the same HBM image as the hardware: 128-byte instruction words and DMA descriptors, five
queues in order, semaphores, the hardware's checks and error codes. It imports only the contract
(:mod:`..rtl.arch`), so that hardware and model can disagree only by being wrong.

One function per instruction, registered with :func:`executes`. Order between queues is free
wherever the program's semaphores leave it free; :class:`GoldenCore` takes the queues in turn, or at
random with ``shuffle``, which brings a missing semaphore to light.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..rtl.arch import formats
from ..rtl.arch.config import AXI_DATA_BYTES, HBM_WINDOW, SBUF_WINDOW, WINDOW_LOG2
from ..rtl.arch.isa import (
    BITWISE_OPS,
    DESCRIPTOR_BYTES,
    DESCRIPTOR_COPY,
    DESCRIPTOR_LAYOUT,
    EIGHT,
    HEADER,
    INSTRUCTIONS,
    WORD_BYTES,
    AccessPattern,
    Activation,
    AffineSelect,
    AluOp,
    CopyPredicated,
    Descriptor,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    FindIndex8,
    Half,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    LoadStationary,
    MatchReplace8,
    MatmulMoving,
    Max8,
    Memset,
    Rng,
    ScalarTensorTensor,
    Space,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
    UpdateMode,
    WaitMode,
    decode,
)
from ..rtl.arch.mixing import fraction, mix
from .activation import evaluate
from .arithmetic import fma32
from .elementwise import compare_with_zero, operate, operate_integers, reduce_rows

__all__ = [
    "EXECUTORS", "Blocked", "GoldenCore", "GoldenDeadlock", "GoldenError", "check_descriptor",
    "check_word", "executes", "fused_sums",
]  # fmt: skip

SEMAPHORE_LIMIT = 1 << 32
PSUM_WORD_BYTES = 4
SCALAR_BYTES = 4
BUS_WORD_BYTES = AXI_DATA_BYTES
_SIGN = np.uint32(1 << 31)


class GoldenError(Exception):
    """The model stopped where the hardware stops.

    Parameters
    ----------
    code : :class:`ErrorCode`
    source, field, pc, address : :class:`int`
        What the hardware's error registers hold; see
        :data:`~..rtl.arch.isa.ERROR_REPORTS`.
    """

    def __init__(self, code, *, source, field=0, pc=0, address=0):
        self.code = ErrorCode(code)
        self.source, self.field, self.pc, self.address = source, field, pc, address
        where = f"DMA engine {source - 16}" if source >= 16 else f"queue {Engine(source).name}"
        super().__init__(
            f"{self.code.name} in {where}: word at {pc:#x}, field at bit {field}, "
            f"address {address:#x}"
        )


@dataclass(frozen=True)
class Blocked:
    """A queue whose head waits for a semaphore that nobody will change."""

    engine: Engine
    pc: int
    issued: int
    wait: int
    """Which of the two waits (the first that fails)."""
    mode: WaitMode
    semaphore: int
    wanted: int
    seen: int
    instruction: str

    def __str__(self):
        sign = ">=" if self.mode == WaitMode.GE else "=="
        return (
            f"{self.engine.name} waits at {self.pc:#x} for semaphore {self.semaphore} {sign} "
            f"{self.wanted}, which is {self.seen}: {self.instruction}"
        )


class GoldenDeadlock(GoldenError):
    """Every queue that has work left waits for a semaphore that nobody will change.

    ``blocked`` lists who waits for what.
    """

    def __init__(self, blocked):
        super().__init__(ErrorCode.WATCHDOG, source=int(blocked[0].engine), pc=blocked[0].pc)
        self.blocked = tuple(blocked)
        self.args = ("nothing can proceed: " + "; ".join(map(str, blocked)),)


# Checks -------------------------------------------------------------------------------------------

_HEADER_BIT = {name: bit for name, bit, _ in HEADER}
_PATTERN_BIT = {name: bit for name, bit, _ in AccessPattern.LAYOUT}
_DESCRIPTOR_BIT = {name: bit for name, bit, _ in DESCRIPTOR_LAYOUT}
_USED = {cls: cls.used_mask() for cls in INSTRUCTIONS.values()}


class _Illegal(Exception):
    """A failed check: code and first bit of the field."""

    def __init__(self, code, field=0):
        super().__init__(code, field)
        self.code, self.field = code, field


def check_word(word, engine, config):
    """Check one instruction word as the queue of ``engine`` does; return the decoded instruction.

    Raises
    ------
    :exc:`_Illegal`
        With the first failed check in the order of :class:`ErrorCode`, fields in ascending order.
    """
    value = int.from_bytes(word, "little")

    def get(bit, width):
        return value >> bit & (1 << width) - 1

    header = {name: get(bit, width) for name, bit, width in HEADER}
    cls = INSTRUCTIONS.get(header["opcode"])
    if cls is None or engine not in cls.engines or header["engine"] != engine:
        raise _Illegal(ErrorCode.ILLEGAL_OPCODE)
    if value & ~_USED[cls]:
        raise _Illegal(ErrorCode.RESERVED_BITS)

    # Codes without meaning
    for name, modes in (("wait0", WaitMode), ("wait1", WaitMode), ("update", UpdateMode)):
        mode = header[f"{name}_mode"]
        if mode and header[f"{name}_semaphore"] >= config.semaphores:
            raise _Illegal(ErrorCode.BAD_FIELD, _HEADER_BIT[f"{name}_semaphore"])
        if mode >= len(modes):
            raise _Illegal(ErrorCode.BAD_FIELD, _HEADER_BIT[f"{name}_mode"])
    in_psum = False
    for _, operand, first in cls.operands:
        sizes = {fmt.code: fmt.bytes for fmt in operand.formats}
        size = sizes.get(get(first + _PATTERN_BIT["dtype"], 8))
        space = get(first + _PATTERN_BIT["space"], 8)
        if size is None or (space == Space.PSUM and size != PSUM_WORD_BYTES):
            raise _Illegal(ErrorCode.BAD_FIELD, first + _PATTERN_BIT["dtype"])
        # Only one source may lie in PSUM.
        if space not in operand.spaces or (in_psum and space == Space.PSUM):
            raise _Illegal(ErrorCode.BAD_FIELD, first + _PATTERN_BIT["space"])
        in_psum |= space == Space.PSUM and not operand.writes
    scalars = {name: get(bit, item.width) for name, item, bit in cls.scalars}
    for name, item, first in cls.scalars:
        scalar = scalars[name]
        if item.values is not None and scalar not in list(item.values):
            raise _Illegal(ErrorCode.BAD_FIELD, first)
        points = item.pointer is not None and scalars[item.pointer]
        if points and (scalar % SCALAR_BYTES or scalar >= config.sbuf_bytes):
            raise _Illegal(ErrorCode.BAD_FIELD, first)
    instruction = decode(word)
    if cls is DmaStart:
        _check_dma_start(instruction, config)

    # Where the operands lie
    patterns = [(instruction.values[name], operand, bit) for name, operand, bit in cls.operands]
    for ap, operand, bit in patterns:
        if not _partitions_allowed(ap, operand, config):
            raise _Illegal(ErrorCode.BAD_PARTITION, bit + _PATTERN_BIT["start_partition"])
    for ap, operand, bit in patterns:
        if not _in_range(ap, operand, config):
            raise _Illegal(ErrorCode.OUT_OF_RANGE, bit + _PATTERN_BIT["offset"])

    # How large they are
    for ap, operand, bit in patterns:
        limits = {None: None, "cols": config.cols, "bank": config.psum_bank_words}
        limit = limits.get(operand.limit, operand.limit)
        too_many = limit is not None and ap.elements > limit
        if too_many or operand.exactly not in (None, ap.elements):
            raise _Illegal(ErrorCode.SIZE_MISMATCH, bit + _PATTERN_BIT["count0"])
    if len(patterns) > 1:
        dst, _, bit = patterns[0]
        for ap, operand, _ in patterns[1:]:
            if operand.exactly or patterns[0][1].exactly:
                continue
            dims = ap.dims
            if operand.reduced:
                dims = dims[getattr(instruction, operand.reduced) + 1 :]
            if dst.elements != math.prod(count for _, count in dims):
                raise _Illegal(ErrorCode.SIZE_MISMATCH, bit + _PATTERN_BIT["count0"])
        # The partitions of a matmul's result are columns of the array, those of its source rows.
        for ap, _, _ in patterns[1:]:
            if cls is not MatmulMoving and dst.num_partitions != ap.num_partitions:
                raise _Illegal(ErrorCode.SIZE_MISMATCH, bit + _PATTERN_BIT["num_partitions"])
    return instruction


def _check_dma_start(instruction, config):
    bits = {name: bit for name, _, bit in DmaStart.scalars}
    first, used = instruction.first, instruction.engines_used
    end = instruction.table + used * instruction.count * DESCRIPTOR_BYTES
    if instruction.table % DESCRIPTOR_BYTES or end > 1 << WINDOW_LOG2:
        raise _Illegal(ErrorCode.BAD_FIELD, bits["table"])
    if first >= config.dma_engines:
        raise _Illegal(ErrorCode.BAD_FIELD, bits["first"])
    if used == 0 or first + used > config.dma_engines:
        raise _Illegal(ErrorCode.BAD_FIELD, bits["engines_used"])
    if instruction.queue >= config.dma_queues:
        raise _Illegal(ErrorCode.BAD_FIELD, bits["queue"])


def _partitions_allowed(ap, operand, config):
    start, count = ap.start_partition, ap.num_partitions
    if count == 0:
        return True
    if operand.start_zero and start:
        return False
    if count > 2 * config.quadrant:
        unit = config.partitions
    elif count > config.quadrant:
        unit = 2 * config.quadrant
    else:
        unit = config.quadrant
    return start % unit == 0 and start + count <= config.partitions


def _in_range(ap, operand, config):
    if ap.elements == 0 or ap.num_partitions == 0:
        return True
    size = ap.dtype.bytes
    if ap.offset % size:
        return False
    reach = [size * step * (count - 1) for step, count in ap.dims]
    low = ap.offset + sum(r for r in reach if r < 0)
    high = ap.offset + sum(r for r in reach if r > 0)
    space = config.sbuf_bytes if ap.space == Space.SBUF else config.psum_bytes
    if low < 0 or high + size > space:
        return False
    bank = config.psum_bank_bytes
    return not (operand.one_bank and ap.space == Space.PSUM and low // bank != high // bank)


def check_descriptor(raw, config):
    """Check one DMA descriptor; return the decoded :class:`Descriptor`.

    Raises
    ------
    :exc:`_Illegal`
        BAD_DESCRIPTOR with the first bit of the offending field.
    """
    word = int.from_bytes(raw, "little")
    get = {name: word >> bit & (1 << width) - 1 for name, bit, width in DESCRIPTOR_LAYOUT}

    def bad(name):
        raise _Illegal(ErrorCode.BAD_DESCRIPTOR, _DESCRIPTOR_BIT[name])

    if get["kind"] != DESCRIPTOR_COPY:
        bad("kind")
    if get["size_log2"] > 2:
        bad("size_log2")
    if get["_reserved"]:
        bad("_reserved")
    end = max(bit + width for _, bit, width in DESCRIPTOR_LAYOUT)
    if word >> end:
        raise _Illegal(ErrorCode.BAD_DESCRIPTOR, end)
    descriptor = Descriptor.decode(raw)
    if descriptor.src.elements != descriptor.dst.elements:
        bad("dst_count0")
    if descriptor.src.elements:
        for name, side in (("src", descriptor.src), ("dst", descriptor.dst)):
            part = _bad_part(side, 1 << descriptor.size_log2, config)
            if part is not None:
                bad(f"{name}_{part}")
    return descriptor


def _reach(side):
    """Lowest and highest address of an element's first byte."""
    reach = [step * (count - 1) for step, count in side.dims]
    return (
        side.address + sum(r for r in reach if r < 0),
        side.address + sum(r for r in reach if r > 0),
    )


def _first_beyond(side, size, limit):
    """Address of the first element, in their order, with a byte at or beyond ``limit``.

    There must be one.
    """
    address = side.address
    for d in reversed(range(len(side.dims))):
        # The least index from which the dimensions below still lead beyond the limit.
        step, _ = side.dims[d]
        below = sum(max(s, 0) * (c - 1) for s, c in side.dims[:d])
        missing = limit - size + 1 - address - below
        if step > 0 and missing > 0:
            address += step * -(-missing // step)
    return address


def _bad_part(side, size, config):
    """Name of what is wrong with one side of a descriptor, or ``None``."""
    window, within = side.address >> WINDOW_LOG2, side.address & (1 << WINDOW_LOG2) - 1
    if window == HBM_WINDOW:
        low, high = _reach(side)
        return "address" if low < 0 or high + size > 1 << WINDOW_LOG2 else None
    stride = config.sbuf_partition_stride
    partition, offset = divmod(within, stride)
    if window != SBUF_WINDOW or offset % size or partition >= config.partitions:
        return "address"
    # In SBUF a step goes to other partitions or along the free axis, not both.
    bytes_low = bytes_high = offset
    parts_low = parts_high = partition
    for i, (step, count) in enumerate(side.dims):
        if count <= 1:
            continue
        if step % stride == 0:
            reach = step // stride * (count - 1)
            parts_low, parts_high = parts_low + min(reach, 0), parts_high + max(reach, 0)
        elif abs(step) > stride or step % size:
            return f"step{i}"
        else:
            reach = step * (count - 1)
            bytes_low, bytes_high = bytes_low + min(reach, 0), bytes_high + max(reach, 0)
    inside = (
        parts_low >= 0
        and parts_high < config.partitions
        and bytes_low >= 0
        and bytes_high + size <= config.sbuf_bytes
    )
    return None if inside else "address"


# Memories -----------------------------------------------------------------------------------------


def _ordered(dims, size):
    """Whether no two elements of ``(step in bytes, count)`` dimensions share a byte."""
    span = size
    for step, count in sorted(((abs(s), c) for s, c in dims if c > 1)):
        if step < span:
            return False
        span += step * (count - 1)
    return True


def _element_type(size):
    return np.dtype(f"u{size}")


class _Memory:
    """Bytes of a memory with partitions ``stride`` bytes apart."""

    def __init__(self, partitions, size, stride, fill):
        self.raw = np.full(partitions * stride, fill, np.uint8)
        self.stride = stride
        self.bytes = self.raw.reshape(partitions, stride)[:, :size]

    def _view(self, ap, dtype):
        dims = ap.dims[::-1]
        return np.ndarray(
            (ap.num_partitions, *(count for _, count in dims)),
            dtype,
            self.raw,
            ap.start_partition * self.stride + ap.offset,
            (self.stride, *(step * ap.dtype.bytes for step, _ in dims)),
        )

    def read(self, ap, dtype=None):
        """Codes of an access pattern as ``[partitions, elements]``, a copy."""
        view = self._view(ap, dtype or ap.dtype.dtype)
        return np.array(view, order="C").reshape(ap.num_partitions, -1)

    def write(self, ap, codes, wanted=None):
        """Store ``[partitions, elements]``; where elements overlap the last one stays.

        ``wanted``: the elements that are stored, of the same shape.
        """
        size = ap.dtype.bytes
        codes = np.ascontiguousarray(codes).view(_element_type(size))
        if wanted is None and _ordered([(step * size, n) for step, n in ap.dims], size):
            view = self._view(ap, _element_type(size))
            view[...] = codes.reshape(view.shape)
            return
        rows = self.bytes[ap.start_partition : ap.start_partition + ap.num_partitions]
        for i, offset in enumerate(ap.element_offsets()):
            chosen = slice(None) if wanted is None else wanted[:, i]
            rows[chosen, offset : offset + size] = codes[:, i, None].view(np.uint8)[chosen]


# The tensor engine's arithmetic -------------------------------------------------------------------


def operand_values(codes, fmt, half):
    """Values and void bits of operand codes, as the edge of the array converts them.

    Returns
    -------
    values : float64 array
        Exact; 0 where void.
    void : bool array or ``None``
        Elements that contribute nothing.
    """
    if half == Half.WHOLE:
        # A binary32 does not fit an operand; it is used as TF32.
        fmt = formats.TF32 if fmt is formats.FP32 else fmt
    if fmt is not formats.FP32:
        values = fmt.decode(codes)
        # The narrow formats have nothing below their high half.
        return values, np.ones(values.shape, bool) if half == Half.LO else None
    bits = np.ascontiguousarray(codes).view(np.uint32)
    high = (bits & np.uint32(0xFFFFF000)).view(np.float32)
    with np.errstate(all="ignore"):
        if half == Half.HI:
            # A NaN whose payload lies in the cleared bits is still a NaN.
            return np.where(np.isnan(codes), np.nan, high.astype(np.float64)), None
        low = codes.astype(np.float64) - high.astype(np.float64)
        void = ~np.isfinite(codes) | (low == 0)
    return np.where(void, 0.0, low), void


def fused_sums(stationary, moving, stationary_void=None, moving_void=None):
    """Binary32 sums ``[M, N]`` of operands ``[K, M]`` and ``[K, N]`` held in binary64.

    ``acc = RNE_fp32(acc + s[k] * m[k])`` from +0 in ascending ``k``, one rounding each. Void
    elements leave the sum as it is, bit for bit.

    The sum is formed in binary64 and rounded to binary32. Both terms, product and sum so far, have
    at most 24 significand bits, so the product is exact, and the second rounding is harmless:
    either the exact sum fits in 53 bits and is rounded once; or the smaller term is less than
    2**-28 of the larger one. Then the larger one is itself a binary32 number (or far beyond the
    largest), and the sum stays closer to it than a quarter of the distance of two binary32 numbers,
    where no midpoint can be mistaken.
    """
    k_count, m_count = stationary.shape
    n_count = moving.shape[1]
    sums = np.empty((m_count, n_count), np.float32)
    rows = range(k_count)
    with np.errstate(all="ignore"):
        for m0 in range(0, m_count, 64):
            for n0 in range(0, n_count, 256):
                s, m = stationary[:, m0 : m0 + 64], moving[:, n0 : n0 + 256]
                wide = np.zeros((s.shape[1], m.shape[1]))
                term = np.empty_like(wide)
                acc = np.zeros(wide.shape, np.float32)
                for k in rows:
                    np.multiply(s[k][:, None], m[k][None, :], out=term)
                    np.add(wide, term, out=term)
                    keep = _void_row(k, m0, n0, stationary_void, moving_void)
                    if keep is None:
                        np.copyto(acc, term, casting="same_kind")
                    else:
                        np.copyto(acc, term, casting="same_kind", where=~keep)
                    np.copyto(wide, acc)
                sums[m0 : m0 + 64, n0 : n0 + 256] = acc
    return canonical(sums)


def _void_row(k, m0, n0, stationary_void, moving_void):
    """Mask of a block's elements to which partition ``k`` contributes nothing, or ``None``."""
    s = None if stationary_void is None else stationary_void[k, m0 : m0 + 64]
    m = None if moving_void is None else moving_void[k, n0 : n0 + 256]
    if s is not None and s.any():
        return s[:, None] if m is None or not m.any() else s[:, None] | m[None, :]
    return None if m is None or not m.any() else m[None, :]


def canonical(values):
    """Make every NaN of a binary32 array the canonical one, in place."""
    bits = values.view(np.uint32)
    bits[np.isnan(values)] = formats.CANONICAL_NAN
    return values


# Conversions --------------------------------------------------------------------------------------


def nan_code(fmt):
    """The canonical NaN of a floating-point format, without its sign."""
    exponent = (1 << fmt.exp) - 1 << fmt.man
    code = exponent | ((1 << fmt.man) - 1 if fmt.finite else 1 << fmt.man - 1)
    return code << 13 if fmt.name == "tf32" else code


def cast_in(codes, fmt):
    """Codes of a format as bits of binary32 (uint32), as an engine's lanes see them.

    A NaN becomes the canonical one and keeps its sign.
    """
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(fmt.decode(codes).astype(np.float32))
    bits = values.view(np.uint32)
    return np.where(np.isnan(values), bits & _SIGN | np.uint32(formats.CANONICAL_NAN), bits)


def cast_out(bits, fmt, saturate):
    """Bits of binary32 as codes of a format. A NaN becomes its canonical one, with its sign."""
    with np.errstate(invalid="ignore"):  # of NaNs that signal
        values = np.ascontiguousarray(bits).view(np.float32).astype(np.float64)
    out = np.ascontiguousarray(fmt.encode(values, saturate=bool(saturate)))
    nan = np.isnan(values)
    if fmt.is_float and nan.any():
        raw = out.view(_element_type(fmt.bytes))
        code = np.where(bits & _SIGN, 1 << fmt.bits - 1, 0) | nan_code(fmt)
        raw[nan] = code[nan].astype(raw.dtype)
    return out


def convert(codes, src, dst, saturate):
    """Codes in format ``dst`` of codes in format ``src``, as :class:`TensorCopy` defines it."""
    return codes if src is dst else cast_out(cast_in(codes, src), dst, saturate)


# The core -----------------------------------------------------------------------------------------

EXECUTORS = {}
"""What each instruction class does: ``f(core, instruction)``."""


def executes(cls):
    """Register the function that gives instruction ``cls`` its meaning."""

    def register(function):
        if cls in EXECUTORS:
            raise TypeError(f"{cls.__name__} already has a meaning")
        EXECUTORS[cls] = function
        return function

    return register


@dataclass
class _Queue:
    engine: Engine
    pc: int
    left: int
    issued: int = 0
    instruction: object = None


@dataclass
class _Job:
    """Descriptors handed to one DMA engine's queue."""

    engine: int
    pc: int
    count: int
    update: object


class GoldenCore:
    """A NeuronCore without cycles.

    Parameters
    ----------
    config : :class:`~..rtl.arch.config.CoreConfig`
    hbm_bytes : :class:`int`, bytes
    shuffle : :class:`int` or ``None``
        Seed of a random order between queues and DMA queues; ``None`` takes them in turn.
    fill : :class:`int`
        Byte that SBUF and PSUM hold at first. 0xFF is NaN in most formats: a program that reads
        what it never wrote shows it.

    Attributes
    ----------
    hbm : uint8 array
    sbuf, psum : uint8 arrays ``[partitions, bytes]``
    semaphores : list of int
    counters : dict
        The counts of :data:`~..rtl.arch.events.COUNTERS` that need no clock.
    """

    def __init__(self, config, hbm_bytes, *, shuffle=None, fill=0):
        self.config = config
        self.hbm = np.zeros(hbm_bytes, np.uint8)
        self._sbuf = _Memory(
            config.partitions, config.sbuf_bytes, config.sbuf_partition_stride, fill
        )
        self._psum = _Memory(config.partitions, config.psum_bytes, config.psum_bytes, fill)
        self.sbuf, self.psum = self._sbuf.bytes, self._psum.bytes
        self.shuffle = shuffle
        self.semaphores = [0] * config.semaphores
        self.counters = {}
        self.reset()

    def reset(self):
        """Forget work and weights; memories keep their contents."""
        self.semaphores[:] = [0] * self.config.semaphores
        # Weights of the array: values, void bits (None: none), rows in use
        self._shadow = self._weights = None
        self._jobs = {}
        self._queues = []

    def memory(self, space):
        """SBUF or PSUM."""
        return self._sbuf if space == Space.SBUF else self._psum

    def count(self, name, amount=1):
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + int(amount)

    # Running --------------------------------------------------------------------------------------

    def run(self, queues, *, clear_semaphores=True, progress=None):
        """Run instruction queues to their end.

        Parameters
        ----------
        queues : dict of :class:`Engine` to (HBM address of the first instruction, count)
        clear_semaphores : :class:`bool`
            Start with every semaphore at 0.
        progress : callable or ``None``
            Called with (instructions issued, instructions in all) now and then.

        Returns
        -------
        dict
            Counters of this run.

        Raises
        ------
        :exc:`GoldenError`
            With the hardware's error code. Memories keep what was written before.
        :exc:`GoldenDeadlock`
            If queues wait for semaphores that nobody will change.
        """
        if clear_semaphores:
            self.semaphores[:] = [0] * self.config.semaphores
        self.counters = {}
        self._jobs = {}
        self._queues = [
            _Queue(Engine(engine), base, count) for engine, (base, count) in queues.items()
        ]
        self._queues.sort(key=lambda queue: queue.engine)
        total = sum(queue.left for queue in self._queues)
        rng = None if self.shuffle is None else np.random.default_rng(self.shuffle)
        steps = 0
        while True:
            moved = False
            agents = [self._step_queue] * len(self._queues) + [self._step_dma] * len(self._jobs)
            keys = [*self._queues, *self._jobs]
            order = range(len(keys)) if rng is None else rng.permutation(len(keys))
            for i in order:
                if agents[i](keys[i]):
                    moved = True
                    if rng is not None:
                        break
            steps += 1
            if progress is not None and steps % 16 == 0:
                progress(sum(queue.issued for queue in self._queues), total)
            if not moved:
                break
        blocked = [queue for queue in self._queues if queue.left]
        if blocked:
            raise GoldenDeadlock([self._blocked(queue) for queue in blocked])
        if progress is not None:
            progress(total, total)
        return self.counters

    def _fail(self, code, source, *, field=0, pc=0, address=0):
        raise GoldenError(code, source=source, field=field, pc=pc, address=address)

    def _step_queue(self, queue):
        """Issue the head of a queue if its waits hold; say whether it moved."""
        if not queue.left:
            return False
        if queue.instruction is None:
            if queue.pc % WORD_BYTES or queue.pc + WORD_BYTES > len(self.hbm):
                pc = queue.pc % (1 << WINDOW_LOG2)
                self._fail(ErrorCode.BUS_FETCH, int(queue.engine), pc=pc, address=pc)
            word = self.hbm[queue.pc : queue.pc + WORD_BYTES].tobytes()
            self.count("fetch_bytes", WORD_BYTES)
            try:
                queue.instruction = check_word(word, queue.engine, self.config)
            except _Illegal as error:
                self._fail(error.code, int(queue.engine), field=error.field, pc=queue.pc)
        if self._failing_wait(queue.instruction) is not None:
            return False
        instruction = queue.instruction
        # A count of zero anywhere makes the instruction a no-op that completes.
        if all(
            instruction.values[n].elements and instruction.values[n].num_partitions
            for n, _, _ in instruction.operands
        ):
            EXECUTORS[type(instruction)](self, instruction)
        if type(instruction) is not DmaStart:
            # An engine that completes an instruction no longer knows its address.
            pc = queue.pc if type(instruction) is EventSemaphore else 0
            self._apply(instruction.update, int(queue.engine), pc)
        self.count(f"queue_{queue.engine.name.lower()}_issued")
        queue.issued += 1
        queue.left -= 1
        queue.pc += WORD_BYTES
        queue.instruction = None
        return True

    def _failing_wait(self, instruction):
        for i, wait in enumerate(instruction.waits):
            if wait.mode == WaitMode.NONE:
                continue
            seen = self.semaphores[wait.semaphore]
            if not (seen >= wait.value if wait.mode == WaitMode.GE else seen == wait.value):
                return i
        return None

    def _blocked(self, queue):
        i = self._failing_wait(queue.instruction)
        assert i is not None, "something blocks the queue"
        wait = queue.instruction.waits[i]
        return Blocked(
            queue.engine, queue.pc, queue.issued, i, wait.mode, wait.semaphore, wait.value,
            self.semaphores[wait.semaphore], str(queue.instruction),
        )  # fmt: skip

    def _apply(self, update, source, pc):
        if update.mode == UpdateMode.SET:
            self.semaphores[update.semaphore] = update.value
        elif update.mode == UpdateMode.ADD:
            value = self.semaphores[update.semaphore] + update.value
            if value >= SEMAPHORE_LIMIT:
                self._fail(
                    ErrorCode.SEMAPHORE_OVERFLOW, source,
                    field=_HEADER_BIT["update_semaphore"], pc=pc, address=update.semaphore,
                )  # fmt: skip
            self.semaphores[update.semaphore] = value

    # DMA ------------------------------------------------------------------------------------------

    def start_dma(self, instruction):
        """Hand descriptors to DMA queues."""
        for i in range(instruction.engines_used):
            engine = instruction.first + i
            table = instruction.table + i * instruction.count * DESCRIPTOR_BYTES
            job = _Job(engine, table, instruction.count, instruction.update)
            self._jobs.setdefault((engine, instruction.queue), deque()).append(job)

    def _step_dma(self, key):
        """Execute one descriptor of a DMA queue; say whether there was one."""
        jobs = self._jobs[key]
        if not jobs:
            return False
        job = jobs[0]
        source = 16 + job.engine
        if job.count:
            pc = job.pc
            if pc + DESCRIPTOR_BYTES > len(self.hbm):
                self._fail(ErrorCode.BUS_READ, source, pc=pc, address=pc)
            self.count("dma_descriptor_bytes", DESCRIPTOR_BYTES)
            raw = self.hbm[pc : pc + DESCRIPTOR_BYTES].tobytes()
            try:
                descriptor = check_descriptor(raw, self.config)
            except _Illegal as error:
                self._fail(error.code, source, field=error.field, pc=pc, address=pc)
            self._copy(descriptor, source, pc)
            job.pc += DESCRIPTOR_BYTES
            job.count -= 1
        if not job.count:
            jobs.popleft()
            self._apply(job.update, source, 0)
        return True

    def _copy(self, descriptor, source, pc):
        size = 1 << descriptor.size_log2
        elements = descriptor.src.elements
        if not elements:
            return
        sides = (
            (descriptor.src, ErrorCode.BUS_READ, "dma_read_bytes"),
            (descriptor.dst, ErrorCode.BUS_WRITE, "dma_write_bytes"),
        )
        for side, code, counter in sides:
            if side.address >> WINDOW_LOG2 == HBM_WINDOW:
                if _reach(side)[1] + size > len(self.hbm):
                    # Bursts do not cross the end of HBM: the refused one begins there, or with
                    # the bus word in which a run of bytes begins.
                    first = _first_beyond(side, size, len(self.hbm)) // BUS_WORD_BYTES
                    address = max(first * BUS_WORD_BYTES, len(self.hbm))
                    self._fail(code, source, pc=pc, address=address)
                self.count(counter, elements * size)
        data = self._gather(descriptor.src, size)
        self._scatter(descriptor.dst, size, data)

    def _window(self, side):
        """Memory of a side and its base address within it."""
        if side.address >> WINDOW_LOG2 == HBM_WINDOW:
            return self.hbm, side.address
        return self._sbuf.raw, side.address & (1 << WINDOW_LOG2) - 1

    def _side_view(self, side, size):
        memory, base = self._window(side)
        dims = side.dims[::-1]
        shape, strides = tuple(c for _, c in dims), tuple(s for s, _ in dims)
        return np.ndarray(shape, _element_type(size), memory, base, strides)

    def _gather(self, side, size):
        return np.array(self._side_view(side, size), order="C").reshape(-1)

    def _scatter(self, side, size, data):
        if _ordered(side.dims, size):
            view = self._side_view(side, size)
            view[...] = data.reshape(view.shape)
        else:
            memory, _ = self._window(side)
            within = (1 << WINDOW_LOG2) - 1
            for address, element in zip(side.addresses(size) & within, data, strict=True):
                memory[address : address + size] = element.reshape(1).view(np.uint8)


# Instructions -------------------------------------------------------------------------------------


@executes(EventSemaphore)
def _event_semaphore(core, instruction):
    """Waits and update are everything there is."""


@executes(LoadStationary)
def _load_stationary(core, instruction):
    src = instruction.src
    codes = core.memory(src.space).read(src)
    values, void = operand_values(codes, src.dtype, Half(instruction.half))
    core._shadow = (src.start_partition, values, void)


@executes(MatmulMoving)
def _matmul_moving(core, instruction):
    dst, src = instruction.dst, instruction.src
    if core._shadow is not None:
        core._weights, core._shadow = core._shadow, None
    moving, moving_void = operand_values(
        core.memory(src.space).read(src), src.dtype, Half(instruction.half)
    )
    m_count, n_count = dst.num_partitions, dst.elements
    core.count("pe_columns", n_count)
    core.count("pe_passes", n_count * src.num_partitions * m_count)
    sums = np.zeros((m_count, n_count), np.float32)
    if core._weights is not None:
        start, weights, weights_void = core._weights
        # Only rows that have both a weight and a moving element contribute.
        first = max(start, src.start_partition)
        last = min(start + len(weights), src.start_partition + len(moving))
        if first < last:
            width = min(m_count, weights.shape[1])
            rows = slice(first - start, last - start)
            move = slice(first - src.start_partition, last - src.start_partition)
            sums[:width] = fused_sums(
                weights[rows, :width],
                moving[move],
                None if weights_void is None else weights_void[rows, :width],
                None if moving_void is None else moving_void[move],
            )
    psum = core.memory(dst.space)
    if instruction.accumulate:
        with np.errstate(all="ignore"):
            sums = canonical(psum.read(dst) + sums)
    psum.write(dst, sums)


@executes(TensorCopy)
def _tensor_copy(core, instruction):
    dst, src = instruction.dst, instruction.src
    codes = core.memory(src.space).read(src)
    core.count("dve_elements", src.elements)
    out = convert(codes, src.dtype, dst.dtype, instruction.saturate)
    core.memory(dst.space).write(dst, out)


def _operand_bits(core, ap, bitwise):
    """Elements of an operand as uint32 ``[partitions, elements]``: binary32, or as they are."""
    codes = core.memory(ap.space).read(ap)
    if bitwise:
        return codes.view(_element_type(ap.dtype.bytes)).astype(np.uint32)
    return cast_in(codes, ap.dtype)


def _scalar_bits(core, instruction, name, like):
    """A scalar as bits that broadcast to the elements of the source ``like``."""
    value = getattr(instruction, name)
    if not getattr(instruction, f"{name}_pointer"):
        return np.uint32(value)
    ap = AccessPattern(formats.FP32, like.start_partition, like.num_partitions, value, ((0, 1),))
    return core.memory(Space.SBUF).read(ap).view(np.uint32)


def _store_bits(core, instruction, bits, bitwise):
    """Write results to ``dst``: cast from binary32, or their low bits."""
    dst = instruction.dst
    if bitwise:
        kind = _element_type(dst.dtype.bytes)
        core.memory(dst.space).write(dst, bits.astype(kind))
    else:
        core.memory(dst.space).write(dst, cast_out(bits, dst.dtype, instruction.saturate))


def _are_bits(*ops):
    return any(AluOp(op) in BITWISE_OPS for op in ops)


def _ordered_operands(first, second, reverse):
    return (second, first) if reverse else (first, second)


@executes(TensorTensor)
def _tensor_tensor(core, instruction):
    bitwise = _are_bits(instruction.op)
    a = _operand_bits(core, instruction.src0, bitwise)
    b = _operand_bits(core, instruction.src1, bitwise)
    core.count("dve_elements", instruction.dst.elements)
    _store_bits(core, instruction, operate(instruction.op, a, b), bitwise)


@executes(TensorScalar)
def _tensor_scalar(core, instruction):
    src = instruction.src
    bitwise = _are_bits(instruction.op0, instruction.op1)
    bits = _operand_bits(core, src, bitwise)
    for i in range(2):
        scalar = _scalar_bits(core, instruction, f"scalar{i}", src)
        reverse = getattr(instruction, f"reverse{i}")
        bits = operate(getattr(instruction, f"op{i}"), *_ordered_operands(bits, scalar, reverse))
    core.count("dve_elements", src.elements)
    _store_bits(core, instruction, bits, bitwise)


@executes(ScalarTensorTensor)
def _scalar_tensor_tensor(core, instruction):
    src0 = instruction.src0
    bitwise = _are_bits(instruction.op0, instruction.op1)
    a = _operand_bits(core, src0, bitwise)
    b = _operand_bits(core, instruction.src1, bitwise)
    scalar = _scalar_bits(core, instruction, "scalar0", src0)
    a = operate(instruction.op0, *_ordered_operands(a, scalar, instruction.reverse0))
    a = operate(instruction.op1, *_ordered_operands(a, b, instruction.reverse1))
    core.count("dve_elements", src0.elements)
    _store_bits(core, instruction, a, bitwise)


@executes(TensorReduce)
def _tensor_reduce(core, instruction):
    src = instruction.src
    bitwise = _are_bits(instruction.op)
    bits = _operand_bits(core, src, bitwise)
    row = math.prod(count for _, count in src.dims[: instruction.inner + 1])
    result = reduce_rows(instruction.op, bits.reshape(len(bits), -1, row))
    if instruction.negate:
        result = result ^ np.uint32(1 << 31)
    core.count("dve_elements", src.elements)
    _store_bits(core, instruction, result, bitwise)


@executes(TensorTensorScan)
def _tensor_tensor_scan(core, instruction):
    src0 = instruction.src0
    bitwise = _are_bits(instruction.op0, instruction.op1)
    a = _operand_bits(core, src0, bitwise)
    b = _operand_bits(core, instruction.src1, bitwise)
    last = np.broadcast_to(_scalar_bits(core, instruction, "initial", src0), (len(a), 1))[:, 0]
    out = np.empty_like(a)
    for i in range(a.shape[1]):
        last = operate(instruction.op0, *_ordered_operands(a[:, i], last, instruction.reverse0))
        last = operate(instruction.op1, *_ordered_operands(last, b[:, i], instruction.reverse1))
        out[:, i] = last
    core.count("dve_elements", src0.elements)
    _store_bits(core, instruction, out, bitwise)


@executes(CopyPredicated)
def _copy_predicated(core, instruction):
    dst, src = instruction.dst, instruction.src
    new = convert(core.memory(src.space).read(src), src.dtype, dst.dtype, instruction.saturate)
    wanted = _operand_bits(core, instruction.predicate, bitwise=True) != 0
    if instruction.reverse:
        wanted = ~wanted
    core.count("dve_elements", src.elements)
    core.memory(dst.space).write(dst, new, wanted)


def _order(bits):
    """Binary32 numbers as unsigned ones in the order of IEEE 754's totalOrder."""
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


@executes(Max8)
def _max8(core, instruction):
    src = instruction.src
    bits = _operand_bits(core, src, bitwise=False)
    places = np.argsort(~_order(bits), axis=1, kind="stable")[:, :EIGHT]
    result = np.full((len(bits), EIGHT), 0xFFFFFFFF, np.uint32)
    result[:, : places.shape[1]] = np.take_along_axis(bits, places, axis=1)
    core.count("dve_elements", src.elements + EIGHT)
    _store_bits(core, instruction, result, bitwise=False)


def _find8(core, instruction):
    """Where the eight values are, ``[partitions, 8]``: -1 where they are not; and the elements."""
    bits = _operand_bits(core, instruction.src, bitwise=False)
    values = _operand_bits(core, instruction.vals, bitwise=False)
    found = np.full(values.shape, -1)
    for row, (elements, wanted) in enumerate(zip(bits, values, strict=True)):
        for value in np.unique(wanted):
            places = np.flatnonzero(elements == value)
            slots = np.flatnonzero(wanted == value)[: len(places)]
            found[row, slots] = places[: len(slots)]
    return found, bits


@executes(FindIndex8)
def _find_index8(core, instruction):
    found, _ = _find8(core, instruction)
    core.count("dve_elements", instruction.src.elements + 2 * EIGHT)
    _store_bits(core, instruction, found.astype(np.uint32), bitwise=True)


@executes(MatchReplace8)
def _match_replace8(core, instruction):
    found, bits = _find8(core, instruction)
    bits = bits.copy()
    rows, slots = np.nonzero(found >= 0)
    bits[rows, found[rows, slots]] = instruction.value
    core.count("dve_elements", instruction.src.elements + EIGHT)
    _store_bits(core, instruction, bits, bitwise=False)


@executes(Activation)
def _activation(core, instruction):
    src = instruction.src
    factors = [
        _operand_bits(core, src, bitwise=False),
        *(_scalar_bits(core, instruction, name, src) for name in ("scale", "bias")),
    ]
    argument = fma32(*(bits.view(np.float32) for bits in factors))
    result = evaluate(instruction.function, argument, np.uint32(instruction.alpha))
    core.count("act_elements", src.elements)
    _store_bits(core, instruction, result.view(np.uint32), bitwise=False)


def _affine(instruction):
    """The affine function of the place as int32 ``[partitions, elements]``."""
    dst = instruction.dst
    value = np.array([instruction.offset], np.uint32)
    for i, (_, count) in enumerate(dst.dims):
        step = np.arange(count, dtype=np.uint32) * np.uint32(getattr(instruction, f"step{i}"))
        value = (step[:, None] + value[None, :]).reshape(-1)
    rows = np.arange(dst.num_partitions, dtype=np.uint32)
    shares = rows * np.uint32(instruction.channel_multiplier)
    return (shares[:, None] + value[None, :]).view(np.int32)


@executes(Iota)
def _iota(core, instruction):
    dst = instruction.dst
    values = _affine(instruction)
    if dst.dtype not in (formats.INT32, formats.UINT32):
        values = convert(values, formats.INT32, dst.dtype, instruction.saturate)
    core.count("pool_elements", dst.elements)
    core.memory(dst.space).write(dst, values)


@executes(Rng)
def _rng(core, instruction):
    dst = instruction.dst
    seed = _scalar_bits(core, instruction, "seed", dst)
    words = mix(_affine(instruction).view(np.uint32), seed)
    core.count("pool_elements", dst.elements)
    if dst.dtype is formats.FP32:
        core.memory(dst.space).write(dst, fraction(words))
    else:
        _store_bits(core, instruction, words, bitwise=True)


@executes(AffineSelect)
def _affine_select(core, instruction):
    dst, src = instruction.dst, instruction.src
    kept = convert(core.memory(src.space).read(src), src.dtype, dst.dtype, instruction.saturate)
    other = cast_out(np.array([instruction.value], np.uint32), dst.dtype, instruction.saturate)
    kind = _element_type(dst.dtype.bytes)
    holds = compare_with_zero(instruction.compare, _affine(instruction))
    core.count("pool_elements", dst.elements)
    core.memory(dst.space).write(dst, np.where(holds, kept.view(kind), other.view(kind)))


def _integers(core, ap):
    """Elements of an integer operand, extended to 32 bits by their sign or by zeros."""
    return core.memory(ap.space).read(ap).astype(np.int64).astype(np.uint32)


@executes(IntegerTensorTensor)
def _integer_tensor_tensor(core, instruction):
    a, b = (_integers(core, ap) for ap in (instruction.src0, instruction.src1))
    core.count("pool_elements", instruction.dst.elements)
    result = operate_integers(instruction.op, a, b, signed=instruction.src0.dtype.signed)
    _store_bits(core, instruction, result, bitwise=True)


@executes(IntegerTensorScalar)
def _integer_tensor_scalar(core, instruction):
    src = instruction.src
    bits = _integers(core, src)
    for i in range(2):
        scalar = _scalar_bits(core, instruction, f"scalar{i}", src)
        operands = _ordered_operands(bits, scalar, getattr(instruction, f"reverse{i}"))
        bits = operate_integers(getattr(instruction, f"op{i}"), *operands, signed=src.dtype.signed)
    core.count("pool_elements", src.elements)
    _store_bits(core, instruction, bits, bitwise=True)


@executes(Memset)
def _memset(core, instruction):
    dst = instruction.dst
    core.count("dve_elements", dst.elements)
    kind = _element_type(dst.dtype.bytes)
    code = instruction.value & (1 << dst.dtype.bits) - 1
    core.memory(dst.space).write(dst, np.full((dst.num_partitions, dst.elements), code, kind))


@executes(DmaStart)
def _dma_start(core, instruction):
    core.start_dma(instruction)
