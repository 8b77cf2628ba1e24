"""Convolution and pooling of images; each kernel beside its numpy reference.

Channels go on partitions. Windows are views of an image in SBUF: neither unfolds it.
"""

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import spans

__all__ = [
    "average_pool2d", "conv2d", "conv2d_reference", "max_pool2d", "pool2d_reference",
]  # fmt: skip


def _positions(size, window, stride):
    """How often a window fits."""
    if window > size:
        raise nki.KernelError(f"a window of {window} does not fit into {size} elements")
    return (size - window) // stride + 1


def _windows(tile, n, shape, kernel, stride):
    """View ``[n, rows, columns, kernel, kernel]`` of images ``[partitions, height * width]``."""
    height, width = shape
    rows, columns = (_positions(size, kernel, stride) for size in shape)
    return tile.ap(
        [
            [height * width, n], [stride * width, rows], [stride, columns], [width, kernel],
            [1, kernel],
        ]
    )  # fmt: skip


def _pool(x, kernel, stride, reduce):
    *outer, height, width = x.shape
    images = x.size // (height * width)
    stride = kernel if stride is None else stride
    rows, columns = (_positions(size, kernel, stride) for size in (height, width))
    out = nl.ndarray((*outer, rows, columns), x.dtype, buffer=nl.shared_hbm, name="out")
    source, target = x.reshape(images, height * width), out.reshape(images, rows, columns)
    for first, last in spans(images, nl.tile_size.pmax):
        tile = nl.ndarray((last - first, height * width), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, source[first:last])
        result = nl.ndarray((last - first, rows, columns), x.dtype, buffer=nl.sbuf)
        reduce(result, _windows(tile, last - first, (height, width), kernel, stride))
        nl.store(target[first:last], result)
    return out


@nki.jit
def max_pool2d(x, kernel=2, stride=None):
    """The maximum of each window.

    Parameters
    ----------
    x : HBM tensor ``[..., height, width]``
    kernel : :class:`int`
        Height and width of a window.
    stride : :class:`int` or ``None``
        From one window to the next; ``None`` is ``kernel``.

    Returns
    -------
    HBM tensor ``[..., rows, columns]`` of the format of x
    """

    def reduce(result, windows):
        nisa.tensor_reduce(result, nl.maximum, windows, axis=(3, 4))

    return _pool(x, kernel, stride, reduce)


@nki.jit
def average_pool2d(x, kernel=2, stride=None):
    """The average of each window; parameters as :func:`max_pool2d`."""

    def reduce(result, windows):
        sums = nl.ndarray(result.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(sums, nl.add, windows, axis=(3, 4))
        nisa.tensor_scalar(result, sums, nl.multiply, 1 / (kernel * kernel))

    return _pool(x, kernel, stride, reduce)


def pool2d_reference(x, function, kernel=2, stride=None):
    """Pooling in float64 by ``np.max`` or ``np.mean``."""
    stride = kernel if stride is None else stride
    windows = np.lib.stride_tricks.sliding_window_view(
        np.asarray(x, np.float64), (kernel, kernel), axis=(-2, -1)
    )
    return function(windows[..., ::stride, ::stride, :, :], axis=(-2, -1))


@nki.jit
def conv2d(x, weight, bias=None, stride=1, padding=0):
    """Cross-correlation of images with filters, as neural networks have it.

    For every element of the window and every tile of input channels a matmul adds to the sums of a
    strip of rows in PSUM; the moving operand is the image, seen through that element.

    Parameters
    ----------
    x : HBM tensor ``[images, channels, height, width]``
    weight : HBM tensor ``[filters, channels, kernel_height, kernel_width]``
    bias : HBM tensor ``[filters]`` or ``None``
    stride, padding : :class:`int`
        Step of the window; rows and columns of zeros on each side of an image.

    Returns
    -------
    HBM tensor ``[images, filters, rows, columns]`` of the format of x

    A row of results must fit a PSUM bank.
    """
    (images, channels, height, width), (filters, _, tall, wide) = x.shape, weight.shape
    if weight.shape[1] != channels:
        raise nki.KernelError(f"conv2d: filters {weight} do not have the channels of {x}")
    most, bank = nl.tile_size.pmax, nl.tile_size.psum_fmax
    high, broad = height + 2 * padding, width + 2 * padding
    rows, columns = _positions(high, tall, stride), _positions(broad, wide, stride)
    if columns > bank:
        raise nki.KernelError(f"conv2d: a row of {columns} results does not fit {bank} (psum_fmax)")
    out = nl.ndarray((images, filters, rows, columns), x.dtype, buffer=nl.shared_hbm)
    taps = [(i, j) for i in range(tall) for j in range(wide)]
    channel_tiles, filter_tiles = spans(channels, most), spans(filters, most)

    w_tile = nl.ndarray(
        (min(channels, most), len(channel_tiles), len(taps), filters), weight.dtype, buffer=nl.sbuf
    )
    for c, (c0, c1) in enumerate(channel_tiles):
        for t, (i, j) in enumerate(taps):
            nisa.dma_copy(w_tile[: c1 - c0, c, t], weight[:, c0:c1, i, j].permute(1, 0))
    b_tile = None
    if bias is not None:
        b_tile = nl.ndarray((min(filters, most), len(filter_tiles)), nl.float32, buffer=nl.sbuf)
        for f, (f0, f1) in enumerate(filter_tiles):
            nisa.dma_copy(b_tile[: f1 - f0, f : f + 1], bias.reshape(filters, 1)[f0:f1])

    for image in range(images):
        shape = min(channels, most), len(channel_tiles), high, broad
        make = nl.zeros if padding else nl.ndarray
        x_tile = make(shape, x.dtype, buffer=nl.sbuf)
        for c, (c0, c1) in enumerate(channel_tiles):
            inside = x_tile[: c1 - c0, c, padding : padding + height, padding : padding + width]
            nisa.dma_copy(inside, x[image, c0:c1])
        for f, (f0, f1) in enumerate(filter_tiles):
            for r0, r1 in spans(rows, bank // columns):
                sums = nl.ndarray((f1 - f0, r1 - r0, columns), nl.float32, buffer=nl.psum)
                for c, (c0, c1) in enumerate(channel_tiles):
                    for t, (i, j) in enumerate(taps):
                        seen = x_tile[
                            : c1 - c0, c,
                            r0 * stride + i : (r1 - 1) * stride + i + 1 : stride,
                            j : (columns - 1) * stride + j + 1 : stride,
                        ]  # fmt: skip
                        nisa.nc_matmul(sums, w_tile[: c1 - c0, c, t, f0:f1], seen)
                result = nl.ndarray(sums.shape, x.dtype, buffer=nl.sbuf)
                if b_tile is None:
                    nisa.tensor_copy(result, sums)
                else:
                    nisa.tensor_scalar(result, sums, nl.add, b_tile[: f1 - f0, f : f + 1])
                nl.store(out[image, f0:f1, r0:r1], result)
    return out


def conv2d_reference(x, weight, bias=None, stride=1, padding=0):
    """Convolution in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))
    out = np.einsum("nchwij,fcij->nfhw", windows[:, :, ::stride, ::stride], weight)
    return out if bias is None else out + np.asarray(bias, np.float64)[:, None, None]
