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

__all__ = ["Blocking", "matmul", "matmul_reference", "plan_blocking"]

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


def _ceil(a, b):
    return -(-a // b)


def plan_blocking(m, k, n, a_bytes, b_bytes, c_bytes, *, rows, bank_words, banks, sbuf_bytes):
    """Choose the :class:`Blocking` that moves the fewest bytes and fits SBUF."""
    mt, kt, nt = _ceil(m, rows), _ceil(k, rows), _ceil(n, bank_words)
    width = min(n, bank_words)
    wanted = min(kt, max(4, _ceil(RUN_BYTES, rows * a_bytes)))
    sizes = [wanted]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)

    def slot(size):
        return _ceil(size, 16) * 16

    best = None
    for blocks in range(_ceil(mt, banks), mt + 1):
        m_tiles = _ceil(mt, blocks)
        for k_tiles in sizes:
            chunks = _ceil(kt, k_tiles)
            a_chunk = slot(k_tiles * _ceil(min(m, m_tiles * rows), 4) * 4 * a_bytes)
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
            a_cost = m * k * a_bytes * _ceil(nt, resident)
            a_cost *= max(1.0, 128 / min(k * a_bytes, k_tiles * rows * a_bytes))
            b_cost = k * n * b_bytes * (1 if strips else blocks)
            cost = (a_cost + b_cost) * (1.05 if k_tiles < min(4, kt) else 1.0)
            key = (cost, -m_tiles, -k_tiles)
            if best is None or key < best[0]:
                best = key, Blocking(m_tiles, k_tiles, strips)
        if m_tiles == 1:
            break
    if best is None:
        raise ValueError(f"a matmul of {m} x {k} x {n} does not fit {sbuf_bytes} bytes of SBUF")
    return best[1]


def _spans(total, step):
    """``(first, last + 1)`` of consecutive pieces."""
    return [(i, min(i + step, total)) for i in range(0, total, step)]


def _first_pieces(count):
    """Cut the first chunk so that the array starts early: 1, 1, 2, 4, ..."""
    pieces, at, size = [], 0, 1
    while at < count:
        stop = min(at + size, count)
        pieces.append((at, stop))
        size, at = stop, stop
    return pieces


def _load_a(tile, a, m0, m1, k0, k1, at):
    """Load rows m0:m1, columns k0:k1 of A across partitions, into K tiles ``at`` and following."""
    rows = nl.tile_size.pmax
    full = (k1 - k0) // rows
    if full:
        src = a[m0:m1, k0 : k0 + full * rows].reshape(m1 - m0, full, rows)
        nisa.dma_copy(tile[:, at : at + full, : m1 - m0], src.permute(2, 1, 0))
    if k0 + full * rows < k1:
        src = a[m0:m1, k0 + full * rows : k1].permute(1, 0)
        nisa.dma_copy(tile[: src.shape[0], at + full, : m1 - m0], src)


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
    rows, width = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    if blocking is None:
        blocking = plan_blocking(
            m, k, n, a.dtype.bytes, b.dtype.bytes, out_dtype.bytes,
            rows=rows, bank_words=width, banks=nl.tile_size.psum_num_banks,
            sbuf_bytes=nl.tile_size.total_available_sbuf_size,
        )  # fmt: skip
    c = nl.ndarray((m, n), out_dtype, buffer=nl.shared_hbm, name="c")

    k_total = _ceil(k, rows)
    chunks = _spans(k_total, blocking.k_tiles)
    blocks = _spans(m, blocking.m_tiles * rows)
    strips = _spans(n, width)
    a_width = _ceil(min(m, blocking.m_tiles * rows), 4) * 4
    b_width = min(n, width)
    k_tiles = min(blocking.k_tiles, k_total)
    streaming = blocking.strips == 0
    pieces = _first_pieces(len(range(*chunks[0])))  # of the very first chunk

    for s0, s1 in _spans(len(strips), max(blocking.strips, 1)):
        b_tiles = {}
        for block, (m0, m1) in enumerate(blocks):
            a_tiles = {}
            for strip in range(s0, s1):
                n0, n1 = strips[strip]
                sums = {}
                for chunk, (c0, c1) in enumerate(chunks):
                    load_a = strip == s0
                    load_b = block == 0 or streaming
                    if load_a:
                        a_tile = nl.ndarray((rows, k_tiles, a_width), a.dtype, buffer=nl.sbuf)
                        a_tiles[chunk] = a_tile
                    if load_b:
                        b_tile = nl.ndarray((rows, k_tiles, b_width), b.dtype, buffer=nl.sbuf)
                        b_tiles[strip, chunk] = b_tile, {}
                    a_tile, (b_tile, b_views) = a_tiles[chunk], b_tiles[strip, chunk]
                    for p0, p1 in pieces:
                        k0, k1 = (c0 + p0) * rows, min((c0 + p1) * rows, k)
                        if load_a:
                            _load_a(a_tile, a, m0, m1, k0, k1, p0)
                        if load_b:
                            _load_b(b_tile, b, k0, k1, n0, n1, p0)
                        for t0, t1 in _spans(m1 - m0, rows):
                            if c0 + p0 == 0:
                                sums[t0] = nl.ndarray((t1 - t0, n1 - n0), nl.float32, buffer=nl.psum)
                            for i in range(p0, p1):
                                depth = min((c0 + i + 1) * rows, k) - (c0 + i) * rows
                                moving = b_views.get(i)
                                if moving is None:
                                    moving = b_views[i] = b_tile[:depth, i, : n1 - n0]
                                stationary = a_tile[:depth, i, t0:t1]
                                nisa.nc_matmul(
                                    sums[t0], stationary, moving, accumulate=c0 + i > 0
                                )
                            if c0 + p1 == k_total:
                                out = nl.ndarray((rows, b_width), out_dtype, buffer=nl.sbuf)
                                part = out[: t1 - t0, : n1 - n0]
                                nisa.tensor_copy(part, sums[t0])
                                nisa.dma_copy(c[m0 + t0 : m0 + t1, n0:n1], part)
                    pieces = [(0, blocking.k_tiles)]
                    if chunk + 1 < len(chunks):
                        pieces = [(0, chunks[chunk + 1][1] - chunks[chunk + 1][0])]
                pieces = [(0, chunks[0][1] - chunks[0][0])]
    return c


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
