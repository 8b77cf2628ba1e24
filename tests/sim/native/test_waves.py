"""Waveforms beside Amaranth's simulator: every signal of every cycle, read back from the file."""

import random
from collections import Counter

import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from makalu.sim.harness import Stepper
from makalu.sim.native.signals import UnknownSignal, WindowError
from vcd.reader import TokenKind, tokenize

from .lockstep import build
from .test_cells import WIDTHS, RandomLogic
from .test_lanes import Grid, Pairs, Several


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Models that keep more are of no use to others."""
    monkeypatch.setenv("MAKALU_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


CYCLE_NS = 10


def read(path):
    """Values of a VCD file by full name, for each cycle of it; and its first cycle."""
    scope, names, widths, now, seen = [], {}, {}, None, {}
    with path.open("rb") as file:
        for token in tokenize(file):
            if token.kind is TokenKind.SCOPE:
                scope.append(token.scope.ident)
            elif token.kind is TokenKind.UPSCOPE:
                scope.pop()
            elif token.kind is TokenKind.VAR:
                name = ".".join([*scope, token.var.reference.removeprefix("\\")])
                assert name not in names
                names[name], widths[name] = token.var.id_code, token.var.size
            elif token.kind is TokenKind.CHANGE_TIME:
                now = token.time_change
            elif token.kind in (TokenKind.CHANGE_VECTOR, TokenKind.CHANGE_SCALAR):
                change = token.vector_change if token.kind is TokenKind.CHANGE_VECTOR else (
                    token.scalar_change
                )  # fmt: skip
                value = change.value
                seen.setdefault(change.id_code, []).append(
                    (now, value if isinstance(value, int) else int(value, 2))
                )
    first = min(times[0][0] for times in seen.values()) // CYCLE_NS

    def at(code, cycle):
        """The value at the end of a cycle's first half."""
        return [value for time, value in seen[code] if time < cycle * CYCLE_NS + 5][-1]

    return {name: lambda cycle, code=code: at(code, cycle) for name, code in names.items()}, (
        first, widths, seen, names
    )  # fmt: skip


def reference(component):
    """A stepper, and its signals by full name.

    Left out is what occurs several times in a module: simulator and RTLIL count such names up
    differently.
    """
    stepper, found = Stepper(component), {}
    for info in stepper._sim._design.fragments.values():
        stems = Counter(name.partition("$")[0] for name in info.signal_names.values())
        for signal, name in info.signal_names.items():
            if stems[name.partition("$")[0]] == 1 and len(signal):
                found[".".join((*info.name, name))] = signal
    return stepper, found


def lockstep(make, folder, *, cycles=40, start=7, length=25, seed=1, **options):
    """Record a window of random cycles; compare each signal in each cycle; return the names."""
    simulation = build(make(), folder / "model", **options)
    component = make()
    stepper, signals = reference(component)
    ports = [(path[0], member) for path, member, _ in component.signature.flatten(component)]
    rng, wanted, path = random.Random(seed), {}, folder / "out.vcd"
    # The simulation is one cycle old, as the stepper, whose count is 0.
    with simulation.record(path, "*", start=start + 1, cycles=length):
        for cycle in range(cycles):
            for name, member in ports:
                if member.flow == wiring.In and rng.random() < 0.6:
                    signal = getattr(component, name)
                    value = rng.getrandbits(len(signal))
                    simulation.set(name, value)
                    if signal.shape().signed and value >> len(signal) - 1:
                        value -= 1 << len(signal)
                    stepper.set(signal, value)
            for name, signal in signals.items():
                wanted[name, cycle] = stepper.get(signal) & (1 << len(signal)) - 1
            simulation.step()
            stepper.step()
    simulation.close()
    found, (first, widths, _, _) = read(path)
    assert first == start + 1
    compared = 0
    for name in signals:
        if name not in found or name.endswith(".clk"):
            continue
        assert widths[name] == len(signals[name]), name
        for cycle in range(start, start + length):
            got = found[name](cycle + 1)
            want = wanted[name, cycle]
            assert got == want, f"{name} in cycle {cycle} is {got:#x}, not {want:#x}"
            compared += 1
    assert compared > 5 * length
    return found, signals


@pytest.mark.parametrize("number", range(6))
def test_every_signal_of_random_logic(tmp_path, seed, number):
    (tmp_path / "model").mkdir()
    lockstep(lambda: RandomLogic(400 * seed + number, WIDTHS[number % 3], 30), tmp_path, seed=seed)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_signal_of_rows_of_lanes(tmp_path, seed, threads):
    """Split words of 70 bits among them, memories and signals that only lanes have."""
    (tmp_path / "model").mkdir()
    found, _ = lockstep(
        lambda: Grid(10, 4, [None, 0, 1, 2, None, 4, 5, 6, 7, 8]), tmp_path, seed=seed,
        threads=threads, flags=("-O1", "-DWORTH=0"),
    )  # fmt: skip
    names = ("a", "b", "count", "sum", "wide", "soon")
    assert {f"top.row{i}.part{k}.{n}" for i in range(10) for k in range(4) for n in names} <= {
        *found
    }


def test_every_signal_of_two_groups(tmp_path, seed):
    (tmp_path / "model").mkdir()
    lockstep(lambda: Pairs(9), tmp_path, seed=seed)


def test_every_signal_of_designs_that_are_not_ours(tmp_path, seed):
    (tmp_path / "model").mkdir()
    lockstep(Several, tmp_path, seed=seed, min_lanes=2)


