"""Matrix multiplication: the kernel, how it blocks, and its numpy reference.

``C = A @ B`` with both operands in HBM in C order. A is loaded across partitions (K on partitions,
M on the free axis) and stays stationary, B is loaded along the free axis and moves. The result
depends on the inputs, their formats and the number of rows of the array alone: each element of C
accumulates its K tiles in ascending order, whatever the blocking.
"""

from dataclasses import dataclass

import numpy as np

from ...rtl.arch import formats
from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import ceil, spans

__all__ = ["Blocking", "matmul", "matmul_program", "matmul_reference", "plan_blocking"]

LEAST_RUN_BYTES = 128
"""Shortest contiguous pieces in which A is read, where K allows."""
RUN_BYTES = 256
"""Wanted length of the contiguous pieces in which A is read: one burst."""


@dataclass(frozen=True)
class Blocking:
    """How a matmul is cut up.

    Parameters
    ----------
    m_tiles : :class:`int`
        Stationary tiles that accumulate together, each in a PSUM bank.
    k_tiles : :class:`int`
        K tiles in one SBUF tile (a *chunk*).
    strips : :class:`int`
        Strips of B, each one PSUM bank wide, that stay in SBUF while all of A passes; 0 if not
        even one fits, and B is streamed too.
    """

    m_tiles: int
    k_tiles: int
    strips: int


def plan_blocking(m, k, n, a_bytes, b_bytes, c_bytes, *, rows, bank_words, banks, sbuf_bytes):
    """Choose the :class:`Blocking` that moves the fewest bytes and fits SBUF."""
    width = _strip_width(n, bank_words)
    mt, kt, nt = ceil(m, rows), ceil(k, rows), ceil(n, width)
    wanted = min(kt, max(4, ceil(RUN_BYTES, rows * a_bytes)))
    sizes = [wanted]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)

    def slot(size):
        return ceil(size, 16) * 16

    best = None
    for blocks in range(ceil(mt, banks), mt + 1):
        m_tiles = ceil(mt, blocks)
        for k_tiles in sizes:
            chunks = ceil(kt, k_tiles)
            a_chunk = slot(k_tiles * ceil(min(m, m_tiles * rows), 4) * 4 * a_bytes)
            b_chunk = slot(k_tiles * width * b_bytes)
            left = sbuf_bytes - 2 * slot(width * c_bytes)
            for strips in range(nt, -1, -1):
                resident = strips or 1
                if strips == 0:
                    need = min(2, chunks) * (a_chunk + b_chunk)
                elif strips == 1:
                    need = chunks * b_chunk + min(2, chunks * blocks) * a_chunk
                else:
                    need = strips * chunks * b_chunk + (chunks + (blocks > 1)) * a_chunk
                if need <= left:
                    break
            else:
                continue
            a_cost = m * k * a_bytes * ceil(nt, resident)
            a_cost *= max(1.0, 128 / min(k * a_bytes, k_tiles * rows * a_bytes))
            b_cost = k * n * b_bytes * (1 if strips else blocks)
            cost = (a_cost + b_cost) * (1.05 if k_tiles < min(4, kt) else 1.0)
            key = (cost, -m_tiles, -k_tiles)
            if best is None or key < best[0]:
                best = key, Blocking(m_tiles, k_tiles, strips)
        if m_tiles == 1:
            break
    if best is None:
        raise nki.KernelError(
            f"a matmul of {m} x {k} x {n} does not fit SBUF of {sbuf_bytes} bytes per partition"
        )
    return best[1]


def _strip_width(n, bank_words):
    """Width of the strips of C: as few as possible, of nearly equal width."""
    even = ceil(n, ceil(n, bank_words))
    return min(ceil(even, 16) * 16, bank_words, n)


ALL, LEFT, RIGHT = (0, 2), (0, 1), (1, 2)
"""Columns of a strip, in halves."""


