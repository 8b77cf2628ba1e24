"""The host's window: :data:`~..arch.registers.REGISTERS` behind AXI4-Lite.

This component holds what the host sets, forwards what it asks for as strobes, and shows what the
other parts of the control block present. Which address is what comes from :mod:`..arch.registers`.
"""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..arch.config import ADDRESS_BITS as BUS_ADDRESS_BITS
from ..arch.config import AXI_ADDR_BITS
from ..arch.events import COUNTERS
from ..arch.isa import Engine, UpdateMode
from ..arch.registers import (
    ADDRESS_BITS,
    COUNTER_BASE,
    ID_VALUE,
    REGISTERS,
    SEMAPHORE_BASE,
    VERSION_VALUE,
    queue_register,
)
from ..interfaces import Update
from ..lib.axi import AXI4Lite, Resp
from .counters import READ_CYCLES
from .queue import QueueStatus

__all__ = ["WATCHDOG_RESET", "HostRegisters"]

WATCHDOG_RESET = 65536
"""Watchdog limit after a reset, in cycles."""

_FIELDS = {
    register.name: {name: (bit, width) for name, bit, width in register.fields}
    for register in REGISTERS
}


def _pack(register, values):
    """A register's value from its named fields."""
    word = 0
    for name, (bit, width) in _FIELDS[register].items():
        word = word | (values[name] & (1 << width) - 1) << bit
    return word


