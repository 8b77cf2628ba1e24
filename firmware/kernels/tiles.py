"""What kernels share: cutting sizes into tiles, and loading matrices into them."""

from ..nki import isa as nisa
from ..nki import language as nl

__all__ = ["ceil", "load_row_for_all", "load_rows", "load_transposed", "spans"]


def ceil(a, b):
    """``a / b``, rounded up."""
    return -(-a // b)


def spans(total, step):
    """``(first, last + 1)`` of consecutive pieces."""
    return [(i, min(i + step, total)) for i in range(0, total, step)]


def load_rows(source):
    """A matrix ``[k, n]`` as ``[k on partitions, tiles of k, n]``."""
    (k, n), most = source.shape, nl.tile_size.pmax
    tile = nl.ndarray(
        (min(k, most), ceil(k, most), n), source.dtype, buffer=nl.sbuf, name=f"{source.name}_rows"
    )
    for i, (first, last) in enumerate(spans(k, most)):
        nisa.dma_copy(tile[: last - first, i], source[first:last])
    return tile


def load_transposed(source):
    """A matrix ``[n, k]`` as ``[k on partitions, tiles of k, n]``."""
    (n, k), most = source.shape, nl.tile_size.pmax
    tile = nl.ndarray(
        (min(k, most), ceil(k, most), n), source.dtype, buffer=nl.sbuf,
        name=f"{source.name}_transposed",
    )  # fmt: skip
    for i, (first, last) in enumerate(spans(k, most)):
        nisa.dma_copy(tile[: last - first, i], source[:, first:last].permute(1, 0))
    return tile


def load_row_for_all(vector, partitions):
    """A vector ``[n]`` as ``[partitions, n]`` float32, the same in each."""
    row = vector.reshape(1, vector.size).broadcast_to(partitions, vector.size)
    return nl.load(row, dtype=nl.float32)
