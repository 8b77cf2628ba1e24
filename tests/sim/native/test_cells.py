"""Random expressions over all operators, and memories, as C and in Amaranth's simulator."""

import random

import pytest
from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from makalu.sim.native import active

from .lockstep import compare

WIDTHS = ([1, 3, 8, 12], [1, 7, 31, 32, 33, 40, 64], [1, 5, 63, 65, 100, 128, 200])


def expression(rng, pool):
    a, b, c = (rng.choice(pool) for _ in range(3))
    if rng.random() < 0.15:
        b = Const(rng.getrandbits(8), rng.choice([8, signed(9)]))
    small = max(len(a), len(b)) < 100
    choices = [
        lambda: a + b, lambda: a - b, lambda: a & b, lambda: a | b, lambda: a ^ b, lambda: ~a,
        lambda: -a, lambda: a == b, lambda: a != b, lambda: a < b, lambda: a <= b, lambda: a > b,
        lambda: a >= b, lambda: Mux(c, a, b), lambda: Cat(a, b), lambda: a[len(a) // 3 :],
        lambda: a.any(), lambda: a.all(), lambda: a.xor(), lambda: a.bool(),
        lambda: a << b.as_unsigned()[:4], lambda: a >> b.as_unsigned()[:7],
        lambda: a >> b.as_unsigned()[:70], lambda: abs(a),
        # The select stays inside: outside, Amaranth's two back ends differ for signed values.
        lambda: Cat(a, Const(0, 80)).bit_select(b.as_unsigned()[:6], min(9, len(a))),
        lambda: Cat(a, Const(0, 40)).word_select(b.as_unsigned()[:3], min(4, len(a))),
        lambda: a.shift_right(3), lambda: a.rotate_left(2), lambda: a.as_signed(),
        lambda: a.as_unsigned(), lambda: a * b if len(a) + len(b) < 300 else a,
        lambda: a // b if small else a, lambda: a % b if small else b,
        lambda: a.replicate(2) if small else a, lambda: Array([a, b, c])[c.as_unsigned()[:2]],
    ]  # fmt: skip
    value = Value.cast(rng.choice(choices)())
    return value[:200] if len(value) > 220 else value


class RandomLogic(wiring.Component):
    """Three inputs, ``cells`` expressions over what there is so far, a third of them registers."""

    def __init__(self, seed, widths, cells):
        rng = random.Random(seed)
        self.seed, self.widths, self.cells = seed, widths, cells
        shapes = [rng.choice([width, signed(width)]) for width in rng.choices(widths, k=3)]
        members = {f"i{k}": In(shape) for k, shape in enumerate(shapes)}
        members |= {f"o{k}": Out(width) for k, width in enumerate(rng.choices(widths, k=6))}
        super().__init__(members)

    def elaborate(self, platform):
        m, rng = Module(), random.Random(self.seed + 1)
        pool = [self.i0, self.i1, self.i2]
        for number in range(self.cells):
            value, name = expression(rng, pool), f"made{number}"
            if not len(value):
                continue
            width = min(len(value), max(self.widths))
            shape = signed(width) if rng.random() < 0.3 else width
            if rng.random() < 0.35:
                made = Signal(width, init=rng.getrandbits(width), name=name)
                enable = rng.choice(pool).any() if rng.random() < 0.5 else Const(1)
                with m.If(enable):
                    m.d.sync += made.eq(value)
            else:
                made = Signal(shape, name=name)
                m.d.comb += made.eq(value)
                if rng.random() < 0.3:
                    chosen = rng.choice(pool)[:4]
                    cases = range(1 << len(chosen))
                    with m.Switch(chosen):
                        for case in rng.sample(cases, min(3, len(cases))):
                            with m.Case(case):
                                m.d.comb += made.eq(expression(rng, pool))
            pool.append(made)
        for k in range(6):
            m.d.comb += getattr(self, f"o{k}").eq(pool[-1 - k])
        return m


@pytest.mark.parametrize("number", range(18))
def test_random_logic(tmp_path, seed, number):
    widths = WIDTHS[number % 3]
    compare(lambda: RandomLogic(1000 * seed + number, widths, 30), tmp_path, cycles=40)


@pytest.mark.parametrize("number", range(4))
def test_logic_cut_into_many_functions(tmp_path, seed, number, monkeypatch):
    monkeypatch.setattr(active, "LIMIT", 1 + number)
    monkeypatch.setattr(active, "COPIES", 1)
    compare(lambda: RandomLogic(2000 * seed + number, WIDTHS[number % 3], 40), tmp_path)


class Wide(wiring.Component):
    """Sums and comparisons of wide numbers by turns."""

    a: In(70)
    b: In(130)
    o: Out(70)

    def elaborate(self, platform):
        m = Module()
        value = self.a
        for _ in range(40):
            total = Signal(70)
            m.d.comb += total.eq(value + self.b)
            less = Signal()
            m.d.comb += less.eq(total < self.b)
            value = Mux(less, total, self.a)
        m.d.sync += self.o.eq(value)
        return m


def test_numbers_of_lines_and_of_values_do_not_meet(tmp_path):
    """Local arrays are called after one or the other."""
    compare(Wide, tmp_path)


class RandomMemory(wiring.Component):
    """A memory of random geometry with a write port and up to two read ports."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.width = rng.choice([1, 7, 16, 33, 64, 70, 128, 1024])
        self.depth = rng.choice([2, 3, 5, 8, 13, 64])
        self.granularity = rng.choice([None, 1 if self.width in (7, 33, 70) else None, 8])
        if self.granularity == 8 and self.width % 8:
            self.granularity = None
        self.init = [rng.getrandbits(self.width) for _ in range(self.depth)]
        self.init = self.init if rng.random() < 0.5 else []
        self.transparent, self.asynchronous = rng.random() < 0.5, rng.random() < 0.5
        bits = (self.depth - 1).bit_length()
        enables = 1 if self.granularity is None else self.width // self.granularity
        super().__init__(
            {
                "wa": In(bits), "wd": In(self.width), "we": In(enables), "ra": In(bits),
                "re": In(1), "o": Out(self.width), "oc": Out(self.width),
            }
        )  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.submodules.memory = memory = Memory(shape=self.width, depth=self.depth, init=self.init)
        write = memory.write_port(granularity=self.granularity)
        read = memory.read_port(transparent_for=[write] if self.transparent else [])
        m.d.comb += [
            write.addr.eq(self.wa), write.data.eq(self.wd), write.en.eq(self.we),
            read.addr.eq(self.ra), read.en.eq(self.re), self.o.eq(read.data),
        ]  # fmt: skip
        if self.asynchronous:
            read = memory.read_port(domain="comb")
            m.d.comb += [read.addr.eq(self.ra), self.oc.eq(read.data)]
        return m


class RandomRom(wiring.Component):
    """A memory without a write port, which an export writes as a choice among constants."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.width, self.depth = rng.choice([1, 7, 33, 64, 237]), rng.choice([2, 8, 64])
        self.init = [rng.getrandbits(self.width) for _ in range(self.depth)]
        bits = (self.depth - 1).bit_length()
        super().__init__(
            {"a": In(bits), "e": In(1), "o": Out(self.width), "oc": Out(self.width)}
        )  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        for domain, output in (("sync", self.o), ("comb", self.oc)):
            memory = Memory(shape=self.width, depth=self.depth, init=self.init)
            m.submodules[domain] = memory
            read = memory.read_port(domain=domain)
            m.d.comb += [read.addr.eq(self.a), output.eq(read.data)]
            if domain == "sync":
                m.d.comb += read.en.eq(self.e)
        return m


@pytest.mark.parametrize("number", range(4))
def test_random_roms(tmp_path, seed, number):
    compare(lambda: RandomRom(100 * seed + number), tmp_path, cycles=80, change=0.7)


@pytest.mark.parametrize("number", range(12))
def test_random_memories(tmp_path, seed, number):
    compare(lambda: RandomMemory(100 * seed + number), tmp_path, cycles=80, change=0.7)
