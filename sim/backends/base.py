"""What the machines share: the layout of the on-chip memories, the run loop."""

import numpy as np

from ...rtl.arch.registers import address_of

__all__ = ["BUSY", "BaseMachine"]

BUSY = 1
"""Mask of ``busy`` in the status register."""


class BaseMachine:
    """A :class:`~.Machine` in terms of a few primitives that each simulator provides.

    A subclass provides ``_sbuf_bank(partition, bank)`` and ``_psum_bank(partition, bank)``, which
    return the bytes of one bank as a uint8 array, ``_sbuf_bank_write(partition, bank, bytes)`` and
    ``_psum_bank_write(...)``, ``_hbm_read(address, nbytes)`` and ``_hbm_write(address, bytes)``,
    and ``_run(cycles)``, which returns whether the core is still busy.
    """

    _SBUF_BANKS = 2
    _SBUF_ROW_BYTES = 16

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _check_range(self, address, nbytes):
        if address < 0 or nbytes < 0 or address + nbytes > self.hbm.size_bytes:
            raise ValueError(
                f"HBM bytes {address:#x} to {address + nbytes:#x} do not lie in the "
                f"{self.hbm.size_bytes:#x} bytes there are"
            )

    def hbm_write(self, address, data):
        """Write bytes to HBM from ``address`` on."""
        data = np.frombuffer(data, np.uint8)
        self._check_range(address, len(data))
        self._hbm_write(address, data)

    def hbm_read(self, address, nbytes):
        """Return ``nbytes`` bytes of HBM."""
        self._check_range(address, nbytes)
        return self._hbm_read(address, nbytes)

    def run(self, max_cycles=None, progress=None):
        """Step until the core is not busy, or ``max_cycles`` have passed; return the cycles."""
        start = self.cycles
        while True:
            left = self._slice if max_cycles is None else start + max_cycles - self.cycles
            if left <= 0:
                break
            if not self._run(min(left, self._slice)):
                break
            if progress is not None:
                progress(self.cycles - start)
        if progress is not None:
            progress(self.cycles - start)
        return self.cycles - start

    def _checked(self, what, address, response):
        if response:
            reason = {-1: "no answer", 2: "SLVERR", 3: "DECERR"}.get(response, str(response))
            raise RuntimeError(f"{what} of register {address:#05x}: {reason}")

    def _array(self, array, nbytes):
        array = np.asarray(array)
        if array.dtype != np.uint8 or array.shape != (self.config.partitions, nbytes):
            raise ValueError(
                f"expected uint8 [{self.config.partitions}, {nbytes}], "
                f"not {array.dtype} {list(array.shape)}"
            )
        return array

    def sbuf_read(self):
        """Return SBUF: uint8 [partitions, sbuf_bytes]."""
        config = self.config
        out = np.empty((config.partitions, config.sbuf_bytes), np.uint8)
        rows = out.reshape(config.partitions, -1, self._SBUF_BANKS, self._SBUF_ROW_BYTES)
        for partition in range(config.partitions):
            for bank in range(self._SBUF_BANKS):
                contents = self._sbuf_bank(partition, bank)
                rows[partition, :, bank] = contents.reshape(-1, self._SBUF_ROW_BYTES)
        return out

    def sbuf_write(self, array):
        """Set SBUF."""
        config = self.config
        array = self._array(array, config.sbuf_bytes)
        rows = array.reshape(config.partitions, -1, self._SBUF_BANKS, self._SBUF_ROW_BYTES)
        for partition in range(config.partitions):
            for bank in range(self._SBUF_BANKS):
                contents = np.ascontiguousarray(rows[partition, :, bank]).reshape(-1)
                self._sbuf_bank_write(partition, bank, contents)

    def psum_read(self):
        """Return PSUM: uint8 [partitions, psum_bytes], bank by bank."""
        config = self.config
        out = np.empty((config.partitions, config.psum_banks, config.psum_bank_bytes), np.uint8)
        for partition in range(config.partitions):
            for bank in range(config.psum_banks):
                out[partition, bank] = self._psum_bank(partition, bank)
        return out.reshape(config.partitions, config.psum_bytes)

    def psum_write(self, array):
        """Set PSUM."""
        config = self.config
        array = self._array(array, config.psum_bytes)
        banks = array.reshape(config.partitions, config.psum_banks, config.psum_bank_bytes)
        for partition in range(config.partitions):
            for bank in range(config.psum_banks):
                contents = np.ascontiguousarray(banks[partition, bank])
                self._psum_bank_write(partition, bank, contents)


STATUS = address_of("status")
