"""The machine in Amaranth's own simulator: slow, needs nothing, sees every signal."""

import time

import numpy as np

from ...rtl.arch.config import HbmConfig
from ..harness import Stepper
from ..top import SimTop
from .base import BUSY, STATUS, BaseMachine

__all__ = ["PysimMachine"]

_PATIENCE = 10000
"""Cycles that the register bus may take to answer."""


class PysimMachine(BaseMachine):
    """A core with its HBM under Amaranth's simulator.

    Parameters
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`

    Attributes
    ----------
    top : :class:`~makalu.sim.top.SimTop`
        The design; :meth:`peek` tells what its signals are.
    """

    name = "pysim"
    _slice = 64

    def __init__(self, config, hbm=None):
        start = time.perf_counter()
        self.config = config
        self.hbm = HbmConfig() if hbm is None else hbm
        self.top = SimTop(config=config, hbm=self.hbm)
        self._stepper: Stepper | None = Stepper(self.top, domain=self.top.sync_domain)
        self._array_memory = self.top.hbm.data
        self.build_s = time.perf_counter() - start

    @property
    def _open(self):
        if self._stepper is None:
            raise RuntimeError("the machine is closed")
        return self._stepper

    @property
    def cycles(self):
        """Clock cycles simulated so far."""
        return self._open.cycles

    def peek(self, signal):
        """Return what a signal of :attr:`top` is."""
        return self._open.get(signal)

    def step(self, cycles):
        """Let ``cycles`` cycles pass."""
        self._open.step(cycles)

    def close(self):
        """Free the machine; may be called twice."""
        self._stepper = None

    # Registers ------------------------------------------------------------------------------------

    def reg_write(self, address, value):
        """Write a register."""
        bus, s = self.top.host, self._open
        s.set(bus.awaddr, address)
        s.set(bus.wdata, value)
        s.set(bus.wstrb, 0b1111)
        for signal in (bus.awvalid, bus.wvalid, bus.bready):
            s.set(signal, 1)
        response = -1
        for _ in range(_PATIENCE):
            aw = s.get(bus.awvalid) and s.get(bus.awready)
            w = s.get(bus.wvalid) and s.get(bus.wready)
            if s.get(bus.bvalid):
                response = s.get(bus.bresp)
            s.step()
            if aw:
                s.set(bus.awvalid, 0)
            if w:
                s.set(bus.wvalid, 0)
            if response >= 0:
                break
        for signal in (bus.awvalid, bus.wvalid, bus.bready):
            s.set(signal, 0)
        self._checked("write", address, response)

    def reg_read(self, address):
        """Return what a register holds."""
        bus, s = self.top.host, self._open
        s.set(bus.araddr, address)
        s.set(bus.arvalid, 1)
        s.set(bus.rready, 1)
        response, value = -1, 0
        for _ in range(_PATIENCE):
            ar = s.get(bus.arvalid) and s.get(bus.arready)
            if s.get(bus.rvalid):
                response, value = s.get(bus.rresp), s.get(bus.rdata)
            s.step()
            if ar:
                s.set(bus.arvalid, 0)
            if response >= 0:
                break
        s.set(bus.arvalid, 0)
        s.set(bus.rready, 0)
        self._checked("read", address, response)
        return value

    def _run(self, cycles):
        end = self.cycles + cycles
        while True:
            if not self.reg_read(STATUS) & BUSY:
                return False
            if self.cycles >= end:
                return True

    # Back doors -----------------------------------------------------------------------------------

    def _bytes(self, memory, row_bytes, first=0, count=None):
        rows = self._open.memory_read(memory, first, memory.depth if count is None else count)
        blob = b"".join(row.to_bytes(row_bytes, "little") for row in rows)
        return np.frombuffer(blob, np.uint8)

    def _set_bytes(self, memory, row_bytes, contents, first=0):
        blob = contents.tobytes()
        self._open.memory_write(
            memory,
            first,
            [
                int.from_bytes(blob[i : i + row_bytes], "little")
                for i in range(0, len(blob), row_bytes)
            ],
        )

    def _hbm_read(self, address, nbytes):
        first, last = address // 8, (address + nbytes + 7) // 8
        words = self._bytes(self._array_memory, 8, first, last - first)
        return words[address - 8 * first :][:nbytes].tobytes()

    def _hbm_write(self, address, data):
        if not len(data):
            return
        first, last = address // 8, (address + len(data) + 7) // 8
        words = self._bytes(self._array_memory, 8, first, last - first).copy()
        words[address - 8 * first :][: len(data)] = data
        self._set_bytes(self._array_memory, 8, words, first)

    def _sbuf_bank(self, partition, bank):
        return self._bytes(self.top.core.sbuf.slices[partition].banks[bank], 16)

    def _sbuf_bank_write(self, partition, bank, contents):
        self._set_bytes(self.top.core.sbuf.slices[partition].banks[bank], 16, contents)

    def _psum_bank(self, partition, bank):
        return self._bytes(self.top.core.psum.slices[partition].banks[bank], 4)

    def _psum_bank_write(self, partition, bank, contents):
        self._set_bytes(self.top.core.psum.slices[partition].banks[bank], 4, contents)
