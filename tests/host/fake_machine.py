"""A machine for the register driver's tests: the golden model behind the register map.

It follows the words of ``rtl/arch/registers.py``, refuses what the hardware refuses, and runs only
in ``run``.
"""

import numpy as np
from makalu.rtl.arch.events import COUNTERS
from makalu.rtl.arch.isa import Engine, ErrorCode
from makalu.rtl.arch.registers import (
    COUNTER_BASE,
    ID_VALUE,
    QUEUE_STATE,
    REGISTERS,
    VERSION_VALUE,
    address_of,
    queue_register,
)
from makalu.sim.golden import GoldenCore, GoldenDeadlock, GoldenError

BY_ADDRESS = {register.address: register for register in REGISTERS}


class FakeMachine:
    name = "fake"
    build_s = 0.5

    def __init__(self, config, hbm, identity=None):
        self.config, self.hbm = config, hbm
        self.core = GoldenCore(config, hbm.size_bytes)
        self.values = {
            "id": ID_VALUE,
            "version": VERSION_VALUE,
            "fingerprint": config.fingerprint,
            "rows": config.rows,
            **(identity or {}),
        }
        self.busy = self.done = self.error = False
        self.resetting = 0
        self.counters = {}
        self.cleared = False
        self.closed = False

    # The protocol
    def hbm_write(self, address, data):
        assert address + len(data) <= self.hbm.size_bytes
        self.core.hbm[address : address + len(data)] = np.frombuffer(data, np.uint8)

    def hbm_read(self, address, size):
        return self.core.hbm[address : address + size].tobytes()

    def sbuf_read(self):
        return self.core.sbuf.copy()

    def psum_read(self):
        return self.core.psum.copy()

    def close(self):
        self.closed = True

    def reg_write(self, address, value):
        register = BY_ADDRESS[address]
        assert "w" in register.access, register
        assert 0 <= value < 1 << 32
        if register.name == "control":
            if value & 2:
                self.busy = self.done = self.error = False
                self.core.reset()
                self.resetting = 3
            elif value & 1 and not (self.busy or self.error or self.resetting):
                self.busy, self.done = True, False
        elif register.name == "clear":
            assert not self.busy
            self.cleared = True
        else:
            self.values[register.name] = value

    def reg_read(self, address):
        if address >= COUNTER_BASE:
            index, high = divmod(address - COUNTER_BASE, 8)
            value = self.counters.get(COUNTERS[index].full_name, 0)
            return value >> 32 if high else value & 0xFFFFFFFF
        name = BY_ADDRESS[address].name
        if name == "status":
            self.resetting = max(self.resetting - 1, 0)
            return self.busy | self.done << 1 | self.error << 2 | bool(self.resetting) << 3
        return self.values.get(name, 0)

    def run(self, max_cycles=None, progress=None):
        if not self.busy:
            return 0
        assert self.cleared, "semaphores must be cleared before a run"
        self.cleared = self.busy = False
        queues = {
            engine: (
                self.reg_read(queue_register(engine, "base_lo"))
                | self.reg_read(queue_register(engine, "base_hi")) << 32,
                self.reg_read(queue_register(engine, "count")),
            )
            for engine in Engine
        }
        try:
            counters = self.core.run(queues)
        except GoldenError as error:
            self.fail(error, queues)
            return 1000
        self.done = True
        self.counters = {**counters, "core_cycles": (1 << 32) + 7, "pe_busy": 12, "dma_busy": 40}
        for engine, (_, count) in queues.items():
            self.values[f"queue_{engine.name.lower()}_issued"] = count
        return 1000

    def fail(self, error, queues):
        self.error = True
        self.values["error"] = error.code | error.source << 8 | error.field << 16
        self.values["error_pc_lo"] = error.pc
        self.values["error_address_lo"] = error.address & 0xFFFFFFFF
        self.values["error_address_hi"] = error.address >> 32
        blocked = {b.engine: b for b in getattr(error, "blocked", ())}
        for engine, (base, count) in queues.items():
            name = f"queue_{engine.name.lower()}"
            b = blocked.get(engine)
            state = QUEUE_STATE["waiting_semaphore" if b else "done"]
            self.values[f"{name}_state"] = state
            self.values[f"{name}_issued"] = count
            self.values[f"{name}_pc_lo"] = base
            if b:
                self.values[f"{name}_state"] |= b.wait << 4 | b.mode << 8 | b.semaphore << 16
                self.values[f"{name}_wanted"] = b.wanted
                self.values[f"{name}_seen"] = b.seen
                self.values[f"{name}_pc_lo"] = b.pc
                self.values[f"{name}_issued"] = b.issued
        assert isinstance(error, GoldenDeadlock) == (error.code == ErrorCode.WATCHDOG)
        assert address_of("error_pc_lo")