def _columns(part, width):
    """First and last + 1 of the columns of a part."""
    edges = 0, min(ceil(width, 32) * 16, width), width
    return edges[part[0]], edges[part[1]]


def _order(m_tiles, chunks, *, first, last, least):
    """Order of work within a block, as steps ``(a, b, products)``.

    ``a`` (M tiles and K tiles ``(t0, t1, k0, k1)``) and ``b`` (K tiles ``(k0, k1)``) say what the
    step loads if it is not there yet, ``products`` what it multiplies: ``(t, k0, k1, columns)``
    with ``columns`` one of ``ALL``, ``LEFT``, ``RIGHT``. Chunk by chunk, all M tiles of the block.

    In the first block the array has to wait for its operands. There they come in small pieces, M
    tiles and K tiles by turns, and each piece is multiplied with all that are there already: work
    grows with the square of what is loaded. In the last block M tiles finish one by one, the last
    one half after half, so that little is left to store.
    """
    everything = range(m_tiles)

    def row(k0, k1):
        return [(t, k0, k1, ALL) for t in everything]

    if last:
        tiles = [*((t, ALL) for t in everything[:-1]), (m_tiles - 1, LEFT), (m_tiles - 1, RIGHT)]
        return [(None, None, [(t, c0, c1, part) for t, part in tiles for c0, c1 in chunks])]
    if not first:
        return [((0, m_tiles, c0, c1), (c0, c1), row(c0, c1)) for c0, c1 in chunks]
    steps = []
    whole = chunks[0][1]
    depth = whole if len(chunks) > 1 else ceil(whole, 2)
    for i in range(max(m_tiles, depth)):
        if i < m_tiles:
            steps.append(((i, i + 1, 0, whole), None, [(i, 0, min(i, depth), ALL)]))
        if i < depth:
            steps.append((None, (i, i + 1), row(i, i + 1)[: i + 1]))
    if depth < whole:
        steps.append((None, (depth, whole), row(depth, whole)))
    for c0, c1 in chunks[1:]:
        for k0 in range(c0, c1, least):
            k1 = min(k0 + least, c1)
            steps.append(((0, m_tiles, k0, k1), (k0, k1), row(k0, k1)))
    return steps


def _load_a(tile, a, m0, m1, k0, k1, at, to):
    """Load rows m0:m1, columns k0:k1 of A across partitions, into K tiles ``at`` and following,
    free elements ``to`` and following."""
    rows = nl.tile_size.pmax
    full = (k1 - k0) // rows
    if full:
        src = a[m0:m1, k0 : k0 + full * rows].reshape(m1 - m0, full, rows)
        nisa.dma_copy(tile[:, at : at + full, to : to + m1 - m0], src.permute(2, 1, 0))
    if k0 + full * rows < k1:
        src = a[m0:m1, k0 + full * rows : k1].permute(1, 0)
        nisa.dma_copy(tile[: src.shape[0], at + full, to : to + m1 - m0], src)


def _load_b(tile, b, k0, k1, n0, n1, at):
    """Load rows k0:k1, columns n0:n1 of B, into K tiles ``at`` and following."""
    rows = nl.tile_size.pmax
    full = (k1 - k0) // rows
    if full:
        src = b[k0 : k0 + full * rows, n0:n1].reshape(full, rows, n1 - n0)
        nisa.dma_copy(tile[:, at : at + full, : n1 - n0], src.permute(1, 0, 2))
    if k0 + full * rows < k1:
        src = b[k0 + full * rows : k1, n0:n1]
        nisa.dma_copy(tile[: src.shape[0], at + full, : n1 - n0], src)


