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

import numpy as np

from ...rtl.arch import isa
from ...rtl.arch.isa import Engine, UpdateMode, WaitMode
from .. import program as _program
from . import encode, schedule, transfer
from .allocate import allocate_psum, allocate_sbuf
from .contents import check_contents, fill_zeros

__all__ = ["compile_trace"]

LOAD_QUEUE, STORE_QUEUE = 0, 1
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
        if ins.kind == schedule.DMASTART:
            plan = transfer.lower(config, ins.dst, ins.src, cursor[ins.stream])
            cursor[ins.stream] += len(plan.engines)
            ins.engines_used = len(plan.engines)
            plans.append(plan)
            ins.flag = len(plans) - 1

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

    descriptors, relocations, first_descriptor = _descriptors(config, plans)
    words, lines, tables = {}, {}, []
    for engine, queue in queues.items():
        words[engine], found = _encode_queue(
            engine, queue, table, updating, slots, plans, first_descriptor
        )
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
        if ins.kind == schedule.DMASTART:
            continue
        for access in (ins.dst, ins.src):
            if access is not None:
                found[id(access)] = access
    return list(found.values())


def _descriptors(config, plans):
    """(words, relocation rows, first descriptor of each plan)."""
    sbuf = config.sbuf_address(0, 0)
    pieces, src_bases, dst_bases, relocations, first = [], [], [], [], []
    for plan in plans:
        first.append(len(pieces))
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
    return encode.encode_descriptors(pieces, src_bases, dst_bases), relocations, first


def _relocations(trace, rows):
    """Tensor numbers of storages become positions in the program's tensor list."""
    order = {}
    for storage in trace.storages:
        if storage.buffer == "hbm":
            order[storage.index] = len(order)
    return np.array(
        [(at, side, order[tensor]) for at, side, tensor in rows], _program.RELOCATION_DTYPE
    )


def _encode_queue(engine, queue, table, updating, slots, plans, first_descriptor):
    words = np.zeros((len(queue), isa.WORD_BYTES), np.uint8)
    kinds = {}
    waits = ([], [], []), ([], [], [])
    updates = [], []
    for row, (ins, position, wait) in enumerate(queue):
        kinds.setdefault(None if ins is None else ins.kind, []).append(row)
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

    def encode_kind(kind, cls, operands, scalars):
        rows = kinds.get(kind)
        if not rows:
            return
        found = [queue[row][0] for row in rows]
        encode.encode_instructions(
            words, rows, cls, engine, table,
            {name: np.array([getattr(i, name).row for i in found]) for name in operands},
            {name: np.array([int(get(i)) for i in found]) for name, get in scalars.items()},
        )  # fmt: skip

    encode_kind(None, isa.EventSemaphore, (), {})
    encode_kind(schedule.LOADSTATIONARY, isa.LoadStationary, ("src",), {"half": lambda i: i.half})
    encode_kind(
        schedule.MATMULMOVING, isa.MatmulMoving, ("dst", "src"),
        {"half": lambda i: i.half, "accumulate": lambda i: i.flag},
    )  # fmt: skip
    encode_kind(schedule.TENSORCOPY, isa.TensorCopy, ("dst", "src"), {"saturate": lambda i: i.flag})
    encode_kind(schedule.MEMSET_, isa.Memset, ("dst",), {"value": lambda i: i.flag})
    queue_number = STORE_QUEUE if engine is Engine.ACT else LOAD_QUEUE
    encode_kind(
        schedule.DMASTART, isa.DmaStart, (),
        {
            "first": lambda i: plans[i.flag].first,
            "engines_used": lambda i: len(plans[i.flag].engines),
            "queue": lambda i: queue_number,
            "count": lambda i: len(plans[i.flag].engines[0]),
        },
    )  # fmt: skip
    for part, (rows, numbers, values) in zip(("wait0", "wait1"), waits, strict=True):
        encode.encode_header(words, rows, part, numbers, [int(WaitMode.GE)] * len(rows), values)
    rows, numbers = updates
    encode.encode_header(
        words, rows, "update", numbers, [int(UpdateMode.ADD)] * len(rows), [1] * len(rows)
    )
    tables = [
        (int(engine), row, first_descriptor[queue[row][0].flag])
        for row in kinds.get(schedule.DMASTART, ())
    ]
    return words, tables


def _stats(trace, config, instrs, plans):
    macs = passes = 0
    counts = {}
    weights = 0  # elements that the array holds
    for ins in instrs:
        counts[ins.kind] = counts.get(ins.kind, 0) + 1
        if ins.kind == schedule.LOADSTATIONARY:
            weights = ins.src.count * ins.src.elements
        elif ins.kind == schedule.MATMULMOVING:
            passes += weights * ins.src.elements
    for op in trace.ops:
        if op.kind == schedule.MATMUL:
            macs += op.src.count * op.src.elements * op.moving.elements
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
        "loads": counts.get(schedule.LOADSTATIONARY, 0),
        "matmuls": counts.get(schedule.MATMULMOVING, 0),
        "transfers": len(plans),
        "hbm_bytes_read": loads,
        "hbm_bytes_written": stores,
        "sbuf_bytes_used": used["sbuf"],
        "psum_bytes_used": used["psum"],
        "ideal_cycles": -(-passes // (config.rows * config.cols)),
    }
