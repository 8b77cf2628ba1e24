"""Runs of a compiled design from Python: until something happens, interrupts, back doors."""

import _thread
import random
import re
import threading
import time

import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from makalu.sim.native.model import keep_c

from .lockstep import build
from .test_lanes import Grid


class Counter(wiring.Component):
    """Counts; shows the count, the count beside itself as a wide number, and memory rows."""

    step: In(4)
    row: In(3)
    count: Out(24)
    wide: Out(100)
    found: Out(70)

    def elaborate(self, platform):
        m = Module()
        m.submodules.memory = memory = Memory(shape=70, depth=8, init=[])
        read, write = memory.read_port(), memory.write_port()
        m.d.sync += self.count.eq(self.count + self.step)
        shifted = Signal(100)
        m.d.comb += [
            shifted.eq(self.count << 70), self.wide.eq(shifted | self.count),
            read.addr.eq(self.row), read.en.eq(1), self.found.eq(read.data),
            write.addr.eq(7), write.data.eq(Cat(self.count, self.count, self.count)),
            write.en.eq(self.count == 50),
        ]  # fmt: skip
        return m


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("counter")


@pytest.fixture
def counter(folder):
    simulation = build(Counter(), folder)
    simulation.set("step", 1)
    yield simulation
    simulation.close()


def test_a_run_ends_in_the_cycle_in_which_the_output_has_the_value(counter):
    assert counter.run(("count", 1000), 5000)
    assert counter.get("count") == 1000
    assert counter.cycles == 1001
    assert counter.run(("count", 1000), 5000), "it has it already"
    assert counter.cycles == 1001


def test_a_run_ends_at_its_limit(counter):
    assert not counter.run(("count", 1000), 999)
    assert counter.cycles == 1000
    assert counter.get("count") == 999
    assert counter.run(("count", 1000), 1)
    assert not counter.run(("count", 1), 0)


def test_a_run_waits_for_all_words_of_an_output(counter):
    counter.step(3)
    assert counter.run(("wide", 300 << 70 | 300), 1000)
    assert counter.get("count") == 300
    assert not counter.run(("wide", 300 << 70 | 301), 1000)


def test_a_value_that_an_output_cannot_have_is_refused(counter):
    with pytest.raises(ValueError, match=r"count has 24 bits and is never 16777216"):
        counter.run(("count", 1 << 24), 10)


def test_runs_and_steps_are_the_same_cycles(counter, seed):
    rng, expected = random.Random(seed), 0
    for _ in range(50):
        by = rng.randrange(16)
        counter.set("step", by)
        cycles = rng.choice([1, 5, 700])
        if rng.random() < 0.5:
            counter.step(cycles)
        else:
            counter.set("row", 0)
            assert not counter.run(("found", 1), cycles)
        expected += by * cycles
        counter.settle()
        assert counter.get("count") == expected % (1 << 24)


@pytest.mark.parametrize("way", ["step", "run"])
def test_an_interrupt_is_heard_soon(counter, way):
    """Endless otherwise."""
    pressed = []

    def press():
        pressed.append(time.perf_counter())
        _thread.interrupt_main()

    endless = {
        "step": lambda: counter.step(1 << 50),
        "run": lambda: counter.run(("found", 1), 1 << 50),
    }
    threading.Timer(0.3, press).start()
    with pytest.raises(KeyboardInterrupt):
        endless[way]()
    assert time.perf_counter() - pressed[0] < 0.5
    before = counter.cycles
    counter.step(10)
    assert counter.cycles == before + 10


def test_memories_have_a_back_door(counter):
    rows = counter.memory(0)
    assert rows.shape == (8, 1, 2)
    rows[3, 0] = 0x123456789ABCDEF0, 0x2A
    counter.touch()
    counter.set("row", 3)
    counter.step()
    counter.settle()
    assert counter.get("found") == 0x2A << 64 | 0x123456789ABCDEF0
    assert counter.run(("count", 52), 100)
    assert rows[7].tolist() == [[50 | 50 << 24 | (50 & 0xFFFF) << 48, 0]]


def test_the_c_names_what_it_computes(tmp_path):
    (work := tmp_path / "model").mkdir()
    build(Grid(10, 4, [None] * 10), work).close()
    copied = keep_c(work, tmp_path / "for" / "people")
    assert {"model.h", "model.c", "model0.c", "model.json"} <= {path.name for path in copied}
    text = "".join(path.read_text() for path in copied)
    assert re.search(
        r"u32 v\d+_0\[10 \+ \d+\]; /\* <\S+>\.part0\.wide\[0:\d+\], 10 lanes \*/", text
    )
    assert re.search(
        r"u64 m\d+\[\d+ \+ \d+\]; /\* <\S+memory\S*, 6 rows of 40 bits, 10 lanes \*/", text
    )
    assert re.search(
        r"u32 f\d+; /\* <\S+>\.load, 10 lanes \*/|f\d+\[10 \+ \d+\]; /\* <\S+>\.load", text
    )
    state = text.partition("struct state {")[2].partition("};")[0]
    for line in state.splitlines():
        assert not re.match(r"\s+(_Alignas\(64\) )?u\d+ v\d", line) or "/*" in line, line
    defined = re.findall(r"const u\d+ [tn]\d+_\d+ = [^\n]*", text)
    assert len(defined) > 50
    assert all(re.search(r"; /\* \S+ \*/$", line) for line in defined), defined
