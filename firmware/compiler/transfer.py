"""DMA lowering: a copy between two views becomes strided descriptors, split over the engines.

All arithmetic is on ``(count, source step, destination step)`` triples in bytes. Both sides walk
the same elements in the same order; each side then merges its dimensions as far as it can.
"""

from dataclasses import dataclass
from itertools import pairwise

from ..nki.tensor import PARTITION

__all__ = ["Piece", "Plan", "Side", "lower"]

MIN_ENGINE_BYTES = 512
"""A transfer that gives an engine less than this uses fewer engines."""
MAX_COUNT = 65535
SPLIT_COUNT = 32768


@dataclass(frozen=True)
class Side:
    """One side of a copy: HBM tensor (its index) or SBUF (``None``), and the first byte."""

    tensor: int | None
    offset: int


@dataclass(frozen=True)
class Piece:
    """One descriptor, its addresses still relative to their tensors."""

    size_log2: int
    src: int
    src_dims: tuple
    dst: int
    dst_dims: tuple


@dataclass
class Plan:
    """A transfer: descriptors of each engine from ``first`` on (lists of equal length).

    ``descriptor`` is the number of the first of them in the program.
    """

    src: Side
    dst: Side
    first: int
    engines: list
    elements_bytes: int
    descriptor: int = 0


def _order(dims, key_side):
    """Innermost first: ascending steps on the side that counts, broadcast dimensions last."""
    other = 3 - key_side
    return sorted(
        dims,
        key=lambda d: (d[key_side] == 0 or d[other] == 0, abs(d[key_side]), abs(d[other])),
    )


def _join(dims, stride):
    """Merge neighbours that are contiguous on both sides and do not run into another partition."""
    out = []
    for count, s, d in dims:
        if out:
            c0, s0, d0 = out[-1]
            if s == s0 * c0 and d == d0 * c0 and not _crosses(out[-1], s, d, stride):
                out[-1] = (c0 * count, s0, d0)
                continue
        out.append((count, s, d))
    return out


def _crosses(inner, s, d, stride):
    """Whether a step to the next partition would join steps within one."""
    return any(
        abs(step) >= limit > abs(inner[which])
        for which, step, limit in zip((1, 2), (s, d), stride, strict=True)
    )


def _side_dims(dims, which, limit):
    """Dimensions of one side, merged where contiguous (in SBUF not from partition to partition)."""
    out = []
    for dim in dims:
        count, step = dim[0], dim[which]
        if (
            out
            and step == out[-1][0] * out[-1][1]
            and out[-1][1] * count <= MAX_COUNT
            and not abs(step) >= limit > abs(out[-1][0])
        ):
            out[-1] = (out[-1][0], out[-1][1] * count)
        else:
            out.append((step, count))
    return tuple(out) or ((0, 1),)


def _emit(dims, size_log2, src, dst, stride, out):
    """Descriptors for one box of elements; peels outer dimensions while there are too many."""
    for i, (count, s, d) in enumerate(dims):
        if count > MAX_COUNT:
            whole, rest = divmod(count, SPLIT_COUNT)
            inner, outer = dims[:i], dims[i + 1 :]
            split = [*inner, (SPLIT_COUNT, s, d), (whole, s * SPLIT_COUNT, d * SPLIT_COUNT), *outer]
            _emit(split, size_log2, src, dst, stride, out)
            if rest:
                src, dst = src + whole * SPLIT_COUNT * s, dst + whole * SPLIT_COUNT * d
                _emit([*inner, (rest, s, d), *outer], size_log2, src, dst, stride, out)
            return
    src_dims, dst_dims = _side_dims(dims, 1, stride[0]), _side_dims(dims, 2, stride[1])
    if len(src_dims) <= 4 and len(dst_dims) <= 4:
        out.append(Piece(size_log2, src, src_dims, dst, dst_dims))
        return
    count, s, d = dims[-1]
    for i in range(count):
        _emit(dims[:-1], size_log2, src + i * s, dst + i * d, stride, out)


