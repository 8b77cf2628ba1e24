"""Instructions, their dependences, and the semaphores that enforce them.

The trace is lowered to instructions in trace order. Each belongs to an in-order queue and to a
*stream*: a set of instructions that complete in order (weight loads, matmuls, the instructions of
one of the other engines) or, for DMA transfers, in any order. What each byte of memory was last
written and read by gives the dependences. A dependence becomes a wait unless the queue knows
already that it holds: from a wait before, or from what the instruction it waited for had itself
waited for.

Because every wait looks back in trace order, no program can deadlock.
"""

from bisect import bisect_left
from itertools import pairwise

from ...rtl.arch import formats
from ...rtl.arch.isa import DmaStart, Engine, Half, LoadStationary, MatmulMoving
from ..nki.tensor import PARTITION, KernelError, byte_runs
from ..nki.trace import DMA, MATMUL, ZERO

__all__ = ["Instr", "Semaphores", "insert_waits", "lower_trace", "regions"]

# Streams; each in-order one has the semaphore of the same number.
LS, MM, DVE, ACT, POOL = range(5)
FIRST_SLOT = 5
LOAD, STORE = 10, 11
STREAMS = {Engine.DVE: DVE, Engine.ACT: ACT, Engine.POOL: POOL}
"""Streams of the engines that have just one."""
SLOTS = 64
"""Most semaphores per DMA queue; transfers take them in turn."""

CHIP_RUNS = 64
HBM_RUNS = 8192


