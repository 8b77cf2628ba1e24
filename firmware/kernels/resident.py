"""A matrix product whose operands and result all lie in SBUF: what the array does without HBM.

What the kernel loads, it loads before the first instruction of the tensor engine, and it stores
nothing before the last result is in SBUF. So there is a time between the two that depends on the
array, the vector engine and the instructions alone.
"""

from ...rtl.arch import formats
from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .matmul import _load_a, _load_b
from .tiles import ceil, spans

__all__ = ["matmul_in_sbuf", "resident_bytes"]


def resident_bytes(m, k, n, in_fmt, out_fmt, rows):
    """SBUF that :func:`matmul_in_sbuf` takes for these formats, in bytes per partition."""
    m_tiles, k_tiles = ceil(m, rows), ceil(k, rows)
    sizes = [k_tiles * m * in_fmt.bytes, k_tiles * n * in_fmt.bytes, m_tiles * n * out_fmt.bytes]
    if not _in_result(m, k, n, in_fmt, out_fmt, rows):
        sizes.append(2 * in_fmt.bytes)
    return sum(ceil(size, 64) * 64 for size in sizes)


def _in_result(m, k, n, in_fmt, out_fmt, rows):
    """Whether the two elements that :func:`_wait_for` needs find room where results will lie."""
    return in_fmt is out_fmt and m >= min(k, rows) and n > 1


def _strips(n, width, last):
    """Columns of C that are multiplied together; those of the last tile get fewer and fewer.

    Copying them out of PSUM is all that is left to do once their last sum is there.
    """
    if not last:
        return spans(n, width)
    strips = spans(n, width)
    first, stop = strips.pop()
    while stop - first >= 64:
        half = first + ceil(stop - first, 32) * 16
        strips.append((first, half))
        first = half
        if stop - first <= 128:
            break
    return [*strips, (first, stop)]


@nki.jit
def matmul_in_sbuf(a, b, out_dtype=nl.float32):
    """``a @ b``, all of it in SBUF at once.

    Parameters
    ----------
    a : HBM tensor ``[M, K]``
    b : HBM tensor ``[K, N]``
        Formats of the tensor engine.
    out_dtype : format

    Returns
    -------
    HBM tensor ``[M, N]``
    """
    (m, k), (_, n) = a.shape, b.shape
    out_dtype = formats.format_of(out_dtype)
    rows, width = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    k_tiles, m_tiles = ceil(k, rows), spans(m, rows)
    depth = min(k, rows)
    c = nl.ndarray((m, n), out_dtype, buffer=nl.shared_hbm, name="c")
    a_tile = nl.ndarray((depth, k_tiles, m), a.dtype, buffer=nl.sbuf, name="a_tile")
    b_tile = nl.ndarray((depth, k_tiles, n), b.dtype, buffer=nl.sbuf, name="b_tile")
    c_tile = nl.ndarray((min(m, rows), len(m_tiles), n), out_dtype, buffer=nl.sbuf, name="c_tile")
    _load_b(b_tile, b, 0, k, 0, n, 0)
    _load_a(a_tile, a, 0, m, 0, k, 0, 0)
    spare = c_tile
    if not _in_result(m, k, n, a.dtype, out_dtype, rows):
        spare = nl.ndarray((depth, 1, 2), a.dtype, buffer=nl.sbuf, name="spare")
    _wait_for(a, a_tile, b_tile, k, spare)

    for m0, m1 in m_tiles:
        for n0, n1 in _strips(n, width, last=m1 == m):
            sums = nl.ndarray((m1 - m0, n1 - n0), nl.float32, buffer=nl.psum, name="sums")
            for tile in range(k_tiles):
                deep = min(rows, k - tile * rows)
                nisa.nc_matmul(sums, a_tile[:deep, tile, m0:m1], b_tile[:deep, tile, n0:n1])
            nisa.tensor_copy(c_tile[: m1 - m0, m0 // rows, n0:n1], sums)
    for m0, m1 in reversed(m_tiles):  # stores are made in order: all wait for the last result
        nisa.dma_copy(c[m0:m1], c_tile[: m1 - m0, m0 // rows])
    return c


def _wait_for(a, a_tile, b_tile, k, spare):
    """Let the first weight load wait for all loads.

    The vector engine reads an element of each, in order, and writes one of the first weights last,
    with what it is already. ``spare`` has room for two elements.
    """
    rows, k_tiles = nl.tile_size.pmax, a_tile.shape[1]
    depth = min(k, rows)
    weights, seen = spare[:depth, 0, :1], spare[:depth, 0, 1:2]
    nisa.dma_copy(weights, a[:1, :depth].permute(1, 0))
    for tile in (a_tile, b_tile):
        for piece in {0, k_tiles - 1}:  # whole tiles of K are loaded together, the rest apart
            deep = min(rows, k - piece * rows)
            nisa.tensor_copy(seen[:deep], tile[:deep, piece, :1])
    nisa.tensor_copy(a_tile[:depth, 0, :1], weights)