def test_the_comparison_can_fail(tmp_path):
    (tmp_path / "model").mkdir()
    made = iter([Grid(3, 3, [None, 0, 1]), Grid(3, 3, [None, 0, 0])])
    with pytest.raises(AssertionError, match="top"):
        lockstep(lambda: next(made), tmp_path)


class Named(wiring.Component):
    """Structures, an unused signal, and a signal that is a constant."""

    a: In(data.StructLayout({"low": 3, "high": 41}))
    o: Out(44)

    def elaborate(self, platform):
        m = Module()
        held = Signal(data.StructLayout({"x": 20, "y": data.ArrayLayout(8, 3)}))
        unused, fixed = Signal(5), Signal(6)
        m.d.sync += held.eq(Cat(self.a.high, self.a.low))
        m.d.comb += [unused.eq(self.a.low), fixed.eq(0x2A), self.o.eq(Cat(held, fixed[:1]))]
        m.d.comb += self.o.eq(held.as_value() ^ Cat(fixed, self.a.low))
        return m


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    simulation = build(Named(), tmp_path_factory.mktemp("named"))
    yield simulation
    simulation.close()


def test_names_and_fields_are_as_in_the_design(named, tmp_path):
    named.set("a", 5 | 3 << 3)
    named.waves(tmp_path / "out.vcd", "*", cycles=4)
    found, (_, widths, _, _) = read(tmp_path / "out.vcd")
    last = named.cycles - 1
    assert widths["top.held"] == 44
    assert widths["top.held.y"] == 24
    assert found["top.a.low"](last) == 5
    assert found["top.a.high"](last) == 3
    assert found["top.held.x"](last) == 3
    assert found["top.fixed"](last) == 0x2A
    assert "top.held.y[2]" in found
    assert "top.unused" not in found
    assert found["top.clk"](last) == 1


def test_the_clock_rises_once_per_cycle(named, tmp_path):
    first = named.cycles
    named.waves(tmp_path / "out.vcd", "clk", cycles=3)
    _, (_, _, seen, names) = read(tmp_path / "out.vcd")
    times = [10 * (first + i) + half for i in range(3) for half in (0, 5)]
    assert seen[names["top.clk"]] == list(zip(times, [1, 0] * 3, strict=True))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("hold", r"no signal matches 'hold': near are held"),
        (["a", "fixd"], r"'fixd': near are fixed"),
        ("tap.*", r"'tap\.\*': near are top\.\*"),
        ("unused", "Signals that nothing depends on are not simulated"),
        ("qqqqqqqq", "nothing has a name like it"),
    ],
)
def test_names_that_do_not_exist(named, tmp_path, patterns, message):
    with pytest.raises(UnknownSignal, match=message):
        named.waves(tmp_path / "out.vcd", patterns, cycles=3)
    assert not list(tmp_path.iterdir())
    named.step()


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    simulation = build(Grid(10, 4, [None] * 10), tmp_path_factory.mktemp("grid"))
    yield simulation
    simulation.close()


def test_one_lane_of_many(grid, tmp_path):
    grid.waves(tmp_path / "one.vcd", "part2.*", cycles=5, lane=7)
    found, _ = read(tmp_path / "one.vcd")
    path = grid.model.table["memories"][0]["paths"][7]
    (row,) = {name.split(".")[1] for name in found}
    assert f"top.{row}." in path
    assert {".".join(name.split(".")[:3]) for name in found} == {f"top.{row}.part2"}


def test_a_pattern_chooses_among_lanes(grid, tmp_path):
    grid.waves(tmp_path / "some.vcd", ["row[37].part0.sum", "top.load"], cycles=5)
    found, _ = read(tmp_path / "some.vcd")
    assert set(found) == {"top.row3.part0.sum", "top.row7.part0.sum", "top.load"}


def test_a_window_is_recorded_and_nothing_else(grid, tmp_path):
    """In pieces, too; and the simulation is the same afterwards."""
    grid.save(tmp_path / "before")
    grid.set("a", 77)
    grid.set("load", 0x3FF)
    grid.step(1000)
    wanted = {name: array.tolist() for name, array in grid.contents().items()}
    grid.restore(tmp_path / "before")
    grid.set("a", 77)
    grid.set("load", 0x3FF)
    first, model = grid.cycles, grid.model
    with grid.record(tmp_path / "out.vcd", "soon", start=first + 333, cycles=400) as recording:
        recording.rows = 7
        grid.step(300)
        assert grid.model is model, "nothing is slower before"
        grid.step(200)
        assert grid.model is not model
        grid.step(500)
        assert grid.model is model, "nor after"
    assert recording.recorded == 400
    assert {name: array.tolist() for name, array in grid.contents().items()} == wanted
    _, (begin, _, seen, _) = read(tmp_path / "out.vcd")
    assert begin == first + 333
    times = [time for changes in seen.values() for time, _ in changes]
    assert 10 * (first + 700) < max(times) < 10 * (first + 733)


def test_windows_that_cannot_be_are_refused(grid, tmp_path):
    for options in ({"start": grid.cycles - 1, "cycles": 5}, {"cycles": 0}):
        with (
            pytest.raises(WindowError, match="must begin at cycle"),
            grid.record(tmp_path / "out.vcd", "soon", **options),
        ):
            pass
    with (
        pytest.raises(WindowError, match="has not come"),
        grid.record(tmp_path / "out.vcd", "soon", start=grid.cycles + 10, cycles=5),
    ):
        grid.step(9)
    with grid.record(tmp_path / "out.vcd", "soon"):
        with pytest.raises(RuntimeError, match="end the recording first"):
            grid.restore(tmp_path / "file")
        grid.step()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.vcd"]
