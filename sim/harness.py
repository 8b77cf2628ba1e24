"""Everything that calls the Amaranth simulator: runs, streams with pauses, back doors to memories.

Amaranth's next release changes this interface; then this is the file to change.
"""

import random
from contextlib import nullcontext
from typing import Any

from amaranth.hdl import ClockDomain
from amaranth.sim import Simulator

__all__ = ["PAUSES", "Stepper", "get", "monitor", "pauses", "put", "simulate"]

_PERIOD = 1e-6


# Runs ---------------------------------------------------------------------------------------------


def simulate(
    dut, *testbenches, background=(), max_cycles=100_000, domain="sync", vcd=None, traces=()
):
    """Simulate ``dut`` until every testbench has ended.

    Parameters
    ----------
    dut : component
    testbenches : async functions of the simulator's context
    background : sequence of async functions
        They run as long as the others do.
    max_cycles : :class:`int`, cycles
    domain : :class:`str`
        The clocked domain.
    vcd : path, optional
        Where to write waveforms.
    traces : sequence
        What a waveform viewer shows first.

    Raises
    ------
    :exc:`TimeoutError`
        After ``max_cycles``.
    """

    async def watchdog(ctx):
        await ctx.delay(max_cycles * _PERIOD)
        raise TimeoutError(f"the testbenches have not ended after {max_cycles} cycles")

    sim = Simulator(dut)
    sim.add_clock(_PERIOD, domain=domain)
    for testbench in testbenches:
        sim.add_testbench(testbench)
    for testbench in (*background, watchdog):
        sim.add_testbench(testbench, background=True)
    recording = nullcontext() if vcd is None else sim.write_vcd(str(vcd), traces=traces)
    with recording:
        sim.run()


# Pauses -------------------------------------------------------------------------------------------


def _never(rng):
    while True:
        yield False


def _random(rng):
    while True:
        yield rng.random() < 0.5


def _mostly(rng):
    while True:
        yield rng.random() < 0.9


def _alternate(rng):
    while True:
        yield True
        yield False


def _bursts(rng):
    while True:
        for paused in (False, True):
            for _ in range(rng.randrange(1, 12)):
                yield paused


PAUSES = {
    "never": _never, "random": _random, "mostly": _mostly, "alternate": _alternate,
    "bursts": _bursts,
}  # fmt: skip
"""Pause patterns by name; ``never`` is the one under which throughput can be asserted."""


def pauses(name, seed=0):
    """Return pause pattern ``name``: for each cycle, whether that side of a stream holds back."""
    return PAUSES[name](random.Random(seed))


# Streams ------------------------------------------------------------------------------------------


async def put(ctx, stream, payloads, pause=None, *, domain="sync"):
    """Send ``payloads`` into a component's input stream.

    ``pause`` (see :func:`pauses`) is asked in each cycle in which nothing is being offered; what
    has been offered stays until it is taken.
    """
    for payload in payloads:
        while pause is not None and next(pause):
            await ctx.tick(domain)
        ctx.set(stream.payload, payload)
        ctx.set(stream.valid, 1)
        await ctx.tick(domain).until(stream.ready)
        ctx.set(stream.valid, 0)


async def get(ctx, stream, count, pause=None, *, domain="sync"):
    """Take ``count`` payloads from a component's output stream; return them.

    ``pause`` is asked in each cycle, whether or not something is offered.
    """
    taken = []
    while len(taken) < count:
        ready = pause is None or not next(pause)
        ctx.set(stream.ready, ready)
        _, _, valid, payload = await ctx.tick(domain).sample(stream.valid, stream.payload)
        if ready and valid:
            taken.append(payload)
    ctx.set(stream.ready, 0)
    return taken


def monitor(stream, into, *, domain="sync"):
    """Return a background testbench that appends ``(cycle, payload)`` of each transfer to ``into``.

    It fails when the producer breaks the rules: ``valid`` that falls, or a payload that changes,
    before the transfer.
    """

    async def watch(ctx):
        cycle, waiting = 0, None
        values = (stream.valid, stream.ready, stream.payload)
        while True:
            _, reset, valid, ready, payload = await ctx.tick(domain).sample(*values)
            if waiting is not None and not reset:
                assert valid, f"cycle {cycle}: valid fell before the transfer"
                assert payload == waiting[0], f"cycle {cycle}: the payload changed while waiting"
            if valid and ready:
                into.append((cycle, payload))
            waiting = (payload,) if valid and not ready else None
            cycle += 1

    return watch


# Stepping -----------------------------------------------------------------------------------------


class Stepper:
    """A simulation driven from outside, one clock cycle at a time.

    Values set take effect before the next rising edge; values got are those after the last one and
    whatever was set since.

    Parameters
    ----------
    dut : component
    domain : :class:`str` or :class:`amaranth.hdl.ClockDomain`
    """

    def __init__(self, dut, *, domain: str | ClockDomain = "sync"):
        self._ctx: Any = None  # the simulator's context, once the testbench has it

        async def seize(ctx):
            self._ctx = ctx

        self._sim: Any = Simulator(dut)  # the type stubs lack parts of it
        self._sim.add_clock(_PERIOD, domain=domain)
        self._sim.add_testbench(seize)
        # One advance runs what is due at one point in time: the start, then the clock's rise and
        # fall in turn. Between calls it is always a fall that is due next, so that a value can be
        # set without an edge; hence one cycle passes here.
        self._sim.advance()
        self._sim.advance()
        self.cycles = 0

    def get(self, value):
        """Return what ``value`` is now."""
        return self._ctx.get(value)

    def set(self, signal, value):
        """Drive an input."""
        self._ctx.set(signal, value)

    def step(self, cycles=1):
        """Let ``cycles`` clock cycles pass."""
        advance = self._sim.advance
        for _ in range(cycles):
            advance()
            advance()
        self.cycles += cycles

    def _memory(self, memory):
        state = self._sim._engine.state
        if memory not in state.memories:
            raise LookupError("the design does not contain this memory")
        return state.slots[state.memories[memory]]

    def memory_read(self, memory, first, count):
        """Return ``count`` rows of a :class:`~amaranth.hdl.MemoryData`, as a list of integers."""
        return self._memory(memory).data[first : first + count]

    def memory_write(self, memory, first, rows):
        """Write integers to the rows of a memory from ``first`` on."""
        array = self._memory(memory)
        for row, value in enumerate(rows, first):
            array.write(row, value)
        self._sim._engine.step_design()