class HostRegisters(wiring.Component):
    """AXI4-Lite subordinate with the core's registers.

    Accesses that :mod:`..arch.registers` does not allow are answered with SLVERR and change
    nothing. Beyond what is said there:

    - reading the low word of a counter latches the whole count; reading the high word of the same
      counter next gives the other half of what was latched, otherwise that of the count now;
    - a semaphore can be written only while the core is not busy (else SLVERR); accesses to
      semaphores wait for the end of a sweep;
    - ``clear`` while busy is answered with SLVERR; a start that is ignored is answered with OKAY.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    host : :py:`In(AXI4Lite)`
    wait : :py:`In(1)`
        Accept no write (while the core comes up).
    start, reset, clear : :py:`Out(1)`
        Strobes: the host wrote this bit. ``reset`` wins over ``start``.
    watchdog : :py:`Out(32)`
    base, count : :py:`Out(64).array(len(Engine))`, :py:`Out(32).array(len(Engine))`
    busy, done, failed, resetting : :py:`In(1)`
    error_code, error_source, error_field, error_pc, error_address : inputs
    queues : :py:`In(QueueStatus).array(len(Engine))`
    semaphore : :py:`Out(stream.Signature(Update))`
        Values the host sets.
    sweeping : :py:`In(1)`
    semaphore_index, semaphore_value : :py:`Out(8)`, :py:`In(32)`
        Combinational read.
    counter_read, counter_select, counter_value
        To :class:`~.counters.Counters`.

    Timing
    ------
    A write takes effect in the cycle after its address and data have both been taken: strobes are
    high in that cycle and ``bvalid`` in the next. Read data come four cycles after the address.
    One write and one read at a time, each independent of the other.
    """

    def __init__(self, *, config):
        self.config = config
        n = len(Engine)
        super().__init__(
            {
                "host": In(AXI4Lite(addr_bits=ADDRESS_BITS)),
                "wait": In(1),
                "start": Out(1),
                "reset": Out(1),
                "clear": Out(1),
                "watchdog": Out(32, init=WATCHDOG_RESET),
                "base": Out(64).array(n),
                "count": Out(32).array(n),
                "busy": In(1),
                "done": In(1),
                "failed": In(1),
                "resetting": In(1),
                "error_code": In(8),
                "error_source": In(8),
                "error_field": In(16),
                "error_pc": In(AXI_ADDR_BITS),
                "error_address": In(BUS_ADDRESS_BITS),
                "queues": In(QueueStatus).array(n),
                "semaphore": Out(stream.Signature(Update)),
                "sweeping": In(1),
                "semaphore_index": Out(8),
                "semaphore_value": In(32),
                "counter_read": Out(1),
                "counter_select": Out(range(len(COUNTERS))),
                "counter_value": In(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        self._writes(m)
        self._reads(m)
        return m

    def _in_semaphores(self, address):
        first = SEMAPHORE_BASE >> 2
        return (address[2:] >= first) & (address[2:] < first + self.config.semaphores)

    def _writes(self, m):
        host = self.host
        has_address, has_data = Signal(), Signal()
        address, value, strobe = Signal(ADDRESS_BITS), Signal(32), Signal(4)
        m.d.comb += [host.awready.eq(~has_address), host.wready.eq(~has_data)]
        with m.If(host.awvalid & host.awready):
            m.d.sync += [has_address.eq(1), address.eq(host.awaddr)]
        with m.If(host.wvalid & host.wready):
            m.d.sync += [has_data.eq(1), value.eq(host.wdata), strobe.eq(host.wstrb)]

        whole, in_semaphores = Signal(), Signal()
        ready, perform, good = Signal(), Signal(), Signal()
        m.d.comb += [
            whole.eq(strobe.all() & ~address[:2].any()),
            in_semaphores.eq(self._in_semaphores(address) & whole & ~self.busy),
            ready.eq(has_address & has_data & ~host.bvalid & ~self.wait),
            self.semaphore.valid.eq(ready & in_semaphores),
            self.semaphore.p.semaphore.eq((address - SEMAPHORE_BASE)[2:]),
            self.semaphore.p.mode.eq(UpdateMode.SET),
            self.semaphore.p.value.eq(value),
            perform.eq(ready & (~in_semaphores | self.semaphore.ready)),
        ]

        def bit(register, name):
            first, width = _FIELDS[register][name]
            return value[first : first + width]

        with m.If(in_semaphores):
            m.d.comb += good.eq(1)
        with m.Elif(whole):
            with m.Switch(address):
                for register in REGISTERS:
                    if "w" not in register.access:
                        continue
                    with m.Case(register.address):
                        m.d.comb += good.eq(1)
                        if register.name == "control":
                            reset = bit("control", "reset")
                            m.d.comb += [
                                self.reset.eq(perform & reset),
                                self.start.eq(perform & bit("control", "start") & ~reset),
                            ]
                        elif register.name == "clear":
                            wanted = bit("clear", "semaphores")
                            m.d.comb += [
                                good.eq(~(wanted & self.busy)),
                                self.clear.eq(perform & wanted & ~self.busy),
                            ]
                        else:
                            with m.If(perform):
                                m.d.sync += self._stored(register.name).eq(value)
        with m.If(perform):
            m.d.sync += [
                has_address.eq(0),
                has_data.eq(0),
                host.bvalid.eq(1),
                host.bresp.eq(Mux(good, Resp.OKAY, Resp.SLVERR)),
            ]
        with m.Elif(host.bready):
            m.d.sync += host.bvalid.eq(0)

    def _stored(self, name):
        """What the readable and writable register ``name`` stores."""
        if name == "watchdog":
            return self.watchdog
        for engine in Engine:
            prefix = f"queue_{engine.name.lower()}_"
            if name.startswith(prefix):
                return {
                    "base_lo": self.base[engine][:32],
                    "base_hi": self.base[engine][32:],
                    "count": self.count[engine],
                }[name.removeprefix(prefix)]
        raise KeyError(name)

    def _values(self):
        """Address of every readable register and its value."""
        by_name = {
            "id": ID_VALUE,
            "version": VERSION_VALUE,
            "fingerprint": self.config.fingerprint,
            "rows": self.config.rows,
            "status": _pack(
                "status",
                {
                    "busy": self.busy,
                    "done": self.done,
                    "error": self.failed,
                    "resetting": self.resetting,
                },
            ),
            "error": _pack(
                "error",
                {
                    "code": self.error_code,
                    "source": self.error_source,
                    "field": self.error_field,
                },
            ),
            "error_pc_lo": self.error_pc[:32],
            "error_pc_hi": self.error_pc[32:],
            "error_address_lo": self.error_address[:32],
            "error_address_hi": self.error_address[32:],
        }
        by_address = {}
        for engine in Engine:
            status = self.queues[engine]
            shown = {
                "state": _pack(
                    f"queue_{engine.name.lower()}_state",
                    {
                        "state": status.state,
                        "wait": status.wait,
                        "mode": status.mode,
                        "semaphore": status.semaphore,
                    },
                ),
                "wanted": status.wanted,
                "seen": status.seen,
                "pc_lo": status.pc[:32],
                "pc_hi": status.pc[32:],
                "issued": status.issued,
            }
            by_address |= {queue_register(engine, what): value for what, value in shown.items()}
        for register in REGISTERS:
            if "r" not in register.access or register.address in by_address:
                continue
            stored = "w" in register.access
            by_address[register.address] = (
                self._stored(register.name) if stored else by_name[register.name]
            )
        return by_address

    def _reads(self, m):
        host = self.host
        has_address = Signal()
        address = Signal(ADDRESS_BITS)
        m.d.comb += host.arready.eq(~has_address)
        with m.If(host.arvalid & host.arready):
            m.d.sync += [has_address.eq(1), address.eq(host.araddr)]

        aligned, in_semaphores, in_counters = Signal(), Signal(), Signal()
        counters_end = COUNTER_BASE + 8 * len(COUNTERS)
        m.d.comb += [
            aligned.eq(~address[:2].any()),
            in_semaphores.eq(self._in_semaphores(address)),
            in_counters.eq((address >= COUNTER_BASE) & (address < counters_end)),
            self.semaphore_index.eq((address - SEMAPHORE_BASE)[2:]),
            self.counter_select.eq((address - COUNTER_BASE)[3:]),
        ]

        # The high word goes with the low word that was read before.
        latched, has_latched = Signal.like(self.counter_select), Signal()
        high = address[2]
        step = Signal(range(READ_CYCLES + 1))
        begin = Signal()
        m.d.comb += [
            begin.eq(has_address & (step == 0) & ~host.rvalid & ~(in_semaphores & self.sweeping)),
            self.counter_read.eq(
                begin
                & aligned
                & in_counters
                & ~(high & has_latched & (latched == self.counter_select))
            ),
        ]
        with m.If(begin & aligned & in_counters):
            m.d.sync += [latched.eq(self.counter_select), has_latched.eq(~high)]

        plain, known = Signal(32), Signal()
        with m.If(begin):
            m.d.sync += [plain.eq(0), known.eq(0)]
            with m.If(in_semaphores):
                m.d.sync += [plain.eq(self.semaphore_value), known.eq(aligned)]
            with m.Elif(in_counters):
                m.d.sync += known.eq(aligned)
            with m.Else():
                with m.Switch(address):
                    for where, value in self._values().items():
                        with m.Case(where):
                            m.d.sync += [plain.eq(value), known.eq(1)]
        with m.If(begin | step.any()):
            m.d.sync += step.eq(Mux(step == READ_CYCLES, 0, step + 1))
        count = Mux(high, self.counter_value[32:], self.counter_value[:32])
        with m.If(step == READ_CYCLES):
            m.d.sync += [
                has_address.eq(0),
                host.rvalid.eq(1),
                host.rdata.eq(Mux(known, Mux(in_counters, count, plain), 0)),
                host.rresp.eq(Mux(known, Resp.OKAY, Resp.SLVERR)),
            ]
        with m.Elif(host.rready):
            m.d.sync += host.rvalid.eq(0)
