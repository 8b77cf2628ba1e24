"""Which elements of a tensor have been written, exactly: a mask that views select from."""

import math

import numpy as np

from .tensor import PARTITION, Access

__all__ = ["Written"]


class Written:
    """The elements of one HBM tensor, SBUF tile or PSUM tile that have been written so far.

    Parameters
    ----------
    storage : :class:`~.tensor.Storage`

    Attributes
    ----------
    regions : set
        For whoever asks for the same regions again and again: those that are known as written.
    """

    __slots__ = ("_mask", "_pitch", "_unit", "regions", "storage")

    def __init__(self, storage):
        self.storage = storage
        self.regions = set()
        self._unit = storage.dtype.bytes  # bytes of a cell of the mask
        self._pitch = storage.partition_bytes // self._unit  # cells of a partition
        partitions = 1 if storage.buffer == "hbm" else storage.shape[0]
        self._mask = np.zeros(partitions * self._pitch, bool)

    def all(self):
        """Whether every element of the tensor is written."""
        return bool(self._mask.all())

    def cells(self, view):
        """The part of the mask that a view or an access selects, as an array that can be set.

        The array has the axes of the view (of an access: partitions, then its dimensions, outermost
        first) and one more where a number of the view is wider than those of the tensor.
        """
        if type(view) is Access:
            shape = [view.count, *(n for _, n in reversed(view.dims))]
            size = view.dtype.bytes
            steps = [PARTITION, *(step * size for step, _ in reversed(view.dims))]
            first = view.start * PARTITION + view.offset
        else:
            shape, steps, first = list(view.shape), view.steps, view.offset
            size = view.dtype.bytes
        if 0 in shape:
            return np.zeros(shape, bool)
        if view.dtype is not self.storage.dtype:
            self._refine(math.gcd(size, first % PARTITION, *(s % PARTITION for s in steps)))
        unit, pitch = self._unit, self._pitch
        part, within = divmod(first, PARTITION)
        strides = []
        for step in steps:
            up, inner = divmod(step + PARTITION // 2, PARTITION)
            strides.append(up * pitch + (inner - PARTITION // 2) // unit)
        if size > unit:
            shape.append(size // unit)
            strides.append(1)
        return np.ndarray(shape, bool, self._mask, part * pitch + within // unit, strides)

    def _refine(self, unit):
        """Make cells small enough for numbers of another width, or at odd bytes."""
        unit = math.gcd(unit, self._unit)
        if unit < self._unit:
            times = self._unit // unit
            self._mask = np.repeat(self._mask, times)
            self._pitch *= times
            self._unit = unit

    def missing(self, view=None):
        """What of a view, or of all of the tensor, is not written, for a message.

        Counts elements of the tensor, then gives the first run of them by index and by bytes, on
        chip bytes of the partition: ``3 of 8 elements, the first at t[1, 2:4] (bytes 8:16 of
        partition 1)``.
        """
        storage, size = self.storage, self.storage.dtype.bytes
        wanted = Written(storage)
        wanted._refine(self._unit)
        target = wanted._mask if view is None else wanted.cells(view)
        target[...] = True
        elements = np.asarray(wanted._mask.reshape(-1, size // self._unit).any(axis=1))
        gaps = np.asarray((wanted._mask & ~self._mask).reshape(len(elements), -1).any(axis=1))
        first, columns = int(np.argmax(gaps)), storage.shape[-1]
        rest = gaps[first : (first // columns + 1) * columns]
        length = len(rest) if rest.all() else int(np.argmin(rest))
        *outer, column = (int(i) for i in np.unravel_index(first, storage.shape))
        run = f"{column}" if length == 1 else f"{column}:{column + length}"
        part, low = divmod(first * size, storage.partition_bytes)
        place = f"bytes {low}:{low + length * size}"
        if storage.buffer != "hbm":
            place += f" of partition {part}"
        return (
            f"{np.count_nonzero(gaps)} of {np.count_nonzero(elements)} elements, the first at "
            f"{storage.name}[{', '.join([*(str(i) for i in outer), run])}] ({place})"
        )