@nki.jit
def matmul(a, b, out_dtype=nl.float32, blocking=None):
    """``a @ b``.

    Parameters
    ----------
    a : HBM tensor ``[M, K]``
    b : HBM tensor ``[K, N]``
        Formats of the tensor engine; float32 and tf32 only with each other.
    out_dtype : format
        Of the result; sums are float32 and rounded once.
    blocking : :class:`Blocking` or ``None``
        ``None`` chooses; results do not depend on it.

    Returns
    -------
    HBM tensor ``[M, N]``
    """
    (m, k), (k_, n) = a.shape, b.shape
    if k != k_:
        raise nki.KernelError(f"matmul: {a} and {b} must agree in K, not {k} and {k_}")
    out_dtype = formats.format_of(out_dtype)
    rows, bank_words = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    if blocking is None:
        blocking = plan_blocking(
            m, k, n, a.dtype.bytes, b.dtype.bytes, out_dtype.bytes,
            rows=rows, bank_words=bank_words, banks=nl.tile_size.psum_num_banks,
            sbuf_bytes=nl.tile_size.total_available_sbuf_size,
        )  # fmt: skip
    c = nl.ndarray((m, n), out_dtype, buffer=nl.shared_hbm, name="c")

    k_total = ceil(k, rows)
    chunks = spans(k_total, blocking.k_tiles)
    blocks = spans(m, blocking.m_tiles * rows)
    width = _strip_width(n, bank_words)
    strips = spans(n, width)
    k_tiles = min(blocking.k_tiles, k_total)
    a_shape = (rows, k_tiles, ceil(min(m, blocking.m_tiles * rows), 4) * 4)
    b_shape = (rows, k_tiles, width)
    c_shape = (rows, width)

    def block_of_strip(m0, m1, n0, n1, a_tiles, b_tiles, **place):
        """C[m0:m1, n0:n1], one PSUM bank wide; makes and loads the tiles that are not there yet."""
        have_a, have_b = set(a_tiles), set(b_tiles)
        sums = {}
        for a_piece, b_piece, products in _order(ceil(m1 - m0, rows), chunks, **place):
            if a_piece is not None:
                t0, t1, k0, k1 = a_piece
                chunk, at = divmod(k0, blocking.k_tiles)
                if chunk not in a_tiles:
                    a_tiles[chunk] = nl.ndarray(a_shape, a.dtype, buffer=nl.sbuf, name="a_tile")
                if chunk not in have_a:
                    top, bottom = m0 + t0 * rows, min(m0 + t1 * rows, m1)
                    low, high = k0 * rows, min(k1 * rows, k)
                    _load_a(a_tiles[chunk], a, top, bottom, low, high, at, t0 * rows)
            if b_piece is not None:
                k0, k1 = b_piece
                chunk, at = divmod(k0, blocking.k_tiles)
                if chunk not in b_tiles:
                    tile = nl.ndarray(b_shape, b.dtype, buffer=nl.sbuf, name="b_tile")
                    b_tiles[chunk] = tile, {}
                if chunk not in have_b:
                    _load_b(b_tiles[chunk][0], b, k0 * rows, min(k1 * rows, k), n0, n1, at)
            for t, k0, k1, part in products:
                first, stop = _columns(part, n1 - n0)
                if k0 == k1 or first == stop:
                    continue
                left, right = t * rows, min((t + 1) * rows, m1 - m0)
                if k0 == 0:
                    sums[t] = nl.ndarray(
                        (right - left, stop - first), nl.float32, buffer=nl.psum, name="sums"
                    )
                chunk, at = divmod(k0, blocking.k_tiles)
                a_tile, (b_tile, b_views) = a_tiles[chunk], b_tiles[chunk]
                for i in range(at, at + k1 - k0):
                    depth = min(k - (k0 + i - at) * rows, rows)
                    moving = b_views.get((i, first, stop))
                    if moving is None:
                        moving = b_views[i, first, stop] = b_tile[:depth, i, first:stop]
                    stationary = a_tile[:depth, i, left:right]
                    nisa.nc_matmul(sums[t], stationary, moving, accumulate=k0 + i > at)
                if k1 == k_total:
                    out = nl.ndarray(c_shape, out_dtype, buffer=nl.sbuf, name="c_tile")
                    out = out[: right - left, : stop - first]
                    nisa.tensor_copy(out, sums[t])
                    nisa.dma_copy(c[m0 + left : m0 + right, n0 + first : n0 + stop], out)

    # K tiles of a piece in the first block: long enough reads, short enough waits.
    least = ceil(LEAST_RUN_BYTES, rows * a.dtype.bytes)
    for s0, s1 in spans(len(strips), max(blocking.strips, 1)):
        b_tiles = [{} for _ in range(s0, s1)]
        for block, (m0, m1) in enumerate(blocks):
            a_tiles = {}
            for strip in range(s0, s1):
                n0, n1 = strips[strip]
                if blocking.strips == 0:
                    b_tiles[0] = {}
                block_of_strip(
                    m0, m1, n0, n1, a_tiles, b_tiles[strip - s0], least=least,
                    first=m0 == n0 == 0,
                    last=m1 == m and n1 == n and block > 0 and strip > s0,
                )  # fmt: skip
    return c


