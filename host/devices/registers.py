"""Drive a core through its registers: the same for every simulation of the hardware.

A machine is what steps the hardware: ``hbm_read``, ``hbm_write``, ``reg_read``, ``reg_write``,
``run``, ``sbuf_read``, ``psum_read``, ``close`` (see :mod:`...sim.backends`). Only the registers of
:mod:`...rtl.arch.registers` are used to control it.
"""

import contextlib
import time

from ...rtl.arch.config import AXI_ADDR_BITS
from ...rtl.arch.events import COUNTERS
from ...rtl.arch.isa import Engine, ErrorCode, WaitMode
from ...rtl.arch.registers import (
    ID_VALUE,
    QUEUE_STATE,
    REGISTERS,
    VERSION_VALUE,
    address_of,
    counter_address,
    queue_register,
)
from ...sim.native.checkpoint import CheckpointError
from ...sim.native.signals import UnknownSignal, WindowError
from ..errors import FileFormatError, MakaluError, UsageError
from . import Fault, QueueState

__all__ = ["RegisterRunner"]

WATCHDOG_CYCLES = 20_000
"""Without progress; a transfer takes a few hundred cycles to start and then moves in every one."""

FIRST_STEP_CYCLES = 256
STEP_S = 0.5
"""Between looks at the progress, where somebody wants to see it: cycles at first, then seconds."""

RESET_CYCLES = 100_000
"""A reset drains what is under way; longer than this it never takes."""

_STATES = {value: name for name, value in QUEUE_STATE.items()}
_FIELDS = {
    register.name: {name: (bit, width) for name, bit, width in register.fields}
    for register in REGISTERS
}


def _unpack(register, value):
    return {
        name: value >> bit & (1 << width) - 1 for name, (bit, width) in _FIELDS[register].items()
    }


def _pack(register, **values):
    return sum(value << _FIELDS[register][name][0] for name, value in values.items())


