"""The compiler: a trace becomes a program.

==============  ====================================================================================
module          does
==============  ====================================================================================
``contents``    refuses reads of what was never written; fills PSUM with zeros
``schedule``    lowers operations to instructions; finds dependences; inserts waits
``allocate``    gives tiles their SBUF and PSUM addresses
``transfer``    lowers copies to DMA descriptors, split over the engines
``encode``      writes instruction words and descriptors, vectorised
==============  ====================================================================================
"""

from collections import Counter

import numpy as np

from ...rtl.arch import isa
from ...rtl.arch.isa import Engine, UpdateMode, WaitMode
from .. import program as _program
from ..nki.tensor import Access
from . import encode, schedule, transfer
from .allocate import allocate_psum, allocate_sbuf
from .contents import check_contents, fill_zeros

__all__ = ["compile_trace"]

QUEUES = {schedule.LOAD: 0, schedule.STORE: 1}
"""DMA queue of loads (triggered by SP) and of stores (triggered by ACT)."""


def compile_trace(trace):
    """Compile a :class:`~..nki.trace.Trace` into a :class:`~..program.Program`.

    Raises
    ------
    :exc:`~..nki.KernelError`
        If tiles do not fit, something is read that was never written, or an output is not written
        whole.
    """
    config = trace.config
    schedule.lifetimes(trace)
    zeros = check_contents(trace)
    if zeros:
        fill_zeros(trace, zeros)
        schedule.lifetimes(trace)  # positions have moved
    allocate_sbuf(trace)
    allocate_psum(trace)
    instrs = schedule.lower_trace(trace)

    # Transfers first: how many engines one uses decides what its semaphore counts to.
    plans, cursor = [], {schedule.LOAD: 0, schedule.STORE: 0}
    for ins in instrs:
        if ins.cls is isa.DmaStart:
            plan = transfer.lower(config, ins.dst, ins.sources[0], cursor[ins.stream])
            cursor[ins.stream] += len(plan.engines)
            plans.append(plan)
            ins.plan = plan
            ins.fields = {
                "first": plan.first, "engines_used": len(plan.engines),
                "queue": QUEUES[ins.stream], "count": len(plan.engines[0]),
            }  # fmt: skip

    semaphores = schedule.Semaphores(config)
    sizes = schedule.regions(trace, instrs)
    updating, slots = schedule.insert_waits(instrs, sizes, semaphores)

    table = encode.encode_accesses(_accesses(instrs))
    queues = {engine: [] for engine in Engine}  # per queue: instructions, or (location, waits)
    for position, ins in enumerate(instrs):
        queue = queues[ins.engine]
        waits = ins.waits
        for i in range(2, len(waits), 2):
            queue.append((None, position, waits[i : i + 2]))
        queue.append((ins, position, waits[:2]))

    descriptors, relocations = _descriptors(config, plans)
    words, lines, tables = {}, {}, []
    for engine, queue in queues.items():
        words[engine], found = _encode_queue(engine, queue, table, updating, slots)
        lines[engine] = np.array([instrs[position].location for _, position, _ in queue], np.uint32)
        tables += found

    return _program.Program(
        kernel=trace.name,
        config_name=config.name,
        fingerprint=config.fingerprint,
        tensors=tuple(
            _program.TensorInfo(s.name, s.kind, s.shape, s.dtype)
            for s in trace.storages
            if s.buffer == "hbm"
        ),
        outputs=tuple(s.name for s in trace.outputs),
        queues=words,
        descriptors=descriptors,
        relocations=_relocations(trace, relocations),
        tables=np.array(tables, _program.TABLE_DTYPE),
        lines=lines,
        locations=tuple(trace.locations),
        stats=_stats(trace, config, instrs, plans),
    )


def _accesses(instrs):
    found = {}
    for ins in instrs:
        for access in ins.operands:
            found[id(access)] = access
    return list(found.values())


def _descriptors(config, plans):
    """(words, relocation rows); every plan learns the number of its first descriptor."""
    sbuf = config.sbuf_address(0, 0)
    pieces, src_bases, dst_bases, relocations = [], [], [], []
    for plan in plans:
        plan.descriptor = len(pieces)
        src_base = sbuf if plan.src.tensor is None else 0
        dst_base = sbuf if plan.dst.tensor is None else 0
        for engine in plan.engines:
            for piece in engine:
                at = len(pieces)
                pieces.append(piece)
                src_bases.append(src_base)
                dst_bases.append(dst_base)
                if plan.src.tensor is not None:
                    relocations.append((at, 0, plan.src.tensor))
                if plan.dst.tensor is not None:
                    relocations.append((at, 1, plan.dst.tensor))
    return encode.encode_descriptors(pieces, src_bases, dst_bases), relocations


