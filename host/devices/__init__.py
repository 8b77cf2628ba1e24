"""The ways to run a program: one module per way, one interface for the device.

A module has ``missing(config)`` (why it cannot be used here, or ``None``) and ``start(config, hbm,
on_build)``, which returns a runner; ``on_build`` (or ``None``) is told what is being done and the
fraction of the whole behind.

===============================  =================================================================
member                           meaning
===============================  =================================================================
``name``, ``has_cycles``         of the backend
``build_s``                      seconds spent on building it
``hbm_write(address, data)``     bytes into HBM
``hbm_read(address, size)``      bytes of HBM
``run(queues, progress)``        run ``{Engine: (base, count)}`` to the end; counters by name.
                                 Raises :exc:`Fault`
``reset()``                      stop everything; memories keep their contents
``sbuf()``, ``psum()``           ``[partitions, bytes]``, copies
``save(path, note)``             the complete state in a file, with a note of the host; optional
``restore(path)``                take on that state; the note. Optional
``record(path, ...)``            waveforms of what passes in a block. Optional
``close()``                      let go of everything
===============================  =================================================================

``progress`` is called with (instructions issued, instructions in all, cycles or ``None``).
"""

import importlib
from dataclasses import dataclass

from ...rtl.arch.config import HbmConfig
from ...rtl.arch.isa import Engine, ErrorCode, WaitMode
from ..errors import ArgumentError, ToolMissing, UsageError

__all__ = ["BACKENDS", "Fault", "QueueState", "choose", "default_hbm", "missing", "start"]

BACKENDS = ("native", "verilator", "pysim", "golden")
"""Backends in the order in which ``auto`` considers them."""

VERILATOR_ROWS = 32
"""Largest array for which ``auto`` takes Verilator: a model of more takes hours to compile."""

PYSIM_ROWS = 8
"""Largest array for which ``auto`` takes Amaranth's simulator: about 150 cycles per second."""


@dataclass(frozen=True)
class QueueState:
    """An instruction queue as the registers show it."""

    engine: Engine
    state: str
    issued: int
    pc: int
    wait: int = 0
    mode: WaitMode = WaitMode.NONE
    semaphore: int = 0
    wanted: int = 0
    seen: int = 0


class Fault(Exception):
    """The core stopped: what its error registers and queues say.

    ``source`` is a queue number, or 16 + DMA engine.
    """

    def __init__(self, code, *, source, field, pc, address, queues):
        super().__init__(code)
        self.code = ErrorCode(code)
        self.source, self.field, self.pc, self.address = source, field, pc, address
        self.queues = tuple(queues)


def _module(name):
    if not isinstance(name, str):
        raise ArgumentError(f"backend must be a name, not {name!r}: auto, {', '.join(BACKENDS)}")
    if name not in BACKENDS:
        raise UsageError(
            f"no backend is called {name!r}; choose auto or one of {', '.join(BACKENDS)}"
        )
    return importlib.import_module(f".{name}", __name__)


def missing(name, config):
    """Why backend ``name`` cannot run ``config`` on this machine, or ``None``."""
    return _module(name).missing(config)


def choose(name, config):
    """Backend to use for ``name`` (perhaps ``"auto"``) and why.

    Raises
    ------
    :exc:`UsageError`
        If there is no such backend; the message lists those there are.
    :exc:`ToolMissing`
        If the backend asked for by name cannot be used.
    """
    if not isinstance(name, str) or name != "auto":
        reason = missing(name, config)
        if reason is not None:
            raise ToolMissing(f"backend {name}: {reason}")
        return name, "asked for"
    passed_over = []
    for candidate in BACKENDS:
        reason = missing(candidate, config)
        size = f"{config.rows} x {config.cols} array"
        if reason is None and candidate == "verilator" and config.rows > VERILATOR_ROWS:
            reason = f"takes hours to compile for a {size}"
        if reason is None and candidate == "pysim" and config.rows > PYSIM_ROWS:
            reason = f"too slow for a {size}"
        if reason is None:
            why = {
                "native": "the fastest simulation of the hardware",
                "verilator": "the fastest simulation of the hardware that can be built here",
                "pysim": "simulates the hardware without a compiler",
                "golden": "the functional model: same numbers, no cycles",
            }[candidate]
            if passed_over:
                why += " (" + "; ".join(passed_over) + ")"
            return candidate, why
        passed_over.append(f"{candidate}: {reason}")
    raise ToolMissing("; ".join(passed_over))


def default_hbm(name, config):
    """HBM for a device that was not told: as much as the backend holds comfortably."""
    if name == "pysim":
        return HbmConfig(size_bytes=1 << 20)
    return HbmConfig(size_bytes=1 << 26 if config.rows < 64 else 1 << 28)


def start(name, config, hbm, on_build=None, keep=None):
    """Build and start backend ``name``; ``keep`` is a folder for the code that it is made of.

    Raises
    ------
    :exc:`UsageError`
        If there is no code to keep.
    """
    if keep is None:
        return _module(name).start(config, hbm, on_build)
    if name != "native":
        raise UsageError(f"keep={str(keep)!r}: backend {name} keeps no code; native does")
    return _module(name).start(config, hbm, on_build, keep)
