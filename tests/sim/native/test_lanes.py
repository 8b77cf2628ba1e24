"""Equal parts as lanes: whatever connects them, nothing but the speed changes."""

import random
import re
import sys
from pathlib import Path

import pytest
from amaranth.hdl import Cat, ClockDomain, ClockSignal, Instance, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.crc.catalog import CRC32_ETHERNET
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from makalu.sim.native import cells, emit
from makalu.sim.native import model as compiler
from makalu.sim.native.netlist import Unsupported
from makalu.sim.toolchain import find_clang_cc

from .lockstep import build, compare

ALWAYS = {"flags": ("-O1", "-DSKIP=0")}


class Part(wiring.Component):
    """Registers, a memory, and outputs that follow registers, an input, or an input in cells."""

    a: In(9)
    b: In(70)
    load: In(1)
    sum: Out(12)
    wide: Out(70)
    through: Out(9)
    soon: Out(9)
    row: Out(40)

    def elaborate(self, platform):
        m = Module()
        count = Signal(5)
        m.submodules.memory = memory = Memory(shape=40, depth=6, init=[])
        write, read = memory.write_port(), memory.read_port()
        with m.If(self.load):
            m.d.sync += [self.sum.eq(self.a + count), count.eq(count + 3)]
        m.d.sync += self.wide.eq(self.wide ^ (self.b << count[:3]))
        m.d.comb += [
            self.through.eq(self.a), self.soon.eq((self.a * 5) ^ self.sum), self.row.eq(read.data),
            write.addr.eq(count), write.data.eq(Cat(self.sum, self.b)), write.en.eq(self.a[0]),
            read.addr.eq(self.sum), read.en.eq(self.a[1]),
        ]  # fmt: skip
        return m


class Row(wiring.Component):
    """Parts one after another, a few more cells around them."""

    a: In(9)
    b: In(70)
    load: In(1)
    soon: Out(9)
    wide: Out(70)

    def __init__(self, length):
        self.length = length
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        last, mixed = None, 0
        for i in range(self.length):
            m.submodules[f"part{i}"] = part = Part()
            m.d.comb += [
                part.a.eq(self.a if last is None else last.sum),
                part.b.eq(self.b if last is None else last.wide),
                part.load.eq(self.load),
            ]
            last = part
            mixed = mixed ^ part.soon ^ part.row ^ part.through  # all used, so that all are alike
        m.d.sync += self.soon.eq(mixed + last.sum)
        m.d.comb += self.wide.eq(last.wide)
        return m


class Grid(wiring.Component):
    """Rows side by side, connected by ``order``: a row may follow any other."""

    def __init__(self, rows, length, order):
        self.rows, self.length, self.order = rows, length, order
        super().__init__(
            {"a": In(9), "b": In(70), "load": In(rows), "out": Out(9), "wide": Out(70)}
        )

    def elaborate(self, platform):
        m = Module()
        rows = [Row(self.length) for _ in range(self.rows)]
        for i, row in enumerate(rows):
            m.submodules[f"row{i}"] = row
            source = self.order[i]
            m.d.comb += [
                row.a.eq(self.a if source is None else rows[source].soon),
                row.b.eq(self.b if source is None else rows[source].wide),
                row.load.eq(self.load[i]),
            ]
        out = wide = 0
        for row in rows:
            out, wide = out ^ row.soon, wide ^ row.wide
        m.d.comb += [self.out.eq(out), self.wide.eq(wide)]
        return m


def lanes(model):
    return {name: count for name, count, _ in model.table["groups"][1:]}


@pytest.mark.parametrize("options", [{}, ALWAYS], ids=["skipping", "always"])
@pytest.mark.parametrize("change", [1.0, 0.05])
def test_rows_in_a_grid(tmp_path, seed, options, change):
    rng = random.Random(seed)
    order = [None, *(rng.choice([None, i]) for i in range(9))]
    model = compare(
        lambda: Grid(10, 4, order), tmp_path, cycles=200, change=change, **options
    )  # fmt: skip
    assert max(lanes(model).values()) >= 10


