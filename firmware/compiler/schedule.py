"""Instructions, their dependences, and the semaphores that enforce them.

The trace is lowered to instructions in trace order. Each belongs to an in-order queue and to a
*stream*: a set of instructions that complete in order (weight loads, matmuls, vector instructions)
or, for DMA transfers, in any order. What each byte of memory was last written and read by gives the
dependences. A dependence becomes a wait unless the queue knows already that it holds: from a wait
before, or from what the instruction it waited for had itself waited for.

Because every wait looks back in trace order, no program can deadlock.
"""

from bisect import bisect_left
from itertools import pairwise

from ...rtl.arch import formats
from ...rtl.arch.isa import Engine, Half
from ..nki.tensor import PARTITION, KernelError, byte_runs
from ..nki.trace import COPY, DMA, MATMUL, MEMSET, ZERO

__all__ = ["Instr", "Semaphores", "insert_waits", "lower_trace", "regions"]

# Streams; each in-order one has the semaphore of the same number.
LS, MM, DVE, ACT, POOL = range(5)
FIRST_SLOT = 5
LOAD, STORE = 10, 11
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
    """One instruction before encoding."""

    __slots__ = (
        "dst", "engine", "engines_used", "flag", "half", "kind", "location", "reads", "src",
        "stream", "waits", "writes",
    )  # fmt: skip

    def __init__(self, kind, engine, stream, location, dst, src, half=0, flag=0):
        self.kind = kind
        self.engine = engine
        self.stream = stream
        self.location = location
        self.dst = dst
        self.src = src
        self.half = half
        self.flag = flag
        self.reads = ()
        self.writes = ()
        self.waits = ()
        self.engines_used = 0


LOADSTATIONARY, MATMULMOVING, TENSORCOPY, MEMSET_, DMASTART = "ls", "mm", "copy", "memset", "dma"


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
        if kind in (MATMUL, ZERO):
            s, m, d, accumulate = op.src, op.moving, op.dst, op.value
            if s.dtype is fp32 or m.dtype is fp32:
                s_halves = (Half.LO, Half.HI) if s.dtype is fp32 else (Half.WHOLE,)
                m_halves = (Half.LO, Half.HI) if m.dtype is fp32 else (Half.WHOLE,)
                for sh in s_halves:
                    out.append(Instr(LOADSTATIONARY, Engine.PE, LS, location, None, s, sh))
                    for mh in m_halves:
                        out.append(
                            Instr(MATMULMOVING, Engine.PE, MM, location, d, m, mh, accumulate)
                        )
                        accumulate = True
                held = last_stationary = None
                continue
            version = writes.get(s.storage.index, 0)
            if s is not last_stationary or version != held_ops:
                key = s.key
                if key != held or version != held_ops:
                    out.append(Instr(LOADSTATIONARY, Engine.PE, LS, location, None, s))
                    held, held_ops = key, version
                last_stationary = s
            out.append(Instr(MATMULMOVING, Engine.PE, MM, location, d, m, 0, accumulate))
        elif kind == COPY:
            out.append(Instr(TENSORCOPY, Engine.DVE, DVE, location, op.dst, op.src, 0, op.value))
            writes[op.dst.storage.index] = writes.get(op.dst.storage.index, 0) + 1
        elif kind == MEMSET:
            out.append(Instr(MEMSET_, Engine.DVE, DVE, location, op.dst, None, 0, op.value))
            writes[op.dst.storage.index] = writes.get(op.dst.storage.index, 0) + 1
        elif kind == DMA:
            store = op.dst.storage.buffer == "hbm" and op.src.storage.buffer == "sbuf"
            engine, stream = (Engine.ACT, STORE) if store else (Engine.SP, LOAD)
            out.append(Instr(DMASTART, engine, stream, location, op.dst, op.src))
            writes[op.dst.storage.index] = writes.get(op.dst.storage.index, 0) + 1
    return out


def lifetimes(trace):
    """Set the first and last use of every tensor, as positions in the trace."""
    for storage in trace.storages:
        storage.span = None
    for position, op in enumerate(trace.ops):
        for operand in (op.dst, op.src, op.moving):
            if operand is None:
                continue
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
        kind = ins.kind
        if kind == DMASTART:
            src, dst = _view_region(ins.src), _view_region(ins.dst)
            ins.reads, ins.writes = (src,), (dst,)
            if src.memory == dst.memory and _share_bytes(src, dst):
                raise _overlap_error(trace, ins)
            for region, which in ((src, 0), (dst, 1)):
                if isinstance(region.memory, int):
                    hbm.setdefault(region.memory, ([], []))[which].append(region)
                else:
                    everything.append(region)
            continue
        within = kind == TENSORCOPY and ins.src.storage is ins.dst.storage
        if ins.src is not None:
            ins.reads = (_chip_region(ins.src, cache),)
        if ins.dst is not None:
            ins.writes = (_chip_region(ins.dst, cache),)
        if within:
            (src,), (dst,) = ins.reads, ins.writes
            if src is not dst and _share_bytes(src, dst):
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
        f"copy within {ins.dst.storage}: source and destination overlap, so what is read may have "
        f"been written; copy through another tile\n  at {trace.where(ins.location)}"
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

    ``engines_used`` of every transfer must be set. Values of the in-order semaphores 0..4 count the
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
            totals[at] += ins.engines_used
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
