"""The scalar engine's lanes: functions of elements, and the tables that they are made of.

A :class:`FunctionUnit` computes any function of :mod:`..arch.functions` on binary32, an
:class:`ActivationLane` per partition puts it between the choice of the source, the casts and the
scaling of the argument. :class:`ActivationTables` holds the coefficients of all functions and
writes those of one into all lanes. What commands the memories and steers the lanes is not here.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory, MemoryData
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..arch.functions import (
    BINADES,
    COLUMNS,
    FIRST_EXPONENT,
    LN2,
    OUTCOME_BITS,
    PLANS,
    SEGMENTS,
    Outcome,
    Reduction,
    Symmetry,
    load_tables,
)
from ..arch.isa import Activation
from ..arith.angle import ANGLE_CYCLES, AngleReducer
from ..arith.convert import CAST_IN_CYCLES, CAST_OUT_CYCLES, CastIn, CastOut
from ..arith.fma import ADD_CYCLES, FMA32_CYCLES, Add, Fma32
from ..arith.operand import normalize

__all__ = [
    "ACTIVATION_LANE_CYCLES", "CONTROL_CYCLES", "FUNCTION_CYCLES", "TABLE_CYCLES",
    "ActivationLane", "ActivationTables", "Finish", "FunctionUnit", "Outcomes", "Steering",
    "TableMemory", "TableWrite", "steering_of",
]  # fmt: skip

_BINADE_CYCLE = ANGLE_CYCLES  # the binade of r is looked up
_X0_CYCLE = _BINADE_CYCLE + 2  # the first column is read
_T_CYCLE = _X0_CYCLE + 1 + ADD_CYCLES  # t = r - x0 is there
_ADDEND_CYCLE = 2  # when a fused multiply-add takes its addend
_STEPS = len(COLUMNS) - 2  # fused multiply-adds of the polynomial
_FINISH_CYCLE = _T_CYCLE + _STEPS * FMA32_CYCLES  # the polynomial is there
_LAST_READ_CYCLE = _FINISH_CYCLE - FMA32_CYCLES + _ADDEND_CYCLE - 1

FUNCTION_CYCLES = _FINISH_CYCLE + FMA32_CYCLES
"""Latency of :class:`FunctionUnit`."""

_ARGUMENT_CYCLE = 1 + CAST_IN_CYCLES  # the cast element is there
_X_CYCLE = _ARGUMENT_CYCLE + FMA32_CYCLES

ACTIVATION_LANE_CYCLES = _X_CYCLE + FUNCTION_CYCLES + CAST_OUT_CYCLES
"""Latency of :class:`ActivationLane`: choice of the source, cast, argument, function, cast."""

_UNIT_CYCLES = {
    "strip": 0,
    "bounds": 0,
    "outcomes": 1,
    "reduction": 2,
    "odd": _BINADE_CYCLE,
    "angle": _BINADE_CYCLE,
    "finish": _FINISH_CYCLE - 1,
    "alpha": _FINISH_CYCLE - 1,
}

CONTROL_CYCLES = {
    "from_psum": 0,
    "shift": 0,
    "src_dtype": 1,
    "load_scale": _ARGUMENT_CYCLE,
    "load_bias": _ARGUMENT_CYCLE,
    "own_scale": _ARGUMENT_CYCLE,
    "own_bias": _ARGUMENT_CYCLE,
    "scale": _ARGUMENT_CYCLE,
    "bias": _ARGUMENT_CYCLE,
    **{name: _X_CYCLE + cycle for name, cycle in _UNIT_CYCLES.items()},
    "dst_dtype": _X_CYCLE + FUNCTION_CYCLES,
    "saturate": _X_CYCLE + FUNCTION_CYCLES,
}
"""Every control of the lanes, with the cycle, counted from the arrival of the element, in which
they need it."""

TABLE_CYCLES = range(_X_CYCLE + _BINADE_CYCLE, _X_CYCLE + _LAST_READ_CYCLE + 1)
"""Cycles, counted from the arrival of an element, in which a lane reads its table for it."""

_MINUS_ZERO = 0x80000000  # added to anything it changes nothing
_ONE = 0x3F800000
_EXPONENT_BIAS = 127
_SHIFT_BITS = 4
_INDEX_BITS = ceil_log2(SEGMENTS)
_ENTRY_BITS = _INDEX_BITS + _SHIFT_BITS


class Outcomes(data.Struct):
    """Results that do not come from the table: codes of :class:`~..arch.functions.Outcome`.

    Members
    -------
    positive, negative : 3 bits
    zero : 3 bits
        In use if ``zeros``.
    """

    positive: OUTCOME_BITS
    negative: OUTCOME_BITS
    zero: OUTCOME_BITS
    zeros: 1


class Finish(data.Struct):
    """What follows the polynomial, or the outcome. At most one of them is set.

    Members
    -------
    log : add ``n`` times ln 2
    power : multiply by ``2**n``
    square : multiply the outcome by itself
    slope : multiply the outcome by ``alpha`` if the argument is less than 0
    """

    log: 1
    power: 1
    square: 1
    slope: 1


class Steering(data.Struct):
    """What a function asks of the lanes: controls of :class:`FunctionUnit`, by name."""

    strip: 1
    bounds: data.ArrayLayout(31, 2)
    outcomes: Outcomes
    reduction: unsigned(3)
    odd: 1
    angle: 1
    finish: Finish


class TableWrite(data.Struct):
    """One entry of a table on its way into the lanes.

    Members
    -------
    valid : 1 bit
    index : 9 bits
    segment : 7 times 32 bits
        In the order of :data:`~..arch.functions.COLUMNS`.
    binade : 13 bits
        The entry of binade ``index``; of an index of no binade it does not matter.
    """

    valid: 1
    index: _INDEX_BITS
    segment: data.ArrayLayout(32, len(COLUMNS))
    binade: _ENTRY_BITS


_UNIT_CONTROLS = {
    "strip": In(1),
    "bounds": In(31).array(2),
    "outcomes": In(Outcomes),
    "reduction": In(unsigned(3)),
    "odd": In(1),
    "angle": In(1),
    "finish": In(Finish),
    "alpha": In(32),
}


class TableMemory:
    """Contents of a lane's memories, for test benches.

    Attributes
    ----------
    columns : list of :class:`~amaranth.lib.memory.MemoryData`
        One for each of :data:`~..arch.functions.COLUMNS`.
    binades : :class:`~amaranth.lib.memory.MemoryData`
    """

    def __init__(self):
        self.columns = [MemoryData(shape=unsigned(32), depth=SEGMENTS, init=[]) for _ in COLUMNS]
        self.binades = MemoryData(shape=unsigned(_ENTRY_BITS), depth=2 * BINADES, init=[])


def steering_of(function):
    """The constant fields of :class:`Steering` for a function."""
    plan, table = PLANS[function], load_tables()[function]
    powers = (Reduction.SQRT, Reduction.RSQRT, Reduction.RECIPROCAL)
    return {
        "strip": plan.symmetry != Symmetry.NONE,
        "bounds": [int(bound) for bound in table.bounds],
        "outcomes": {
            "positive": plan.positive,
            "negative": plan.negative,
            "zero": plan.zero or 0,
            "zeros": plan.zero is not None,
        },
        "reduction": plan.reduction,
        "odd": plan.symmetry == Symmetry.ODD,
        "angle": plan.reduction == Reduction.ANGLE,
        "finish": {
            "log": plan.reduction == Reduction.LOG,
            "power": plan.reduction in powers,
            "square": plan.square,
            "slope": plan.slope,
        },
    }


def _line(m, name, value, since, until):
    """A value delayed cycle by cycle: what it is in the cycles ``since`` .. ``until``, by cycle."""
    values = {since: Value.cast(value)}
    for cycle in range(since + 1, until + 1):
        past = values[cycle - 1]
        values[cycle] = Signal(len(past), name=f"s{cycle}_{name}", reset_less=True)
        m.d.sync += values[cycle].eq(past)
    return values


class FunctionUnit(wiring.Component):
    """A function of a binary32 number, every cycle.

    The functions and the order of operations are those of :mod:`..arch.functions`. A control
    belongs to the element that has come as many cycles before as is said below. Elements of
    functions without a table may follow or precede others immediately.

    Parameters
    ----------
    memory : :class:`TableMemory`, optional
        Contents of the memories.

    Members
    -------
    x : :py:`In(32)`
        Binary32.
    strip, bounds : :py:`In(1)`, :py:`In(31).array(2)`
        Cycle 0: take the magnitude; first magnitudes, of positive and negative arguments, that have
        an outcome.
    outcomes : :py:`In(Outcomes)`
        Cycle 1.
    reduction : :py:`In(3)`
        Cycle 2: code of :class:`~..arch.functions.Reduction`.
    odd, angle : :py:`In(1)`
        Cycle 6: the result has the argument's sign; the reduction is ANGLE.
    finish, alpha : :py:`In(Finish)`, :py:`In(32)`
        Cycle 30.
    entry : :py:`In(TableWrite)`
        What is written in a cycle can be read from the next on. An element reads in cycles 6 to 28.
    result : :py:`Out(32)`
        Binary32, cycle :data:`FUNCTION_CYCLES` = 35. Every NaN is the canonical one.

    Timing
    ------
    One element per cycle. What happens to it::

        cycle   0  sign, magnitude, bounds            angle: 1 / pi times
                1  outcome; subnormals normalised     the significand,
                2  r and n of a significand           distance, times pi
                6  binade of r
                7  segment
                8  x0 is read
             9-10  t = r - x0
            11-30  five fused multiply-adds
            31-34  the finish, one more
    """

    def __init__(self, *, memory=None):
        self.memory = TableMemory() if memory is None else memory
        super().__init__(
            {"x": In(32), **_UNIT_CONTROLS, "entry": In(TableWrite), "result": Out(32)}
        )

    def elaborate(self, platform):
        m = Module()

        def line(name, value, since, until):
            return _line(m, name, value, since, until)

        looked_up, finish = _BINADE_CYCLE, _FINISH_CYCLE
        before, late = finish - 1, finish + _ADDEND_CYCLE

        # Cycle 0: what kind of argument.
        magnitude = self.x[:31]
        limit = Mux(self.x[31], self.bounds[1], self.bounds[0])
        sign = line("sign", self.x[31], 0, looked_up)
        zero = line("zero", magnitude == 0, 0, 1)
        nan = line("nan", magnitude > 0x7F800000, 0, 1)
        beyond = line("beyond", magnitude >= limit, 0, 1)
        u = line("u", Cat(magnitude, self.x[31] & ~self.strip), 0, 1)
        below = line("below", sign[1] & ~zero[1], 1, before)

        # Cycle 1: its outcome, if it has one.
        code = Signal(OUTCOME_BITS)
        value_of_code = Signal(32)
        is_zero = zero[1] & self.outcomes.zeros
        chosen = Mux(sign[1], self.outcomes.negative, self.outcomes.positive)
        m.d.comb += code.eq(Mux(nan[1], Outcome.NAN, Mux(is_zero, self.outcomes.zero, chosen)))
        with m.Switch(code):
            for outcome in Outcome:
                bits = u[1] if outcome == Outcome.ARGUMENT else outcome.bits
                with m.Case(int(outcome)):
                    m.d.comb += value_of_code.eq(bits)
        special = line("special", is_zero | beyond[1], 1, finish)  # NaN is beyond any bound
        word = line("word", Mux(special[1], value_of_code, u[1]), 1, 2)

        # Cycles 1 and 2: a significand r, and n.
        exponent, fraction = self._significand(m, u[1])
        reduced, n = self._reduced(m, exponent, fraction)
        plain = (self.reduction == Reduction.NONE) | (self.reduction == Reduction.ANGLE)
        whole = line("whole", Mux(special[2] | plain, word[2], reduced), 2, looked_up)
        n = line("n", n, 2, before)

        # Cycle 6: r, or the outcome in its place.
        m.submodules.reducer = reducer = AngleReducer()
        turned = self.angle & reducer.reduced & ~special[looked_up]
        m.d.comb += reducer.angle.eq(self.x)
        r = line("r", Mux(turned, reducer.distance, whole[looked_up]), looked_up, _T_CYCLE)
        negate = line(
            "negate", (self.odd & sign[looked_up]) ^ (turned & reducer.odd), looked_up, before
        )

        # The segment. What lies below the first binade is in it; above the last lie only outcomes.
        index = line("index", self._index(m, r), _X0_CYCLE, _LAST_READ_CYCLE)

        # The columns, each read in the cycle before it is used.
        column = iter(self._columns(m))

        def coefficient(cycle):
            address, value = next(column)
            m.d.comb += address.eq(index[cycle - 1])
            return value

        m.submodules.difference = difference = Add()
        m.d.comb += [
            difference.a.eq(r[_X0_CYCLE + 1]),
            difference.b.eq(coefficient(_X0_CYCLE + 1)),
        ]
        at = _T_CYCLE
        t = line("t", Mux(special[at], r[at], difference.result), at, finish)
        value = coefficient(at)
        for step in range(_STEPS):
            m.submodules[f"step{step}"] = fma = Fma32()
            m.d.comb += [
                fma.a.eq(t[at]),
                fma.b.eq(value),
                fma.c.eq(coefficient(at + _ADDEND_CYCLE)),
            ]
            value = fma.result
            at += FMA32_CYCLES

        # The finish: a times b plus c.
        n = n[before].as_signed()
        plain = special[before]
        power = self._power_of_two(m, n)
        factor = Signal(32)
        with m.If(self.finish.square):
            m.d.comb += factor.eq(t[before])
        with m.Elif(self.finish.slope & below[before]):
            m.d.comb += factor.eq(self.alpha)
        with m.Elif(self.finish.log & ~plain):
            m.d.comb += factor.eq(LN2)
        with m.Else():
            scaled = Mux(self.finish.power & ~plain, power, _ONE)
            m.d.comb += factor.eq(Cat(scaled[:31], negate[before]))
        factor = line("factor", factor, before, finish)
        number = line("number", self._as_binary32(m, n), before, finish)
        log = line("log", self.finish.log & ~plain, before, late)
        polynomial = line("polynomial", value, finish, late)
        m.submodules.last = last = Fma32()
        summand = Mux(log[finish], number[finish], polynomial[finish])
        m.d.comb += [
            last.a.eq(Mux(special[finish], t[finish], summand)),
            last.b.eq(factor[finish]),
            last.c.eq(Mux(log[late], polynomial[late], _MINUS_ZERO)),
            self.result.eq(last.result),
        ]
        return m

    def _significand(self, m, u):
        """Exponent and fraction, in cycle 2, of positive numbers, subnormal ones too."""
        field = u[23:31]
        normal = field.any()
        shifted, zeros = normalize(m, Cat(u[:23], normal), name="significand")
        s2_exponent = Signal(signed(9), reset_less=True)
        s2_fraction = Signal(23, reset_less=True)
        m.d.sync += [
            s2_exponent.eq(Mux(normal, field, 1) - _EXPONENT_BIAS - zeros),
            s2_fraction.eq(shifted[:23]),
        ]
        return s2_exponent, s2_fraction

    def _reduced(self, m, exponent, fraction):
        """``r`` and ``n`` for the reductions to a significand."""
        e = exponent
        half = e >> 1
        upper = fraction[22]
        n = Signal(signed(9))
        field = Signal(8)
        m.d.comb += [n.eq(half), field.eq(_EXPONENT_BIAS + e[0])]
        with m.Switch(self.reduction):
            with m.Case(int(Reduction.LOG)):
                m.d.comb += [n.eq(e + upper), field.eq(_EXPONENT_BIAS - upper)]
            with m.Case(int(Reduction.RSQRT)):
                m.d.comb += n.eq(-half)
            with m.Case(int(Reduction.RECIPROCAL)):
                m.d.comb += [n.eq(-1 - e), field.eq(_EXPONENT_BIAS)]
        return Cat(fraction, field, C(0, 1)), n

    def _index(self, m, r):
        """Number of the segment, in cycle 8, of ``r`` from cycle 6 on."""
        m.submodules.binades = memory = Memory(self.memory.binades)
        writer, reader = memory.write_port(), memory.read_port()
        at = _BINADE_CYCLE
        ahead = Signal(signed(9))
        binade = Signal(range(BINADES))
        m.d.comb += [
            ahead.eq(r[at][23:31] - FIRST_EXPONENT),
            binade.eq(Mux(ahead < 0, 0, ahead)),
            reader.addr.eq(Cat(binade, r[at][31])),
            writer.addr.eq(self.entry.index),
            writer.data.eq(self.entry.binade),
            writer.en.eq(self.entry.valid & (self.entry.index < 2 * BINADES)),
        ]
        base, shift = reader.data[:_INDEX_BITS], reader.data[_INDEX_BITS:]
        leading = Signal(_INDEX_BITS)
        index = Signal(_INDEX_BITS, reset_less=True)
        m.d.comb += leading.eq(Cat(r[at + 1][23 - _INDEX_BITS : 23], C(0, _INDEX_BITS))
                               >> (_INDEX_BITS - shift)[:_SHIFT_BITS])  # fmt: skip
        m.d.sync += index.eq(base + leading)
        return index

    def _columns(self, m):
        """Address and value, one cycle later, of every column."""
        for k, (name, contents) in enumerate(zip(COLUMNS, self.memory.columns, strict=True)):
            m.submodules[name] = memory = Memory(contents)
            writer, reader = memory.write_port(), memory.read_port()
            m.d.comb += [
                writer.addr.eq(self.entry.index),
                writer.data.eq(self.entry.segment[k]),
                writer.en.eq(self.entry.valid),
            ]
            yield reader.addr, reader.data

    def _power_of_two(self, m, n):
        """Code of ``2**n``: infinity above the range, two subnormal numbers below it."""
        field = Signal(signed(10))
        code = Signal(32)
        m.d.comb += field.eq(n + _EXPONENT_BIAS)
        with m.If(field[-1]):
            m.d.comb += code.eq(1 << 21)
        with m.Elif(field == 0):
            m.d.comb += code.eq(1 << 22)
        with m.Else():
            m.d.comb += code[23:31].eq(Mux(field > 255, 255, field))
        return code

    def _as_binary32(self, m, n):
        """An integer of 9 bits as binary32."""
        size = Signal(8)
        m.d.comb += size.eq(Mux(n < 0, -n, n))
        shifted, zeros = normalize(m, size, name="number")
        exponent = Signal(8)
        m.d.comb += exponent.eq(Mux(size.any(), _EXPONENT_BIAS + 7 - zeros, 0))
        return Cat(C(0, 16), shifted[:7], exponent, n[-1])


class ActivationLane(wiring.Component):
    """One partition of the scalar engine: an element in, an element out, every cycle.

    Members
    -------
    sbuf, psum : :py:`In(32).array(4)`
        What partition ``p - k * quadrant`` read, for ``k`` = 0 .. 3.
    from_psum, shift : :py:`In(1)`, :py:`In(2)`
        Cycle 0: take what came from a memory, shifted by whole quadrants.
    src_dtype : :py:`In(4)`
        Cycle 1.
    load_scale, load_bias : :py:`In(1)`
        Cycle 3: the element is no argument but this partition's scale, or bias, of the elements
        that follow. (Its result means nothing.)
    own_scale, own_bias : :py:`In(1)`
        Cycle 3: use what was loaded, instead of
    scale, bias : :py:`In(32)`
        Cycle 3: binary32.
    strip, bounds, outcomes, reduction, odd, angle, finish, alpha
        As in :class:`FunctionUnit`, 7 cycles later.
    dst_dtype, saturate : :py:`In(4)`, :py:`In(1)`
        Cycle 42.
    entry : :py:`In(TableWrite)`
        An element reads in the cycles :data:`TABLE_CYCLES`, 13 to 35.
    raw : :py:`Out(32)`
        Cycle :data:`ACTIVATION_LANE_CYCLES` = 44: the element in the low bits.

    :data:`CONTROL_CYCLES` holds the cycles by name.

    Attributes
    ----------
    memory : :class:`TableMemory`
    """

    def __init__(self):
        self.memory = TableMemory()
        super().__init__(
            {
                "sbuf": In(32).array(4),
                "psum": In(32).array(4),
                "from_psum": In(1),
                "shift": In(2),
                "src_dtype": In(4),
                "load_scale": In(1),
                "load_bias": In(1),
                "own_scale": In(1),
                "own_bias": In(1),
                "scale": In(32),
                "bias": In(32),
                **_UNIT_CONTROLS,
                "entry": In(TableWrite),
                "dst_dtype": In(4),
                "saturate": In(1),
                "raw": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.cast_in = cast_in = CastIn()
        m.submodules.argument = argument = Fma32()
        m.submodules.unit = unit = FunctionUnit(memory=self.memory)
        m.submodules.cast_out = cast_out = CastOut()

        far = [
            Mux(self.from_psum, psum, sbuf) for psum, sbuf in zip(self.psum, self.sbuf, strict=True)
        ]
        pairs = [Mux(self.shift[0], far[1], far[0]), Mux(self.shift[0], far[3], far[2])]
        element = Signal(32, reset_less=True)
        m.d.sync += element.eq(Mux(self.shift[1], pairs[1], pairs[0]))

        own_scale = Signal(32, reset_less=True)
        own_bias = Signal(32, reset_less=True)
        with m.If(self.load_scale):
            m.d.sync += own_scale.eq(cast_in.value)
        with m.If(self.load_bias):
            m.d.sync += own_bias.eq(cast_in.value)
        bias = Mux(self.own_bias, own_bias, self.bias)
        bias = _line(m, "bias", bias, _ARGUMENT_CYCLE, _ARGUMENT_CYCLE + _ADDEND_CYCLE)

        m.d.comb += [
            cast_in.raw.eq(element),
            cast_in.dtype.eq(self.src_dtype),
            argument.a.eq(cast_in.value),
            argument.b.eq(Mux(self.own_scale, own_scale, self.scale)),
            argument.c.eq(bias[_ARGUMENT_CYCLE + _ADDEND_CYCLE]),
            unit.x.eq(argument.result),
            unit.entry.eq(self.entry),
            cast_out.value.eq(unit.result),
            cast_out.dtype.eq(self.dst_dtype),
            cast_out.saturate.eq(self.saturate),
            self.raw.eq(cast_out.raw),
        ]
        for name in _UNIT_CYCLES:
            if name == "bounds":
                m.d.comb += [unit.bounds[k].eq(self.bounds[k]) for k in range(2)]
            else:
                m.d.comb += getattr(unit, name).eq(getattr(self, name))
        return m


class ActivationTables(wiring.Component):
    """The coefficients of all functions, and what writes those of one into the lanes.

    Members
    -------
    function : :py:`In(6)`
        Code of :class:`~..arch.isa.Function`.
    steering : :py:`Out(Steering)`
        Of the function, one cycle later.
    load : :py:`In(1)`
        See that the lanes hold the function's table; ``function`` must be what it was in the cycle
        before. Not while ``busy``.
    held : :py:`Out(1)`
        The lanes hold the table of what ``function`` was in the cycle before, or it has none.
    busy : :py:`Out(1)`
        Registered. From the cycle after ``load`` until the last entry has been written; not at all
        if the table is in the lanes or the function has none.
    entry : :py:`Out(TableWrite)`
        Registered: to all lanes.

    Timing
    ------
    A table of ``n`` segments keeps ``busy`` high for ``max(n, 64) + 2`` cycles. An element may
    follow as soon as ``busy`` is low; ``load`` must wait until the last element of the function
    before has read its table, :data:`TABLE_CYCLES`.
    """

    def __init__(self):
        super().__init__(
            {
                "function": In(_FUNCTION_BITS),
                "steering": Out(Steering),
                "load": In(1),
                "held": Out(1),
                "busy": Out(1),
                "entry": Out(TableWrite),
            }
        )

    def elaborate(self, platform):
        m = Module()
        words, places = _words()
        m.submodules.words = memory = Memory(shape=_WORD_BITS, depth=len(words), init=words)
        reader = memory.read_port()

        # What is constant for a function.
        has_table = Signal()
        first = Signal(range(len(words)), reset_less=True)
        last = Signal(range(len(words)), reset_less=True)
        with m.Switch(self.function):
            for function in PLANS:
                with m.Case(int(function)):
                    constant = Steering.const(steering_of(function))
                    m.d.sync += [
                        self.steering.eq(constant),
                        has_table.eq(function in places),
                    ]
                    if function in places:
                        m.d.sync += [first.eq(places[function][0]), last.eq(places[function][1])]

        # One word per cycle, from the memory through a register to the lanes.
        loaded = Signal(_FUNCTION_BITS)
        valid = Signal()
        reading = Signal()
        address = Signal(range(len(words)), reset_less=True)
        begin = Signal()
        arriving = Signal()
        index = Signal(_INDEX_BITS, reset_less=True)
        here = ~has_table | (valid & (loaded == self.function))
        m.d.comb += [
            self.held.eq(here & ~self.busy),
            begin.eq(self.load & ~here),
            reader.addr.eq(address),
        ]
        with m.If(begin):
            m.d.sync += [
                loaded.eq(self.function), valid.eq(1), reading.eq(1), address.eq(first),
            ]  # fmt: skip
        with m.Elif(reading):
            m.d.sync += [address.eq(address + 1), reading.eq(address != last)]
        with m.If(begin):
            m.d.sync += index.eq(0)
        with m.Elif(arriving):
            m.d.sync += index.eq(index + 1)
        m.d.sync += [
            arriving.eq(reading),
            self.entry.valid.eq(arriving),
            self.entry.index.eq(index),
            Cat(self.entry.segment, self.entry.binade).eq(reader.data),
            self.busy.eq(begin | reading | arriving),
        ]
        return m


_FUNCTION_BITS = next(item.width for name, item, _ in Activation.scalars if name == "function")
_WORD_BITS = 32 * len(COLUMNS) + _ENTRY_BITS


def _words():
    """Words of all tables, and by function the first and last of its own."""
    words, places = [], {}
    for function, plan in PLANS.items():
        if not plan.has_table:
            continue
        table = load_tables()[function]
        first = len(words)
        for i in range(max(len(table.segments), 2 * BINADES)):
            word = 0
            if i < len(table.segments):
                for k, code in enumerate(table.segments[i]):
                    word |= int(code) << 32 * k
            if i < 2 * BINADES:
                word |= int(table.binades[i]) << 32 * len(COLUMNS)
            words.append(word)
        places[function] = first, len(words) - 1
    return words, places
