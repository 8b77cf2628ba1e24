"""HBM allocation: first fit, freed pieces are joined with their neighbours and used again."""

from bisect import bisect_left, insort

from .errors import HbmOutOfMemory

__all__ = ["ALIGNMENT", "Allocator"]

ALIGNMENT = 256
"""Bytes; a multiple of what instructions and descriptors need, and one DMA burst."""


class Allocator:
    """Addresses ``0 .. size_bytes`` in pieces.

    Parameters
    ----------
    size_bytes : :class:`int`, bytes
    """

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes
        self._free = [(0, size_bytes)] if size_bytes else []  # (address, size), ascending
        self._used = {}

    @property
    def free_bytes(self):
        """Bytes free in all."""
        return sum(size for _, size in self._free)

    @property
    def largest_bytes(self):
        """Bytes free in one piece."""
        return max((size for _, size in self._free), default=0)

    def copy(self):
        """Another allocator in the same state, to try things on."""
        other = Allocator(self.size_bytes)
        other._free, other._used = list(self._free), dict(self._used)
        return other

    def allocate(self, size, what):
        """Address of ``size`` bytes; ``what`` names them in the error.

        Raises
        ------
        :exc:`HbmOutOfMemory`
        """
        needed = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        for i, (address, room) in enumerate(self._free):
            if room >= needed:
                if room == needed:
                    del self._free[i]
                else:
                    self._free[i] = (address + needed, room - needed)
                self._used[address] = needed
                return address
        raise HbmOutOfMemory(
            what,
            needed=needed,
            free=self.free_bytes,
            largest=self.largest_bytes,
            total=self.size_bytes,
        )

    def free(self, address):
        """Give a piece back."""
        size = self._used.pop(address)
        i = bisect_left(self._free, (address, 0))
        if i < len(self._free) and self._free[i][0] == address + size:
            size += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == address:
            before, room = self._free.pop(i - 1)
            address, size = before, room + size
        insort(self._free, (address, size))