class Semaphores:
    """Which semaphore means what.

    ``0..4`` count completions of weight loads, matmuls, vector, scalar and GpSimd instructions;
    then come the slots of the load queue and those of the store queue.
    """

    def __init__(self, config):
        self.slots = min(SLOTS, (config.semaphores - FIRST_SLOT) // 2)
        self.count = FIRST_SLOT + 2 * self.slots

    def slot(self, stream, number):
        """Semaphore of the ``number``-th transfer of a DMA stream."""
        return FIRST_SLOT + (self.slots if stream == STORE else 0) + number % self.slots


class Region:
    """Bytes of one memory: the same intervals in a range of partitions."""

    __slots__ = ("cells", "first", "last", "memory", "runs")

    def __init__(self, memory, first, last, runs):
        self.memory = memory
        self.first = first
        self.last = last
        self.runs = runs
        self.cells = ()


class Instr:
    """One instruction before encoding.

    Attributes
    ----------
    cls : subclass of :class:`~..rtl.arch.isa.Instruction`
    dst : access, view or ``None``
        What it writes.
    sources : tuple of accesses or views
        What it reads: operands in order, then scalars.
    fields : dict
        Fields by name; an access stands for its offset in SBUF.
    reads, writes : tuple of :class:`Region`
    waits : tuple of ``(semaphore, value)``
    plan : :class:`~.transfer.Plan` or ``None``
        Of a transfer.
    """

    __slots__ = (
        "cls", "dst", "engine", "fields", "location", "plan", "reads", "sources", "stream",
        "waits", "writes",
    )  # fmt: skip

    def __init__(self, cls, engine, stream, location, dst, sources, fields):
        self.cls = cls
        self.engine = engine
        self.stream = stream
        self.location = location
        self.dst = dst
        self.sources = sources
        self.fields = fields
        self.reads = ()
        self.writes = ()
        self.waits = ()
        self.plan = None

    @property
    def operands(self):
        """Access patterns, in the order in which the instruction declares them."""
        operands = self.sources if self.dst is None else (self.dst, *self.sources)
        return operands[: len(self.cls.operands)]


_LOAD = {half: {"half": half} for half in Half}
_MATMUL = {
    (half, accumulate): {"half": half, "accumulate": accumulate}
    for half in Half
    for accumulate in (False, True)
}


def lower_trace(trace):
    """Instructions of a trace, in trace order, without waits.

    A matmul loads its weights unless the array still holds them; FP32 makes four passes.
    """
    out = []
    held = None  # key of the weights in the array
    held_ops = None
    writes = {}  # tile index -> number of writes so far
    fp32 = formats.FP32
    last_stationary = None
    for op in trace.ops:
        kind, location = op.kind, op.location
        if kind is MATMUL or kind is ZERO:
            (s, m), d, accumulate = op.sources, op.dst, op.fields["accumulate"]
            if s.dtype is fp32 or m.dtype is fp32:
                s_halves = (Half.LO, Half.HI) if s.dtype is fp32 else (Half.WHOLE,)
                m_halves = (Half.LO, Half.HI) if m.dtype is fp32 else (Half.WHOLE,)
                for sh in s_halves:
                    out.append(_load(location, s, sh))
                    for mh in m_halves:
                        out.append(_matmul(location, d, m, mh, accumulate))
                        accumulate = True
                held = last_stationary = None
                continue
            version = writes.get(s.storage.index, 0)
            if s is not last_stationary or version != held_ops:
                key = s.key
                if key != held or version != held_ops:
                    out.append(_load(location, s, Half.WHOLE))
                    held, held_ops = key, version
                last_stationary = s
            out.append(_matmul(location, d, m, Half.WHOLE, accumulate))
            continue
        dst, sources = op.dst, op.sources
        if kind is DMA:
            store = dst.storage.buffer == "hbm" and sources[0].storage.buffer == "sbuf"
            engine, stream = (Engine.ACT, STORE) if store else (Engine.SP, LOAD)
            out.append(Instr(DmaStart, engine, stream, location, dst, sources, None))
        else:
            engine = kind.engines[0]
            out.append(Instr(kind, engine, STREAMS[engine], location, dst, sources, op.fields))
        writes[dst.storage.index] = writes.get(dst.storage.index, 0) + 1
    return out


def _load(location, tile, half):
    return Instr(LoadStationary, Engine.PE, LS, location, None, (tile,), _LOAD[half])


def _matmul(location, dst, moving, half, accumulate):
    fields = _MATMUL[half, accumulate]
    return Instr(MatmulMoving, Engine.PE, MM, location, dst, (moving,), fields)


def lifetimes(trace):
    """Set the first and last use of every tensor, as positions in the trace."""
    for storage in trace.storages:
        storage.span = None
    for position, op in enumerate(trace.ops):
        for operand in (op.dst, *op.sources):
            storage = operand.storage
            span = storage.span
            storage.span = (position, position) if span is None else (span[0], position)


# Regions ------------------------------------------------------------------------------------------


def _chip_region(access, cache):
    key = access.key
    found = cache.get(key)
    if found is None:
        size, storage = access.dtype.bytes, access.storage
        dims = [(step * size, count) for step, count in access.dims]
        runs = byte_runs(storage.address + access.offset, dims, size, CHIP_RUNS)
        found = Region(storage.buffer, access.start, access.start + access.count, runs)
        cache[key] = found
    return found


def _view_region(view):
    """Region of a DMA operand, which may be any view."""
    storage, size = view.storage, view.dtype.bytes
    if storage.buffer == "hbm":
        dims = list(zip(view.steps, view.shape, strict=True))
        return Region(storage.index, 0, 1, byte_runs(view.offset, dims, size, HBM_RUNS))
    part, offset = divmod(view.offset, PARTITION)
    last, dims = part, []
    for step, count in zip(view.steps, view.shape, strict=True):
        up, within = divmod(step + PARTITION // 2, PARTITION)
        last += up * (count - 1)
        if within != PARTITION // 2:
            dims.append((within - PARTITION // 2, count))
    runs = byte_runs(storage.address + offset, dims, size, CHIP_RUNS)
    return Region(storage.buffer, min(part, last), max(part, last) + 1, runs)


def regions(trace, instrs):
    """Fill ``reads`` and ``writes`` of every instruction, with regions cut into common cells.

    HBM tensors that are only read, or written piecewise without overlap, need no tracking.
    """
    cache = {}
    hbm = {}  # tensor index -> ([read regions], [write regions])
    everything = []
    for ins in instrs:
        if ins.cls is DmaStart:
            src, dst = _view_region(ins.sources[0]), _view_region(ins.dst)
            ins.reads, ins.writes = (src,), (dst,)
            if src.memory == dst.memory and _share_bytes(src, dst):
                raise _overlap_error(trace, ins)
            for region, which in ((src, 0), (dst, 1)):
                if isinstance(region.memory, int):
                    hbm.setdefault(region.memory, ([], []))[which].append(region)
                else:
                    everything.append(region)
            continue
        reads = ins.reads = tuple([_chip_region(source, cache) for source in ins.sources])
        if ins.dst is None:
            continue
        dst = _chip_region(ins.dst, cache)
        ins.writes = (dst,)
        # Element by element an operand may be replaced in place; scalars are read before all.
        storage, operands = ins.dst.storage, len(ins.cls.operands) - 1
        for source, src in zip(ins.sources[:operands], reads, strict=False):
            if source.storage is not storage or src is dst or not _share_bytes(src, dst):
                continue
            if not source.is_in_place_of(ins.dst):
                raise _overlap_error(trace, ins)
    everything += cache.values()
    for reads, writes in hbm.values():
        if writes and (reads or _overlapping(writes)):
            everything += reads + writes
        else:
            for region in reads + writes:
                region.runs = []
    borders = {}
    for region in everything:
        found = borders.setdefault(region.memory, set())
        for low, high in region.runs:
            found.add(low)
            found.add(high)
    sizes = {}
    for memory, found in borders.items():
        borders[memory] = sorted(found)
        sizes[memory] = len(found)
    for region in everything:
        edges = borders[region.memory]
        cells = []
        for low, high in region.runs:
            cells += range(bisect_left(edges, low), bisect_left(edges, high))
        region.cells = tuple(cells)
    return sizes


def _share_bytes(a, b):
    if a.last <= b.first or b.last <= a.first:
        return False
    return any(low < end and start < high for low, high in a.runs for start, end in b.runs)


def _overlap_error(trace, ins):
    return KernelError(
        f"within {ins.dst.storage}: source and destination overlap, so what is read may have "
        "been written; use the same elements in the same order, or another tile\n"
        f"  at {trace.where(ins.location)}"
    )


def _overlapping(writes):
    runs = sorted(run for region in writes for run in region.runs)
    return any(b[0] < a[1] for a, b in pairwise(runs))


# Waits --------------------------------------------------------------------------------------------


class _Cell:
    """History of one byte range: the last writers and the readers since, by partitions."""

    __slots__ = ("readers", "writers")

    def __init__(self):
        self.writers = []  # (first, last, instruction)
        self.readers = {}  # stream -> [(first, last, instruction)]


def insert_waits(instrs, sizes, semaphores):
    """Set the ``waits`` of every instruction: tuple of ``(semaphore, value)``.

    Every transfer must have its ``plan``. Values of the in-order semaphores 0..4 count the
    instructions that update them; returned is the set of instructions (by position) that do.
    """
    memories = {memory: [None] * size for memory, size in sizes.items()}
    zero: tuple[int, ...] = (0,) * semaphores.count
    know = dict.fromkeys(Engine, zero)
    issue_know = [zero] * len(instrs)
    coordinate, value = [0] * len(instrs), [0] * len(instrs)
    totals = [0] * semaphores.count
    transfers = {LOAD: 0, STORE: 0}
    reached = {}  # (coordinate, value) -> instruction
    waited = set()  # (coordinate, value) of in-order streams
    streams = [ins.stream for ins in instrs]

    for i, ins in enumerate(instrs):
        stream = ins.stream
        needs = {}
        dma = stream >= LOAD
        for region in ins.reads:
            if not region.cells:
                continue
            first, last = region.first, region.last
            memory = memories[region.memory]
            for c in region.cells:
                cell = memory[c]
                if cell is None:
                    cell = memory[c] = _Cell()
                for a, b, w in cell.writers:
                    if a < last and first < b and not (stream == MM == streams[w]):
                        at = coordinate[w]
                        if needs.get(at, 0) < value[w]:
                            needs[at] = value[w]
                readers = cell.readers.get(stream)
                if readers is None:
                    cell.readers[stream] = [(first, last, i)]
                elif dma:
                    readers.append((first, last, i))
                else:
                    cell.readers[stream] = [r for r in readers if r[0] < first or last < r[1]] + [
                        (first, last, i)
                    ]
        for region in ins.writes:
            if not region.cells:
                continue
            first, last = region.first, region.last
            memory = memories[region.memory]
            for c in region.cells:
                cell = memory[c]
                if cell is None:
                    cell = memory[c] = _Cell()
                for a, b, w in cell.writers:
                    if a < last and first < b and (dma or streams[w] != stream):
                        at = coordinate[w]
                        if needs.get(at, 0) < value[w]:
                            needs[at] = value[w]
                readers = cell.readers
                if readers:
                    for other, entries in list(readers.items()):
                        keep = []
                        for entry in entries:
                            a, b, r = entry
                            if a < last and first < b:
                                if r != i and (dma or other != stream):
                                    at = coordinate[r]
                                    if needs.get(at, 0) < value[r]:
                                        needs[at] = value[r]
                                if a < first or last < b:
                                    keep.append(entry)
                            else:
                                keep.append(entry)
                        if keep:
                            readers[other] = keep
                        else:
                            del readers[other]
                cell.writers = [w for w in cell.writers if w[0] < first or last < w[1]]
                cell.writers.append((first, last, i))

        if dma:
            at = semaphores.slot(stream, transfers[stream])
            transfers[stream] += 1
            if totals[at]:
                needs[at] = max(needs.get(at, 0), totals[at])
            totals[at] += len(ins.plan.engines)
        else:
            at = stream
            totals[at] += 1
        coordinate[i], value[i] = at, totals[at]
        reached[at, totals[at]] = i

        known = know[ins.engine]
        needs = {at: v for at, v in needs.items() if v > known[at]}
        if needs:
            if len(needs) > 1:
                implied = [issue_know[reached[need]] for need in needs.items()]
                needs = {
                    at: v
                    for n, (at, v) in enumerate(needs.items())
                    if not any(k[at] >= v for j, k in enumerate(implied) if j != n)
                }
            merged = known
            for need in needs.items():
                merged = map(max, merged, issue_know[reached[need]])
            merged = list(merged)
            for at, v in needs.items():
                if merged[at] < v:
                    merged[at] = v
                if at < FIRST_SLOT:
                    waited.add((at, v))
            know[ins.engine] = tuple(merged)
            ins.waits = tuple(needs.items())
        issue_know[i] = know[ins.engine]

    # Only instructions that somebody waits for update; count them.
    counts = [{} for _ in range(FIRST_SLOT)]
    for at, v in sorted(waited):
        counts[at][v] = len(counts[at]) + 1
    for ins in instrs:
        if ins.waits:
            ins.waits = tuple((at, counts[at][v] if at < FIRST_SLOT else v) for at, v in ins.waits)
    return {reached[need] for need in waited}, [
        (coordinate[i] if ins.stream >= LOAD else None) for i, ins in enumerate(instrs)
    ]