def _cuts(count, parts, quantum=1):
    """Cut ``count`` into ``parts`` nearly equal runs whose borders are multiples of ``quantum``."""
    units = -(-count // quantum)
    borders = [min(count, (units * i // parts) * quantum) for i in range(parts)] + [count]
    return [(a, b - a) for a, b in pairwise(borders) if b > a]


def lower(config, dst, src, cursor):
    """Lower ``dma_copy(dst, src)`` of two views whose storages have addresses.

    Parameters
    ----------
    config : :class:`CoreConfig`
    dst, src : :class:`NkiTensor`
    cursor : :class:`int`
        Engine that gets the work if one is enough; spreads small transfers.

    Returns
    -------
    :class:`Plan`
    """
    stride = config.sbuf_partition_stride
    size = dst.dtype.bytes

    def physical(view):
        """(Side, steps) with the partition axis as an address step."""
        part, offset = divmod(view.offset, PARTITION)
        if view.buffer == "hbm":
            return Side(view.storage.index, view.offset), view.steps
        steps = []
        for step in view.steps:
            up, within = divmod(step + PARTITION // 2, PARTITION)
            steps.append(up * stride + within - PARTITION // 2)
        return Side(None, part * stride + view.storage.address + offset), steps

    src_side, src_steps = physical(src)
    dst_side, dst_steps = physical(dst)
    dims = [(n, s, d) for n, s, d in zip(dst.shape, src_steps, dst_steps, strict=True) if n != 1]
    key_side = 1 if dst_side.tensor is None and src_side.tensor is not None else 2
    # A step of this size leads to another partition.
    strides = tuple(stride if side.tensor is None else 1 << 62 for side in (src_side, dst_side))
    dims = _join(_order(dims, key_side), strides)
    total = size
    for count, _, _ in dims:
        total *= count

    # Runs that are contiguous on both sides move in the largest element that alignment allows.
    size_log2 = size.bit_length() - 1
    if dims and dims[0][1] == size and dims[0][2] == size:
        run = dims[0][0] * size
        on_chip = [0]
        if src_side.tensor is None:
            on_chip += [src_side.offset, *(s for _, s, _ in dims[1:])]
        if dst_side.tensor is None:
            on_chip += [dst_side.offset, *(d for _, _, d in dims[1:])]
        size_log2 = next(
            log2 for log2 in (2, 1, 0) if run % (1 << log2) == 0
            and all(value % (1 << log2) == 0 for value in on_chip)
        )  # fmt: skip
        unit = 1 << size_log2
        dims = [(run // unit, unit, unit), *dims[1:]]

    first, boxes = _split(config, dims, src_side, dst_side, total, 1 << size_log2, cursor)
    engines = []
    for box, s, d in boxes:
        out = []
        _emit(box, size_log2, src_side.offset + s, dst_side.offset + d, strides, out)
        engines.append(out)
    longest = max(len(out) for out in engines)
    empty = Piece(0, src_side.offset, ((0, 0),), dst_side.offset, ((0, 0),))
    for out in engines:
        out += [empty] * (longest - len(out))
    return Plan(src_side, dst_side, first, engines, total)


def _split(config, dims, src, dst, total, unit, cursor):
    """Share a box out: (first engine, [(dims, source offset, destination offset), ...])."""
    available = config.dma_engines
    wanted = max(1, min(available, total // MIN_ENGINE_BYTES))
    stride, group = config.sbuf_partition_stride, config.group
    chip = 2 if dst.tensor is None else 1 if src.tensor is None else None
    if not dims:
        return cursor % available, [([], 0, 0)]

    # Along the free axis each engine takes the partitions that are next to it.
    if chip is not None:
        at = next((i for i, dim in enumerate(dims) if dim[chip] == stride), None)
        if at:
            count, s, d = dims[at]
            start = (dst if chip == 2 else src).offset // stride
            groups = list(range(start // group, (start + count - 1) // group + 1))
            if 2 * len(groups) > wanted and len(groups) > 1:
                per = -(-len(groups) // wanted)
                boxes = []
                for i in range(0, len(groups), per):
                    a = max(groups[i] * group, start) - start
                    last = groups[min(i + per, len(groups)) - 1]
                    b = min((last + 1) * group, start + count) - start
                    boxes.append(([*dims[:at], (b - a, s, d), *dims[at + 1 :]], a * s, a * d))
                if per == 1:
                    return groups[0], boxes
                return _place(cursor, len(boxes), available), boxes
    if wanted == 1:
        return cursor % available, [(dims, 0, 0)]

    # Otherwise cut the outermost dimension that is long enough, else the longest.
    long = [i for i, dim in enumerate(dims) if dim[0] >= wanted and i > 0]
    at = long[-1] if long else max(range(len(dims)), key=lambda i: (dims[i][0], i))
    count, s, d = dims[at]
    quantum = max(1, 64 // unit) if at == 0 else 1
    boxes = [
        ([*dims[:at], (n, s, d), *dims[at + 1 :]], a * s, a * d)
        for a, n in _cuts(count, min(wanted, count), quantum)
    ]
    return _place(cursor, len(boxes), available), boxes


def _place(cursor, used, available):
    """First of ``used`` consecutive engines, rotating."""
    slots = available // used
    return (cursor % slots) * used