def _relocations(trace, rows):
    """Tensor numbers of storages become positions in the program's tensor list."""
    order = {}
    for storage in trace.storages:
        if storage.buffer == "hbm":
            order[storage.index] = len(order)
    return np.array(
        [(at, side, order[tensor]) for at, side, tensor in rows], _program.RELOCATION_DTYPE
    )


def _encode_queue(engine, queue, table, updating, slots):
    words = np.zeros((len(queue), isa.WORD_BYTES), np.uint8)
    rows_of = {}
    waits = ([], [], []), ([], [], [])
    updates = [], []
    for row, (ins, position, wait) in enumerate(queue):
        rows_of.setdefault(isa.EventSemaphore if ins is None else ins.cls, []).append(row)
        for part, (semaphore, value) in zip(waits, wait, strict=False):
            part[0].append(row)
            part[1].append(semaphore)
            part[2].append(value)
        if ins is not None:
            if ins.stream >= schedule.LOAD:
                updates[0].append(row)
                updates[1].append(slots[position])
            elif position in updating:
                updates[0].append(row)
                updates[1].append(ins.stream)

    for cls, rows in rows_of.items():
        found = [queue[row][0] for row in rows]
        operands = scalars = {}
        if cls is not isa.EventSemaphore:
            columns = zip(*(ins.operands for ins in found), strict=True)
            operands = {
                name: [access.row for access in column]
                for (name, _, _), column in zip(cls.operands, columns, strict=True)
            }
            scalars = {
                name: [_number(ins.fields.get(name, 0)) for ins in found]
                for name, _, _ in cls.scalars
            }
        encode.encode_instructions(words, rows, cls, engine, table, operands, scalars)
    for part, (rows, numbers, values) in zip(("wait0", "wait1"), waits, strict=True):
        encode.encode_header(words, rows, part, numbers, [int(WaitMode.GE)] * len(rows), values)
    rows, numbers = updates
    encode.encode_header(
        words, rows, "update", numbers, [int(UpdateMode.ADD)] * len(rows), [1] * len(rows)
    )
    tables = [
        (int(engine), row, queue[row][0].plan.descriptor) for row in rows_of.get(isa.DmaStart, ())
    ]
    return words, tables


def _number(value):
    """A field's number; of a scalar in SBUF its offset."""
    return value.storage.address + value.offset if type(value) is Access else int(value)


def _stats(trace, config, instrs, plans):
    macs = passes = 0
    counts, per_engine = Counter(), Counter()
    weights = 0  # elements that the array holds
    for ins in instrs:
        counts[ins.cls] += 1
        per_engine[ins.engine.name] += 1
        if ins.cls is isa.LoadStationary:
            weights = ins.sources[0].count * ins.sources[0].elements
        elif ins.cls is isa.MatmulMoving:
            passes += weights * ins.sources[0].elements
    for op in trace.ops:
        if op.kind is schedule.MATMUL:
            stationary, moving = op.sources
            macs += stationary.count * stationary.elements * moving.elements
    loads = sum(p.elements_bytes for p in plans if p.src.tensor is not None)
    stores = sum(p.elements_bytes for p in plans if p.dst.tensor is not None)
    used = {}
    for space in ("sbuf", "psum"):
        tops = [
            s.address + s.partition_bytes
            for s in trace.storages
            if s.buffer == space and s.address is not None
        ]
        used[space] = max(tops, default=0)
    return {
        "macs": macs,
        "passes": passes,
        "instructions": dict(per_engine),
        "loads": counts[isa.LoadStationary],
        "matmuls": counts[isa.MatmulMoving],
        "transfers": len(plans),
        "hbm_bytes_read": loads,
        "hbm_bytes_written": stores,
        "sbuf_bytes_used": used["sbuf"],
        "psum_bytes_used": used["psum"],
        "ideal_cycles": -(-passes // (config.rows * config.cols)),
    }