class RegisterRunner:
    """See :mod:`.`; runs programs on a machine.

    Parameters
    ----------
    machine : object
        See above.
    watchdog_cycles : :class:`int`, cycles
    """

    has_cycles = True

    def __init__(self, machine, *, watchdog_cycles=WATCHDOG_CYCLES):
        self.machine = machine
        self.name = machine.name
        self.config = machine.config
        self.build_s = machine.build_s
        self._identify()
        self._write("watchdog", watchdog_cycles)

    # Registers ------------------------------------------------------------------------------------

    def _read(self, name):
        return self.machine.reg_read(address_of(name))

    def _write(self, name, value):
        self.machine.reg_write(address_of(name), value)

    def _read_wide(self, name):
        return self._read(f"{name}_lo") | self._read(f"{name}_hi") << 32

    def _status(self):
        return _unpack("status", self._read("status"))

    def _identify(self):
        expected = {
            "id": ID_VALUE,
            "version": VERSION_VALUE,
            "fingerprint": self.config.fingerprint,
            "rows": self.config.rows,
        }
        for name, value in expected.items():
            seen = self._read(name)
            if seen != value:
                raise MakaluError(
                    f"{self.name}: register {name} reads {seen:#x}, not {value:#x}: "
                    f"this is not the core {self.config!r}"
                )

    # Memories -------------------------------------------------------------------------------------

    def hbm_write(self, address, data):
        """Put bytes into HBM."""
        self.machine.hbm_write(address, data)

    def hbm_read(self, address, size):
        """Bytes of HBM."""
        return bytes(self.machine.hbm_read(address, size))

    def sbuf(self):
        """SBUF, a copy."""
        return self.machine.sbuf_read()

    def psum(self):
        """PSUM, a copy."""
        return self.machine.psum_read()

    def save(self, path, note):
        """Write the complete state to a file, with a note of the host."""
        self._able("save", "save its state")(path, note)

    def restore(self, path):
        """Take on the state in a file; the note."""
        restore = self._able("restore", "restore a state")
        try:
            return restore(path)
        except CheckpointError as error:
            raise FileFormatError(str(error)) from None
        except RuntimeError as error:  # waveforms are being recorded
            raise UsageError(str(error)) from None

    @contextlib.contextmanager
    def record(self, path, signals, start, cycles, lane):
        """Write waveforms of what passes in a block."""
        record = self._able("record", "write waveforms")
        try:
            recording = record(path, signals, start=start, cycles=cycles, lane=lane)
            with recording:
                yield
        except (UnknownSignal, WindowError) as error:
            raise UsageError(str(error)) from None

    def _able(self, name, what):
        """A function that not all machines have."""
        if not hasattr(self.machine, name):
            raise UsageError(f"backend {self.name} cannot {what}; backend native can")
        return getattr(self.machine, name)

    def close(self):
        """Let go of the machine."""
        self.machine.close()

    # Running --------------------------------------------------------------------------------------

    def begin(self, queues):
        """Start the queues."""
        for engine in Engine:
            base, count = queues.get(engine, (0, 0))
            self.machine.reg_write(queue_register(engine, "base_lo"), base & 0xFFFFFFFF)
            self.machine.reg_write(queue_register(engine, "base_hi"), base >> 32)
            self.machine.reg_write(queue_register(engine, "count"), count)
        self._write("clear", _pack("clear", semaphores=1))
        self._write("control", _pack("control", start=1))

    def run(self, queues, progress=None):
        """Run the queues to the end; every counter by name."""
        self.begin(queues)
        status = self._wait(queues, progress)
        if status["error"]:
            raise self._fault()
        if not status["done"]:
            raise MakaluError(f"{self.name}: the core stopped, but is neither done nor in error")
        return self.counters()

    def _wait(self, queues, progress):
        if progress is None:
            self.machine.run()
            return self._status()
        total = sum(count for _, count in queues.values())
        step = FIRST_STEP_CYCLES
        while True:
            began = time.perf_counter()
            self.machine.run(max_cycles=step)
            took = time.perf_counter() - began
            status = self._status()
            progress(self._issued(queues), total, self._cycles())
            if not status["busy"]:
                return status
            step = max(int(step * min(STEP_S / max(took, 1e-6), 4)), 1)

    def _cycles(self):
        address = counter_address("core_cycles")
        low = self.machine.reg_read(address)  # latches the high word
        return low | self.machine.reg_read(address + 4) << 32

    def _issued(self, queues):
        return sum(
            self.machine.reg_read(queue_register(engine, "issued"))
            for engine, (_, count) in queues.items()
            if count
        )

    def counters(self):
        """Every counter of the last run by name."""
        values = {}
        for event in COUNTERS:
            address = counter_address(event.full_name)
            low = self.machine.reg_read(address)
            values[event.full_name] = low | self.machine.reg_read(address + 4) << 32
        return values

    def queue_state(self, engine):
        """What a queue is doing."""
        name = f"queue_{engine.name.lower()}"
        state = _unpack(f"{name}_state", self._read(f"{name}_state"))
        mode = state["mode"]
        return QueueState(
            engine=engine,
            state=_STATES.get(state["state"], f"state_{state['state']}"),
            issued=self._read(f"{name}_issued"),
            pc=self._read_wide(f"{name}_pc"),
            wait=state["wait"],
            mode=WaitMode(mode) if mode in list(WaitMode) else WaitMode.NONE,
            semaphore=state["semaphore"],
            wanted=self._read(f"{name}_wanted"),
            seen=self._read(f"{name}_seen"),
        )

    def _fault(self):
        error = _unpack("error", self._read("error"))
        within = (1 << AXI_ADDR_BITS) - 1
        return Fault(
            ErrorCode(error["code"]),
            source=error["source"],
            field=error["field"],
            pc=self._read_wide("error_pc") & within,
            address=self._read_wide("error_address"),
            queues=[self.queue_state(engine) for engine in Engine],
        )

    def reset(self):
        """Stop everything; memories keep their contents."""
        self._write("control", _pack("control", reset=1))
        cycles = 0
        while self._status()["resetting"]:
            if cycles > RESET_CYCLES:
                raise MakaluError(f"{self.name}: the reset did not end after {cycles} cycles")
            cycles += max(self.machine.run(max_cycles=64), 1)