@pytest.mark.parametrize("change", [1.0, 0.05])
@pytest.mark.parametrize("spins", [1, 20000])
def test_two_threads_and_small_blocks(tmp_path, seed, monkeypatch, change, spins):
    """Every list of tasks is offered to a second thread, which may have fallen asleep."""
    monkeypatch.setattr(emit, "BLOCK", 4)
    monkeypatch.setattr(cells, "LARGE", 1)  # and the variants of large groups
    order = [None, *(random.Random(seed).choice([None, i]) for i in range(11))]
    flags = ("-O1", "-DWORTH=0", f"-DSPINS={spins}")
    compare(
        lambda: Grid(12, 8, order), tmp_path, cycles=300, change=change, flags=flags, threads=2
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux does")
def test_a_thread_ends_with_its_simulation(tmp_path):
    def count():
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    before = count()
    simulation = build(Grid(4, 4, [None, None, 0, 1]), tmp_path, threads=2)
    assert simulation.threads == 2
    assert count() == before + 1
    simulation.step(100)
    simulation.close()
    assert count() == before


def test_rows_in_any_order(tmp_path, seed):
    rng = random.Random(seed)
    order = [None, *rng.sample(range(12), 11)]
    compare(lambda: Grid(12, 2, order), tmp_path, cycles=150, change=0.3)


def test_nothing_grouped_is_the_same(tmp_path, seed):
    model = compare(lambda: Grid(3, 3, [None, 0, 1]), tmp_path, min_lanes=1 << 30)
    assert not lanes(model)


class Ripple(wiring.Component):
    """Parts whose inputs follow their neighbours' in the same cycle."""

    def __init__(self, count):
        self.count = count
        super().__init__({"a": In(9), "b": In(70), "load": In(1), "out": Out(9)})

    def elaborate(self, platform):
        m = Module()
        parts = [Part() for _ in range(self.count)]
        for i, part in enumerate(parts):
            m.submodules[f"part{i}"] = part
            before = parts[i - 1].soon if i else self.a
            m.d.comb += [part.a.eq(before), part.b.eq(self.b), part.load.eq(self.load)]
        m.d.comb += self.out.eq(parts[-1].soon)
        return m


def test_a_ripple_through_lanes(tmp_path):
    compare(lambda: Ripple(9), tmp_path, cycles=100)


class Tail(wiring.Component):
    """Follows another part's registers, now and then."""

    a: In(12)
    b: In(70)
    take: In(1)
    last: Out(12)
    mixed: Out(70)

    def elaborate(self, platform):
        m = Module()
        with m.If(self.take):
            m.d.sync += [
                self.last.eq(self.a * 3 - self.last),
                self.mixed.eq(((self.mixed + self.b) ^ self.a) - (self.mixed & self.b)),
            ]
        return m


class Pairs(wiring.Component):
    """Each tail sees its part: two groups of which one reads the other lane by lane."""

    def __init__(self, count):
        self.count = count
        super().__init__(
            {"a": In(9), "b": In(70), "load": In(count), "take": In(count), "out": Out(70)}
        )

    def elaborate(self, platform):
        m, out = Module(), 0
        for i in range(self.count):
            m.submodules[f"part{i}"] = part = Part()
            m.submodules[f"tail{i}"] = tail = Tail()
            m.d.comb += [
                part.a.eq(self.a), part.b.eq(self.b), part.load.eq(self.load[i]),
                tail.a.eq(part.sum), tail.b.eq(part.wide), tail.take.eq(self.take[i]),
            ]  # fmt: skip
            out = out ^ tail.mixed ^ tail.last ^ part.row ^ part.through ^ part.soon
        m.d.comb += self.out.eq(out)
        return m


@pytest.mark.parametrize("change", [1.0, 0.3, 0.03])
def test_a_group_that_reads_another(tmp_path, change):
    model = compare(lambda: Pairs(9), tmp_path, cycles=400, change=change)
    assert list(lanes(model).values()) == [9, 9]


def test_modules_that_are_synthesized_apart(tmp_path, monkeypatch):
    """Each in a batch of its own, which does not know the others."""
    monkeypatch.setattr(compiler, "BATCH", 1)
    found = compare(lambda: Pairs(9), tmp_path, cycles=200, change=0.3)
    assert list(lanes(found).values()) == [9, 9]


class Several(wiring.Component):
    """FIFOs and CRCs of Amaranth's own, several of each."""

    def __init__(self):
        super().__init__(
            {"data": In(8), "put": In(6), "get": In(6), "start": In(1), "head": Out(48),
             "level": Out(24), "crc": Out(32)}
        )  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        heads, levels = [], []
        for i in range(6):
            m.submodules[f"fifo{i}"] = fifo = SyncFIFOBuffered(width=8, depth=5)
            m.d.comb += [
                fifo.w_data.eq(self.data + i), fifo.w_en.eq(self.put[i]), fifo.r_en.eq(self.get[i])
            ]  # fmt: skip
            heads.append(fifo.r_data)
            levels.append(fifo.level[:4])
        total = 0
        for i in range(4):
            m.submodules[f"crc{i}"] = crc = CRC32_ETHERNET(8).create()
            m.d.comb += [
                crc.start.eq(self.start),
                crc.valid.eq(self.put[i]),
                crc.data.eq(self.data),
            ]
            total ^= crc.crc
        m.d.comb += [self.head.eq(Cat(heads)), self.level.eq(Cat(levels)), self.crc.eq(total)]
        return m


@pytest.mark.parametrize("change", [1.0, 0.2])
def test_designs_that_are_not_ours(tmp_path, change):
    model = compare(Several, tmp_path, cycles=300, change=change, min_lanes=2)
    assert 6 in lanes(model).values()
    assert 4 in lanes(model).values()


class Wide(wiring.Component):
    """Numbers of several words, shifted by any amount and compared."""

    a: In(100)
    by: In(8)
    y: Out(100)
    less: Out(1)

    def elaborate(self, platform):
        m, kept = Module(), Signal(100, init=5)
        m.d.sync += [
            kept.eq((kept << self.by[:7]) ^ (self.a >> self.by) + self.a),
            self.y.eq(kept * self.a - kept.bit_select(self.by, 64)),
            self.less.eq((kept.as_signed() < self.a.as_signed()) ^ (kept < self.y)),
        ]
        return m


class Wides(wiring.Component):
    a: In(100)
    by: In(8)
    y: Out(100)
    less: Out(16)

    def elaborate(self, platform):
        m, before, less = Module(), self.a, []
        for i in range(16):
            m.submodules[f"wide{i}"] = wide = Wide()
            m.d.comb += [wide.a.eq(before), wide.by.eq(self.by ^ i)]
            before = wide.y
            less.append(wide.less)
        m.d.comb += [self.y.eq(before), self.less.eq(Cat(less))]
        return m


LOOPS = re.compile(r"^ +(LANES\n +)?for \(\w+ l = (.*?)^        \}\n", re.MULTILINE | re.DOTALL)


def test_wide_numbers_in_lanes(tmp_path, seed):
    """What is computed in arrays is not computed for several lanes at a time."""
    model = compare(Wides, tmp_path, cycles=200, seed=seed, flags=("-O2",), cc=find_clang_cc())
    assert 16 in lanes(model).values()
    loops = [loop for file in tmp_path.glob("*.c") for loop in LOOPS.findall(file.read_text())]
    arrays = [vector for vector, body in loops if re.search(r"\bw_\w+\(", body)]
    assert arrays
    assert not any(arrays)


class Look(wiring.Component):
    """A memory that is read without a clock, among other cells."""

    at: In(3)
    mix: In(8)
    data: Out(8)

    def elaborate(self, platform):
        m = Module()
        m.submodules.memory = memory = Memory(shape=8, depth=8, init=[])
        read, write = memory.read_port(domain="comb"), memory.write_port()
        sum_ = Signal(8)
        m.d.sync += sum_.eq((sum_ + self.mix * 3) & self.mix)
        m.d.comb += [
            read.addr.eq(self.at), self.data.eq(read.data ^ (sum_ * 5)),
            write.addr.eq(self.at), write.data.eq(sum_), write.en.eq(self.mix.all()),
        ]  # fmt: skip
        return m


class Looks(wiring.Component):
    def __init__(self, count=10, apart=False):
        self.count, self.apart = count, apart
        super().__init__({"at": In(3), "mix": In(8), "data": Out(8 * count)})

    def elaborate(self, platform):
        m, data = Module(), []
        for i in range(self.count):
            m.submodules[f"look{i}"] = look = Look()
            own = i if self.apart else 0
            m.d.comb += [look.at.eq(self.at ^ own), look.mix.eq(self.mix | own)]
            data.append(look.data)
        m.d.comb += self.data.eq(Cat(data))
        return m


def test_a_memory_read_without_a_clock_in_several_blocks(tmp_path, monkeypatch):
    """Lanes of the second block have rows of their own."""
    monkeypatch.setattr(emit, "BLOCK", 4)
    model = compare(lambda: Looks(12, apart=True), tmp_path, cycles=600, change=0.7)
    assert 12 in lanes(model).values()


def test_an_idle_group_sees_what_is_written_into_its_memory_from_outside(tmp_path):
    simulation = build(Looks(), tmp_path)
    assert 10 in lanes(simulation.model).values()
    simulation.set("at", 5)
    simulation.step(20)
    simulation.settle()
    assert simulation.get("data") == 0
    rows = simulation.memory(0)
    rows[5, :, 0] = range(1, 11)
    simulation.touch()
    simulation.settle()
    assert simulation.get("data").to_bytes(10, "little") == bytes(range(1, 11))
    simulation.close()


class Clocks(wiring.Component):
    """Two registers, perhaps with a clock each."""

    a: In(4)
    other: In(1)
    o: Out(4)

    def __init__(self, edge="pos", second=True):
        self.edge, self.second = edge, second
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        m.domains.late = late = ClockDomain(clk_edge=self.edge, reset_less=True)
        m.d.comb += late.clk.eq(self.other if self.second else ClockSignal())
        held = Signal(4)
        m.d.sync += held.eq(self.a)
        m.d.late += self.o.eq(held)
        return m


@pytest.mark.parametrize(
    ("design", "message"),
    [(Clocks(), "a second clock"), (Clocks("neg", False), "falling edge")],
    ids=["two clocks", "falling edge"],
)
def test_what_is_not_clocked_by_the_one_clock_is_named(tmp_path, design, message):
    with pytest.raises(Unsupported, match=rf"top\..*{message}"):
        build(design, tmp_path)


class Missing(wiring.Component):
    a: In(4)
    o: Out(4)

    def elaborate(self, platform):
        m = Module()
        m.submodules.box = Instance("secret", i_a=self.a, o_o=self.o)
        return m


def test_a_module_that_is_not_given_is_named(tmp_path):
    with pytest.raises(Unsupported, match=r"top\.box.*secret"):
        build(Missing(), tmp_path)


def test_the_tests_can_fail(tmp_path):
    """A model of something else is not the same."""
    made = iter([Grid(3, 3, [None, 0, 1]), Grid(3, 3, [None, 0, 0])])
    with pytest.raises(AssertionError, match="cycle"):
        compare(lambda: next(made), tmp_path, cycles=100)
