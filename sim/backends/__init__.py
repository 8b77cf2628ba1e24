"""Ways to simulate the hardware: each builds a machine and steps it.

A machine is a core with its HBM, and nothing that a host adds: programs, tensors and reports are
made of it in ``host``.
"""

from typing import Protocol

__all__ = ["Machine"]


class Machine(Protocol):
    """A core with its HBM under one simulator.

    Register accesses are AXI4-Lite transactions in the simulation and take cycles. Everything else
    goes through a back door and takes none; it is meant for the time in which the core is idle.

    Attributes
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`
    name : :class:`str`
        Of the simulator.
    build_s : :class:`float`, seconds
        What it took to build or load.
    cycles : :class:`int`
        Clock cycles simulated so far.
    """

    config: object
    hbm: object
    name: str
    build_s: float
    cycles: int

    def hbm_write(self, address, data):
        """Write bytes to HBM from ``address`` on."""

    def hbm_read(self, address, nbytes):
        """Return ``nbytes`` bytes of HBM."""

    def reg_write(self, address, value):
        """Write a register.

        Raises
        ------
        :exc:`RuntimeError`
            If the core answers with an error, or not at all.
        """

    def reg_read(self, address):
        """Return what a register holds."""

    def run(self, max_cycles=None, progress=None):
        """Step until the status register says that the core is not busy; return the cycles.

        Ends early, with the core still busy, when ``max_cycles`` have passed. ``progress`` is
        called now and then with the cycles so far.
        """

    def step(self, cycles):
        """Let ``cycles`` cycles pass."""

    def sbuf_read(self):
        """Return SBUF: uint8 [partitions, sbuf_bytes]."""

    def sbuf_write(self, array):
        """Set SBUF."""

    def psum_read(self):
        """Return PSUM: uint8 [partitions, psum_bytes], bank by bank."""

    def psum_write(self, array):
        """Set PSUM."""

    def close(self):
        """Free the machine; may be called twice."""