def matmul_program(config, a_shape, b_shape, dtype, out_dtype=formats.FP32):
    """The compiled :func:`matmul` for operands of these shapes in format ``dtype``."""
    return matmul.compile(
        config, nki.TensorSpec(a_shape, dtype), nki.TensorSpec(b_shape, dtype), out_dtype
    )


def matmul_reference(a, b, rows, out_dtype=None, a_dtype=None, b_dtype=None):
    """What the machine computes for ``a @ b``, bit for bit.

    Parameters
    ----------
    a : array ``[M, K]``
    b : array ``[K, N]``
    rows : :class:`int`
        Rows of the array.
    out_dtype : format or ``None``
        ``None`` is float32.
    a_dtype, b_dtype : format or ``None``
        Where the array's dtype does not say it (TF32 lies in float32 arrays).

    Returns
    -------
    array ``[M, N]``
    """
    a, b = np.asarray(a), np.asarray(b)
    a_fmt = formats.format_of(a.dtype if a_dtype is None else a_dtype)
    b_fmt = formats.format_of(b.dtype if b_dtype is None else b_dtype)
    out_fmt = formats.FP32 if out_dtype is None else formats.format_of(out_dtype)
    (m, k), n = a.shape, b.shape[1]
    a_halves, b_halves = _halves(a, a_fmt), _halves(b, b_fmt)
    total = None
    with np.errstate(all="ignore"):
        for k0 in range(0, k, rows):
            for stationary, s_live in a_halves:
                for moving, m_live in b_halves:
                    acc = np.zeros((m, n), np.float32)
                    for i in range(k0, min(k0 + rows, k)):
                        new = (
                            acc.astype(np.float64) + stationary[:, i, None] * moving[None, i]
                        ).astype(np.float32)
                        if s_live is not None or m_live is not None:
                            live = np.True_ if s_live is None else s_live[:, i, None]
                            if m_live is not None:
                                live = live & m_live[None, i]
                            new = np.where(live, new, acc)
                        acc = new
                    total = acc if total is None else total + acc
    assert total is not None, "K is at least 1"
    total = np.where(np.isnan(total), np.float32(np.nan), total)
    return total if out_fmt is formats.FP32 else out_fmt.encode(total)


def _halves(x, fmt):
    """Passes of an operand in order: (exact values as float64, where not void or ``None``)."""
    if fmt is not formats.FP32:
        return [(fmt.decode(x), None)]
    x = np.ascontiguousarray(x, np.float32)
    with np.errstate(all="ignore"):
        hi = (x.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
        hi = np.where(np.isnan(x), x, hi)
        lo = np.where(np.isfinite(x), x - hi, np.float32(0))
        return [(lo.astype(np.float64), lo != 0), (hi.astype(np.float64), None)]
