# amaranth: UnusedElaboratable=no
"""The scalar engine's lanes and tables against the golden functions, to the bit."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from amaranth.hdl import Cat, Module, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from makalu.rtl.arch import formats
from makalu.rtl.arch.functions import BINADES, PLANS, Reduction, load_tables
from makalu.rtl.arch.isa import Function
from makalu.rtl.engines.activation import (
    ACTIVATION_LANE_CYCLES,
    CONTROL_CYCLES,
    FUNCTION_CYCLES,
    TABLE_CYCLES,
    ActivationLane,
    ActivationTables,
    FunctionUnit,
    Steering,
    steering_of,
)
from makalu.sim import golden
from makalu.sim.activation import evaluate
from makalu.sim.arithmetic import fma32

from ..arith.support import CompiledComponent, assert_equal_bits

F = Function
PLAIN = tuple(f for f in Function if not PLANS[f].has_table)
TABULATED = tuple(f for f in Function if PLANS[f].has_table)
STEERED = tuple(name for name, _ in data.Layout.cast(Steering))
every = pytest.mark.parametrize("function", list(Function), ids=lambda f: f.name.lower())


def bench_points():
    path = Path(__file__).parents[2] / "bench" / "functions.py"
    spec = importlib.util.spec_from_file_location("functions_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes_of(values):
    return np.asarray(values, np.float32).view(np.uint32)


def steer(ctx, ports, function, names=STEERED):
    """Set the controls of a function."""
    fields = steering_of(function)
    for name in names:
        if name == "bounds":
            for port, bound in zip(ports.bounds, fields["bounds"], strict=True):
                ctx.set(port, bound)
        else:
            ctx.set(getattr(ports, name), fields[name])


def fill(ctx, memory, function):
    """Put a table into memory by the back door."""
    table = load_tables()[function]
    for k, column in enumerate(memory.columns):
        for i, code in enumerate(table.segments[:, k]):
            ctx.set(column[i], int(code))
    for i, entry in enumerate(table.binades):
        ctx.set(memory.binades[i], int(entry))


def run(dut, testbench):
    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(testbench)
    sim.run()


# The unit in Amaranth's simulator -----------------------------------------------------------------


def test_every_table_with_a_few_arguments(rng):
    """Ends of segments, special and random numbers; the tables by the back door."""
    points = bench_points()
    dut = FunctionUnit()
    compared = 0

    async def testbench(ctx):
        nonlocal compared
        for function in TABULATED:
            steer(ctx, dut, function)
            ctx.set(dut.alpha, int(codes_of(0.25)))
            fill(ctx, dut.memory, function)
            near = rng.permutation(points.borders(load_tables()[function]))[:12]
            special = points.SPECIALS
            if PLANS[function].reduction == Reduction.NONE:
                special = rng.permutation(special)[:10]
            x = [special, near, rng.integers(0, 1 << 32, 4, np.uint32)]
            x = np.concatenate([*x, codes_of(rng.normal(size=6) * 4)])
            got = []
            for cycle in range(len(x) + FUNCTION_CYCLES):
                if cycle < len(x):
                    ctx.set(dut.x, int(x[cycle]))
                if cycle >= FUNCTION_CYCLES:
                    got.append(ctx.get(dut.result))
                await ctx.tick()
            want = evaluate(function, x, 0.25).view(np.uint32)
            assert_equal_bits(got, want, function=[function] * len(x), x=x)
            compared += len(x)

    run(dut, testbench)
    assert compared > 600


# The lane in Amaranth's simulator -----------------------------------------------------------------


class Lane:
    """Elements with their controls, each in the cycle in which the lane needs it."""

    def __init__(self, table):
        self.table = table
        self.elements = []
        self.wanted = []

    def add(self, *, bits, function, src, dst, saturate=0, scale=1.0, bias=0.0, alpha=0.25,
            source=("sbuf", 0), **more):  # fmt: skip
        memory, shift = source
        scale, bias, alpha = (int(codes_of(v)) for v in (scale, bias, alpha))
        self.elements.append(
            {"source": source, "bits": int(bits), "from_psum": int(memory == "psum"),
             "shift": shift, "src_dtype": src.code, "dst_dtype": dst.code, "saturate": saturate,
             "scale": scale, "bias": bias, "alpha": alpha, "function": function,
             "load_scale": 0, "load_bias": 0, "own_scale": 0, "own_bias": 0, **more}
        )  # fmt: skip

    def expect(self, element, own):
        """The raw element that the lane should give."""
        src, dst = (formats.format_by_code(element[k]) for k in ("src_dtype", "dst_dtype"))
        code = np.array([element["bits"]], np.uint32).view(np.uint8)[: src.bytes]
        value = golden.cast_in(code.view(src.dtype), src)
        factors = [
            own[name] if element[f"own_{name}"] else element[name] for name in ("scale", "bias")
        ]
        argument = fma32(*(np.uint32(v).view(np.float32) for v in (value, *factors)))
        result = evaluate(element["function"], argument, np.uint32(element["alpha"]))
        out = golden.cast_out(result.view(np.uint32), dst, element["saturate"])
        return int(out.view(f"u{dst.bytes}")[0])

    async def body(self, ctx):
        dut = self.dut
        fill(ctx, dut.memory, self.table)
        steered = [name for name in CONTROL_CYCLES if name in STEERED]
        got = []
        for cycle in range(len(self.elements) + ACTIVATION_LANE_CYCLES):
            for name, late in CONTROL_CYCLES.items():
                if 0 <= cycle - late < len(self.elements):
                    element = self.elements[cycle - late]
                    if name in steered:
                        steer(ctx, dut, element["function"], [name])
                    else:
                        ctx.set(getattr(dut, name), element[name])
            if cycle < len(self.elements):
                element = self.elements[cycle]
                memory, shift = element["source"]
                for name in ("sbuf", "psum"):
                    for k in range(4):
                        right = (name, k) == (memory, shift)
                        ctx.set(getattr(dut, name)[k], element["bits"] if right else 0x7FABCDEF)
            if cycle >= ACTIVATION_LANE_CYCLES:
                got.append(ctx.get(dut.raw))
            await ctx.tick()
        own = {"scale": 0, "bias": 0}
        for i, (element, raw) in enumerate(zip(self.elements, got, strict=True)):
            if element["load_scale"] or element["load_bias"]:
                own["scale" if element["load_scale"] else "bias"] = element["bits"]
                continue
            want = self.expect(element, own)
            assert raw == want, f"element {i}: got {raw:#x}, expected {want:#x}; {element}"

    def run(self):
        self.dut = ActivationLane()
        run(self.dut, self.body)


def test_a_lane_casts_scales_and_computes(rng):
    """Every pair of formats, sources and shifts, functions that change with every element, scales
    and biases of the partition that change while elements are under way."""
    lane = Lane(F.SIGMOID)
    functions = (*PLAIN, F.SIGMOID)
    sources = [(memory, k) for memory in ("sbuf", "psum") for k in range(4)]

    def options(src, dst):
        return {
            "bits": rng.integers(0, 1 << 32), "src": src, "dst": dst,
            "function": functions[rng.integers(len(functions))],
            "saturate": int(rng.integers(2)), "source": sources[rng.integers(8)],
            "scale": rng.normal(), "bias": rng.normal(), "alpha": rng.normal(),
            "own_scale": int(rng.integers(2)), "own_bias": int(rng.integers(2)),
        }  # fmt: skip

    fp32 = formats.FP32
    for name in ("load_scale", "load_bias"):
        lane.add(**{**options(fp32, fp32), "bits": codes_of(rng.normal()), name: 1})
    pairs = [(src, dst) for src in formats.FORMATS for dst in formats.FORMATS]
    for i in rng.permutation(len(pairs)):
        lane.add(**options(*pairs[i]))
        if rng.random() < 0.2:
            name = ("load_scale", "load_bias")[rng.integers(2)]
            lane.add(**{**options(fp32, fp32), "bits": codes_of(rng.normal()), name: 1})
    for value in rng.normal(size=60):
        lane.add(**{**options(fp32, fp32), "bits": codes_of(value)})
    for function in functions:
        for bits in (0, 1 << 31, 0x7F800000, 0xFF800000, 0xFFC12345):
            lane.add(
                bits=bits, function=function, src=fp32, dst=fp32, alpha=-1.5, scale=1.0, bias=-0.0
            )
    lane.run()


# The tables ---------------------------------------------------------------------------------------


def test_a_table_is_written_once_and_as_it_is_declared():
    dut = ActivationTables()
    order = (F.TANH, F.TANH, F.COPY, F.TANH, F.LOG, F.TANH)
    loads = (True, False, False, False, True, True)

    async def testbench(ctx):
        for function, wanted in zip(order, loads, strict=True):
            ctx.set(dut.function, int(function))
            await ctx.tick()
            assert ctx.get(dut.steering) == Steering.const(steering_of(function))
            ctx.set(dut.load, 1)
            await ctx.tick()
            ctx.set(dut.load, 0)
            assert ctx.get(dut.busy) == wanted, function
            table = load_tables()[function]
            entries, cycles = [], 0
            while ctx.get(dut.busy):
                if ctx.get(dut.entry.valid):
                    assert ctx.get(dut.entry.index) == len(entries)
                    binade = ctx.get(dut.entry.binade)
                    entries.append([ctx.get(dut.entry.segment[k]) for k in range(7)] + [binade])
                await ctx.tick()
                cycles += 1
            assert not ctx.get(dut.entry.valid)
            if wanted:
                count = max(len(table.segments), 2 * BINADES)
                assert (len(entries), cycles) == (count, count + 2)
                for i, row in enumerate(table.segments):
                    assert entries[i][:7] == row.tolist()
                assert [entry[7] for entry in entries[: 2 * BINADES]] == table.binades.tolist()

    run(dut, testbench)


# Compiled -----------------------------------------------------------------------------------------

LOAD_CYCLES = 600
"""More than the longest table takes."""


class Bench(wiring.Component):
    """Tables and a unit, steered as a sequencer would."""

    def __init__(self):
        super().__init__(
            {"function": In(6), "load": In(1), "x": In(32), "alpha": In(32), "result": Out(32),
             "busy": Out(1)}
        )  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.submodules.tables = tables = ActivationTables()
        m.submodules.unit = unit = FunctionUnit()
        m.d.comb += [
            tables.function.eq(self.function),
            tables.load.eq(self.load),
            unit.entry.eq(tables.entry),
            self.result.eq(unit.result),
            self.busy.eq(tables.busy),
        ]

        def after(value, cycles):
            for _ in range(cycles):
                past = Value.cast(value)
                value = Signal(len(past))
                m.d.sync += value.eq(past)
            return value

        # The steering is there a cycle after the function.
        first = CONTROL_CYCLES["bounds"]
        m.d.sync += unit.x.eq(self.x)
        for name in STEERED:
            late = CONTROL_CYCLES[name] - first
            value = after(getattr(tables.steering, name), late)
            if name == "bounds":
                m.d.comb += Cat(unit.bounds).eq(value)
            else:
                m.d.comb += Value.cast(getattr(unit, name)).eq(value)
        late = CONTROL_CYCLES["alpha"] - first + 1
        m.d.comb += unit.alpha.eq(after(self.alpha, late))
        return m


@pytest.fixture(scope="module")
def compiled():
    return CompiledComponent(Bench())


def compute(compiled, functions, x, alpha=0.25, *, table):
    """Load a table, then compute a function of each argument, one per cycle."""
    idle = LOAD_CYCLES
    functions = np.concatenate([np.full(idle, int(table)), np.broadcast_to(functions, x.shape)])
    load = np.zeros(idle + len(x), np.uint8)
    load[1] = 1
    results = compiled(
        latency=FUNCTION_CYCLES + 1,
        function=functions,
        load=load,
        x=np.concatenate([np.zeros(idle, np.uint32), x]),
        alpha=codes_of(alpha),
    )
    return results["result"][idle:]


@pytest.mark.verilator
@every
def test_results_are_those_of_the_golden_model(compiled, function, rng):
    points = bench_points()
    x = points.points(function, 1 << 15, rng)
    got = compute(compiled, int(function), x, table=function)
    assert_equal_bits(got, evaluate(function, x, 0.25).view(np.uint32), x=x)


@pytest.mark.verilator
def test_functions_may_change_with_every_element(compiled, rng):
    """Those without a table, and the one whose table is loaded."""
    codes = np.array([int(f) for f in (*PLAIN, F.GELU)])
    functions = rng.choice(codes, 20_000)
    x = np.where(
        rng.random(20_000) < 0.5,
        rng.integers(0, 1 << 32, 20_000, np.uint32),
        codes_of(rng.normal(size=20_000)),
    )
    got = compute(compiled, functions, x, -1.5, table=F.GELU)
    want = np.zeros_like(x)
    for code in codes:
        here = functions == code
        want[here] = evaluate(code, x[here], -1.5).view(np.uint32)
    assert_equal_bits(got, want, function=functions, x=x)


def test_the_controls_are_named_with_their_cycles():
    ports = {
        name
        for name, member in ActivationLane().signature.members.items()
        if member.flow == In and name not in ("sbuf", "psum", "entry")
    }
    assert ports == set(CONTROL_CYCLES)
    assert max(CONTROL_CYCLES.values()) < ACTIVATION_LANE_CYCLES
    assert CONTROL_CYCLES["odd"] == TABLE_CYCLES.start
    assert set(STEERED) <= ports
