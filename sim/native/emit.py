"""C of a scheduled netlist.

All state lies in one ``struct state``, so that a checkpoint is a copy of it. Names: ``v`` is a word
of a value (``v12_1``: bits 64 to 127 of value 12), in context 0 one word, in a group an array over
lanes; ``f`` is a field of a group's input; ``m`` a memory, laid out ``[row][lane]``.
"""

from collections import Counter

import numpy as np

from .netlist import CLOCKED, CONST0, CONST1, Cell, Unsupported, Value

__all__ = ["Emitter"]

WORD = 64
CHUNK = 500
"""Cells per C function of the rest."""

PRELUDE = """\
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

#ifdef __clang__
#define LANES _Pragma("clang loop vectorize(assume_safety) interleave(disable)")
#else
#define LANES _Pragma("GCC ivdep")
#endif

/* Choices without branches: both sides are values already. */
static inline u32 sel32(u32 c, u32 a, u32 b) { return c ? a : b; }
static inline u64 sel64(u32 c, u64 a, u64 b) { return c ? a : b; }

static inline u64 w_get(const u64 *a, int n, i64 at) {
    i64 k = at >> 6, s = at & 63;
    u64 low = k >= 0 && k < n ? a[k] : 0, high = k + 1 >= 0 && k + 1 < n ? a[k + 1] : 0;
    return s ? low >> s | high << (64 - s) : low;
}

static inline void w_shift(u64 *y, int ny, const u64 *a, int na, i64 right) {
    for (int i = 0; i < ny; ++i) y[i] = w_get(a, na, 64 * (i64)i + right);
}

static inline void w_add(u64 *y, const u64 *a, const u64 *b, int n, int invert) {
    u64 carry = invert;
    for (int i = 0; i < n; ++i) {
        u64 c = invert ? ~b[i] : b[i], s = a[i] + c, t = s + carry;
        carry = (s < c) | (t < s);
        y[i] = t;
    }
}

static inline int w_less(const u64 *a, const u64 *b, int n) {
    for (int i = n - 1; i >= 0; --i)
        if (a[i] != b[i]) return a[i] < b[i];
    return 0;
}

static inline void w_mul(u64 *y, const u64 *a, const u64 *b, int n) {
    for (int i = 0; i < n; ++i) y[i] = 0;
    for (int i = 0; i < n; ++i) {
        u64 carry = 0;
        for (int j = 0; i + j < n; ++j) {
            unsigned __int128 t = (unsigned __int128)a[i] * b[j] + y[i + j] + carry;
            y[i + j] = (u64)t;
            carry = (u64)(t >> 64);
        }
    }
}

static inline void w_divmod(u64 *q, u64 *r, const u64 *a, const u64 *b, int n) {
    for (int i = 0; i < n; ++i) q[i] = r[i] = 0;
    for (int bit = 64 * n - 1; bit >= 0; --bit) {
        for (int i = n - 1; i > 0; --i) r[i] = r[i] << 1 | r[i - 1] >> 63;
        r[0] = r[0] << 1 | (a[bit / 64] >> bit % 64 & 1);
        if (!w_less(r, b, n)) {
            w_add(r, r, b, n, 1);
            q[bit / 64] |= (u64)1 << bit % 64;
        }
    }
}
"""


def _ctype(width):
    """Of a value while it is computed with."""
    return "u32" if width <= 32 else "u64"


def _select(width):
    return "sel32" if width <= 32 else "sel64"


def _storage(width):
    return "u8" if width <= 8 else "u16" if width <= 16 else "u32" if width <= 32 else "u64"


def _mask(width):
    text = f"{(1 << width) - 1:#x}"
    return text + ("ull" if width > 32 else "u")


def _literal(number, width):
    return f"{number:#x}" + ("ull" if width > 32 else "u")


def words(width):
    """Number and widths of the words of a value."""
    return [min(WORD, width - low) for low in range(0, width, WORD)]


class Emitter:
    """Writes the C of one netlist."""

    def __init__(self, netlist, plan):
        self.netlist, self.plan = netlist, plan
        self.members = {}  # of the state: name -> (type, count)
        self.functions = []
        self.fields = {f.value.number: f for per in plan.fields for f in per}
        self.doubled = {
            number
            for number in plan.crossing
            if netlist.values[number].kind == "reg" and netlist.values[number].context
        }
        self.memories = [m for c in netlist.contexts for m in c.memories]
        self.memory_number = {id(m): i for i, m in enumerate(self.memories)}
        self.memory_calls, self.flips = [], []

    # Names ----------------------------------------------------------------------------------------

    def resolve(self, bits):
        """Bits as ``(value, offset, lane)``; the value is negative for constants."""
        netlist, found = self.netlist, []
        for bit in bits:
            if bit < 0:
                found.append((int(bit), 0, 0))
            else:
                value = int(netlist.value_of[bit])
                found.append((value, int(netlist.offset_of[bit]), int(netlist.lane_of[bit])))
        return found

    def member(self, name, ctype, count):
        self.members.setdefault(name, (ctype, count))

    def stored(self, value, word):
        """Name of a value's word in the state."""
        name = f"v{value.number}_{word}"
        width = words(value.width)[word]
        lanes = self.netlist.contexts[value.context].lanes
        if value.context == 0:
            self.member(name, _ctype(width), 0)
        elif value.number in self.doubled:
            self.member(name, _storage(width), 2 * lanes)
        else:
            self.member(name, _storage(width), lanes)
        return name

    # Expressions ----------------------------------------------------------------------------------

    def joined(self, runs, width):
        """C of some runs ``(text, its width, offset, length, position)`` side by side."""
        ctype = _ctype(width)
        parts = []
        for text, own, offset, length, position in runs:
            if text is None:
                parts.append(_literal(offset << position, width))
                continue
            term = text
            if offset:
                term = f"({term} >> {offset})"
            if own > 32 and width <= 32:
                term = f"(u32){term}"
            if length < own - offset:
                term = f"({term} & {_mask(length)})"
            if position:
                if width > 32 and own <= 32:
                    term = f"(u64){term}"
                term = f"({term} << {position})"
            parts.append(term)
        if not parts:
            return _literal(0, width)
        if len(parts) == 1:
            return parts[0] if parts[0].startswith("(") or parts[0].isalnum() else f"({parts[0]})"
        text = " | ".join(parts)
        return f"(({ctype})({text}))" if width > 32 else f"({text})"

    def expression(self, body, resolved):
        """C of at most 64 bits."""
        width, runs, at = len(resolved), [], 0
        while at < width:
            value, offset, lane = resolved[at]
            end = at + 1
            if value < 0:
                number = 0
                end = at
                while end < width and resolved[end][0] < 0:
                    number |= (resolved[end][0] == CONST1) << (end - at)
                    end += 1
                if number:
                    runs.append((None, 0, number, end - at, at))
            else:
                repeated = at + 1
                while repeated < width and resolved[repeated] == resolved[at]:
                    repeated += 1
                if repeated - at > 1:  # a sign, extended
                    length = repeated - at
                    text, own = body.word(value, offset // WORD, lane)
                    bit = f"{text} >> {offset % WORD}" if offset % WORD else text
                    ctype = _ctype(length)
                    bit = f"({ctype})({bit})" if own > 32 or length > 32 else bit
                    runs.append(
                        (f"((0 - ({bit} & 1)) & {_mask(length)})", length, 0, length, at)
                    )
                    at = repeated
                    continue
                while (
                    end < width
                    and resolved[end] == (value, offset + end - at, lane)
                    and (offset + end - at) % WORD
                ):
                    end += 1
                text, own = body.word(value, offset // WORD, lane)
                runs.append((text, own, offset % WORD, end - at, at))
            at = end
        return self.joined(runs, width)


class Body:
    """One C function over the lanes of a context: what it loads, computes and stores."""

    def __init__(self, emitter, context, name):
        self.e, self.context, self.name = emitter, context, name
        self.group = context.number > 0
        self.lines, self.loads, self.pointers, self.local = [], {}, {}, {}
        self.stage, self.ends = {}, []

    # Reading --------------------------------------------------------------------------------------

    def pointer(self, name, text, ctype, const=True):
        kind = f"const {ctype}" if const else ctype
        self.pointers.setdefault(name, f"{kind} *restrict {name} = {text};")

    def word(self, number, word, lane):
        """C of a word of a value, and its width."""
        e = self.e
        value = e.netlist.values[number]
        width = words(value.width)[word]
        key = (number, word, lane)
        if (number, word) in self.local and value.context == self.context.number:
            return self.local[number, word], width
        if key in self.loads:
            return self.loads[key], width
        if value.context == self.context.number and self.group:
            if value.kind == "field":
                text = self.field(e.fields[number])
                if text is None:
                    return self.loads[key], width
            else:
                stored = e.stored(value, word)
                if number in e.doubled:
                    lanes = self.context.lanes
                    self.pointer(
                        stored, f"s->{stored} + s->flip * {lanes}", _storage(width), const=True
                    )
                else:
                    self.pointer(stored, f"s->{stored}", _storage(width), const=False)
                text = f"{stored}[l]"
            name = f"x{number}_{word}"
            self.lines.append(f"const {_ctype(width)} {name} = {text};")
            self.loads[key] = name
            return name, width
        return self.outside(value, word, lane), width

    def outside(self, value, word, lane):
        """C of a word that is not of this lane."""
        e = self.e
        width = words(value.width)[word]
        stored = e.stored(value, word)
        if value.context == 0:
            return f"s->{stored}"
        at = f"{lane}"
        if value.number in e.doubled:
            at = f"s->flip * {e.netlist.contexts[value.context].lanes} + {lane}"
        return f"({_ctype(width)})s->{stored}[{at}]"

    def field(self, field):
        """C of a field in the lane loop; None if it is loaded already."""
        e = self.e
        number, width = field.value.number, field.value.width
        key = (number, 0, 0)
        if field.uniform:
            name = f"u{number}"
            text = self.source(field, 0)
            self.pointers.setdefault(name, f"const {_ctype(width)} {name} = {text};")
            self.loads[key] = name
            return None
        lanes = self.context.lanes
        direct = self.direct(field)
        if direct:
            return direct
        name = f"f{number}"
        e.member(name, _storage(width), lanes)
        self.pointer(name, f"s->{name}", _storage(width))
        self.stage.setdefault(number, self.staging(field, name))
        return f"{name}[l]"

    def source(self, field, lane):
        """C of what a field is in one lane."""
        width = field.value.width
        source, offset = int(field.source[lane]), int(field.offset[lane])
        if source < 0:
            return _literal(offset, width)
        value = self.e.netlist.values[source]
        text = self.outside(value, offset // WORD, int(field.lane[lane]))
        own = words(value.width)[offset // WORD]
        return self.e.joined([(text, own, offset % WORD, width, 0)], width)

    def direct(self, field):
        """A field that is the same lane of another group in every lane needs no copy."""
        e = self.e
        source, offset = int(field.source[0]), int(field.offset[0])
        if source < 0 or not (
            (field.source == source).all()
            and (field.offset == offset).all()
            and (np.diff(field.lane.astype(np.int64)) == 1).all()
        ):
            return None
        value = e.netlist.values[source]
        if value.context == 0 or value.context == self.context.number:
            return None
        word, first = offset // WORD, int(field.lane[0])
        own = words(value.width)[word]
        stored = e.stored(value, word)
        at = first
        if source in e.doubled:
            at = f"s->flip * {e.netlist.contexts[value.context].lanes} + {first}"
        name = f"d{stored}_{first}"
        self.pointer(name, f"s->{stored} + {at}", _storage(own))
        return e.joined([(f"{name}[l]", own, offset % WORD, field.value.width, 0)],
                        field.value.width)

    def staging(self, field, name):
        """C that copies what a field is in each lane into an array."""
        e, lines = self.e, []
        source = field.source.astype(np.int64)
        offset, lane = field.offset, field.lane.astype(np.int64)
        lanes, at = self.context.lanes, 0
        loops = {}
        while at < lanes:
            end, step = at + 1, 0
            if source[at] >= 0:
                while (
                    end < lanes
                    and source[end] == source[at]
                    and offset[end] == offset[at]
                    and lane[end] - lane[end - 1] == (step if end > at + 1 else lane[at + 1] - lane[at])
                ):
                    step = lane[end] - lane[end - 1]
                    end += 1
                    if step not in (0, 1):
                        break
            else:
                while end < lanes and source[end] < 0 and offset[end] == offset[at]:
                    end += 1
            if end - at > 2 and step in (0, 1) and source[at] >= 0:
                loops.setdefault((int(source[at]), int(offset[at]), int(step)), []).append(
                    (at, end, int(lane[at]))
                )
            elif source[at] < 0 and end - at > 2:
                lines.append(
                    f"for (int l = {at}; l < {end}; ++l) {name}[l] = "
                    f"{_literal(int(offset[at]), field.value.width)};"
                )
            else:
                end = at + 1
                lines.append(f"{name}[{at}] = {self.source(field, at)};")
            at = end
        for (number, first, step), runs in loops.items():
            value = e.netlist.values[number]
            word = first // WORD
            own = words(value.width)[word]
            for low, high, start in runs:
                index = f"l - {low - start}" if step else f"{start}"
                text = self.outside(value, word, f"({index})")
                text = e.joined([(text, own, first % WORD, field.value.width, 0)],
                                field.value.width)
                lines.append(f"for (int l = {low}; l < {high}; ++l) {name}[l] = {text};")
        return lines

    # Computing ------------------------------------------------------------------------------------

    def x(self, bits):
        return self.e.expression(self, bits)

    def define(self, value, word, text):
        width = words(value.width)[word]
        name = f"t{value.number}_{word}"
        self.lines.append(f"const {_ctype(width)} {name} = {text};")
        self.local[value.number, word] = name

    def array(self, resolved, count, prefix, at):
        """A local array of 64-bit words."""
        name = f"{prefix}{at}"
        parts = [self.x(resolved[64 * i : 64 * (i + 1)]) if 64 * i < len(resolved) else "0"
                 for i in range(count)]
        self.lines.append(f"const u64 {name}[{count}] = {{{', '.join(parts)}}};")
        return name

    def cell(self, cell):
        """Compute a cell's output."""
        kind, out = cell.kind, cell.output
        width = out.width
        inputs = {n: self.e.resolve(b) for n, b in cell.inputs.items()}
        if kind == "read":
            self.read(cell, inputs["A"])
            return
        signed = bool(cell.signed.get("A_SIGNED"))
        both = signed and bool(cell.signed.get("B_SIGNED", 1))

        def extended(name, to, sign):
            bits = inputs[name]
            fill = bits[-1] if sign and bits else (CONST0, 0, 0)
            return bits[:to] + [fill] * (to - len(bits))

        if kind in ("$and", "$or", "$xor", "$xnor", "$not", "$pos", "$mux", "$pmux"):
            self.bitwise(kind, out, inputs, extended, signed)
            return
        if kind in ("$reduce_or", "$reduce_bool", "$logic_not", "$reduce_and", "$reduce_xor",
                    "$reduce_xnor", "$logic_and", "$logic_or", "$eq", "$ne", "$eqx", "$nex"):
            self.define(out, 0, self.flag(kind, inputs, extended, both))
            for word in range(1, len(words(width))):
                self.define(out, word, "0")
            return
        if kind in ("$lt", "$le", "$gt", "$ge"):
            a, b = inputs["A"], inputs["B"]
            to = max(len(a), len(b))
            a, b = extended("A", to, both), extended("B", to, both)
            if kind in ("$gt", "$ge"):
                a, b = b, a
            strict = kind in ("$lt", "$gt")
            if to <= WORD:
                if both:
                    text = f"({self.signed(a)} {'<' if strict else '<='} {self.signed(b)})"
                else:
                    text = f"({self.x(a)} {'<' if strict else '<='} {self.x(b)})"
            else:
                count = -(-to // WORD)
                if both:  # the order of signed numbers is that of unsigned ones, sign inverted
                    a = a + [a[-1]] * (count * WORD - to)
                    b = b + [b[-1]] * (count * WORD - to)
                x = self.array(a, count, "a", out.number)
                y = self.array(b, count, "b", out.number)
                if both:
                    for name in (x, y):
                        self.lines.append(
                            f"u64 {name}s[{count}]; memcpy({name}s, {name}, sizeof {name}s); "
                            f"{name}s[{count - 1}] ^= 1ull << 63;"
                        )
                    x, y = f"{x}s", f"{y}s"
                text = f"w_less({x}, {y}, {count})" if strict else f"!w_less({y}, {x}, {count})"
            self.define(out, 0, f"(u32){text}")
            for word in range(1, len(words(width))):
                self.define(out, word, "0")
            return
        if width > WORD or any(len(bits) > WORD for n, bits in inputs.items()):
            self.wide(cell, inputs, extended, signed, both)
            return
        ctype, mask = _ctype(width), _mask(width)
        full = width in (32, 64)

        def masked(text):
            return text if full else f"({text}) & {mask}"

        if kind in ("$add", "$sub", "$mul"):
            op = {"$add": "+", "$sub": "-", "$mul": "*"}[kind]
            a, b = self.x(extended("A", width, signed)), self.x(extended("B", width, both))
            if width > 32:
                a, b = f"(u64){a}", f"(u64){b}"
            text = masked(f"{a} {op} {b}")
        elif kind == "$neg":
            text = masked(f"0 - {'(u64)' if width > 32 else ''}{self.x(extended('A', width, signed))}")
        elif kind in ("$shl", "$sshl"):
            a, b = extended("A", width, signed), inputs["B"]
            text = masked(self.shifted(self.x(a), b, width, "<<", width))
        elif kind in ("$shr", "$sshr"):
            to = max(width, len(inputs["A"]))
            sign = kind == "$sshr" and signed
            a = extended("A", to, signed)
            if sign:
                amount = self.x(inputs["B"])
                top = 31 if to <= 32 else 63
                guard = amount
                if (1 << len(inputs["B"])) - 1 > top:
                    guard = f"({amount} > {top} ? {top} : {amount})"
                text = f"({_ctype(to)})({self.signed(a)} >> {guard})"
            else:
                text = self.shifted(self.x(a), inputs["B"], to, ">>", to)
            text = f"({ctype})({text})" if _ctype(to) != ctype else text
            text = f"({text}) & {mask}" if not full or to > width else text
        elif kind in ("$shift", "$shiftx"):
            to = max(width, len(inputs["A"]))
            a = self.x(extended("A", to, signed))
            right = self.shifted(a, inputs["B"], to, ">>", to)
            if cell.signed.get("B_SIGNED"):
                b = self.signed(inputs["B"])
                negative = self.shifted(a, [], to, "<<", to, amount=f"(0 - {b})")
                positive = self.shifted(a, [], to, ">>", to, amount=b)
                right = f"{_select(to)}({b} < 0, {negative}, {positive})"
            text = f"({ctype})({right})" if _ctype(to) != ctype else right
            text = f"({text}) & {mask}"
        elif kind in ("$div", "$mod", "$divfloor", "$modfloor"):
            text = masked(self.division(kind, extended, inputs, width, both))
        elif kind == "$bmux":
            text = self.index(inputs["A"], inputs["S"], width)
        else:
            raise Unsupported(f"{cell.name} {cell.source}: cell {kind} is not supported")
        self.define(out, 0, text)

    def shifted(self, text, bits, width, op, limit, amount=None):
        """A shift by any amount."""
        size = 32 if width <= 32 else 64
        value = amount or self.x(bits)
        wide = f"({_ctype(width)})" if width > 32 else ""
        if amount is None and (1 << len(bits)) - 1 < size:
            return f"({wide}{text} {op} {value})"
        chosen = f"{wide}{text} {op} ({value} & {size - 1})"
        return f"{_select(width)}({value} < {size}, {chosen}, 0)"

    def signed(self, resolved):
        """C of a signed number."""
        width = len(resolved)
        size = 32 if width <= 32 else 64
        if width == size:
            return f"((i{size}){self.x(resolved)})"
        return f"((i{size})((u{size}){self.x(resolved)} << {size - width}) >> {size - width})"

    def division(self, kind, extended, inputs, width, both):
        to = max(width, len(inputs["A"]), len(inputs["B"]))
        if both:
            a, b = self.signed(extended("A", to, True)), self.signed(extended("B", to, True))
            a, b = f"(i64){a}", f"(i64){b}"
        else:
            a, b = f"(u64){self.x(extended('A', to, False))}", f"(u64){self.x(extended('B', to, False))}"
        n = len(self.lines)
        ctype = "i64" if both else "u64"
        self.lines.append(f"const {ctype} n{n} = {a}, d{n} = {b};")
        a, b = f"n{n}", f"d{n}"
        safe = f"({b} == 0)"
        if both:
            safe = f"({b} == 0 || {b} == -1)"
            special = {"$div": f"({b} ? 0 - (u64){a} : 0)", "$mod": f"({b} ? 0 : (u64){a})"}
            special |= {"$divfloor": special["$div"], "$modfloor": special["$mod"]}
            special = special[kind]
        else:
            special = "0" if "div" in kind else a
        result = {
            "$div": f"{a} / {b}",
            "$mod": f"{a} % {b}",
            "$divfloor": f"{a} / {b} - ({a} % {b} != 0 && ({a} < 0) != ({b} < 0))" if both else f"{a} / {b}",
            "$modfloor": f"{a} % {b} + ({a} % {b} != 0 && ({a} < 0) != ({b} < 0) ? {b} : 0)" if both else f"{a} % {b}",
        }[kind]
        return f"({_ctype(width)})({safe} ? (u64){special} : (u64)({result}))"

    def index(self, a, s, width):
        text = self.x(a[:width])
        for i in range(1, len(a) // width):
            one = self.x(a[i * width : (i + 1) * width])
            text = f"{_select(width)}({self.x(s)} == {i}, {one}, {text})"
        return text

    def bitwise(self, kind, out, inputs, extended, signed):
        total = out.width
        for word, width in enumerate(words(total)):
            part = slice(WORD * word, WORD * word + width)
            ctype, mask = _ctype(width), _mask(width)
            cast = "(u64)" if width > 32 else ""
            if kind == "$mux":
                s = self.x(inputs["S"])
                a, b = self.x(inputs["A"][part]), self.x(inputs["B"][part])
                text = f"{_select(width)}({s}, {b}, {a})"
            elif kind == "$pmux":
                text = self.x(inputs["A"][part])
                for i in reversed(range(len(inputs["S"]))):
                    b = inputs["B"][i * total : (i + 1) * total][part]
                    s = self.x(inputs["S"][i : i + 1])
                    text = f"{_select(width)}({s}, {self.x(b)}, {text})"
            else:
                a = self.x(extended("A", total, signed)[part])
                if kind == "$pos":
                    text = a
                elif kind == "$not":
                    text = f"~{cast}{a} & {mask}"
                else:
                    b = self.x(extended("B", total, signed)[part])
                    op = {"$and": "&", "$or": "|", "$xor": "^", "$xnor": "^"}[kind]
                    text = f"{a} {op} {b}"
                    if kind == "$xnor":
                        text = f"~({cast}{text}) & {mask}"
            del ctype
            self.define(out, word, text)

    def nonzero(self, bits):
        parts = [
            f"({self.x(bits[low : low + WORD])} != 0)" for low in range(0, len(bits), WORD)
        ]
        return "(" + " | ".join(parts or ["0"]) + ")"

    def flag(self, kind, inputs, extended, both):
        a = inputs["A"]
        if kind in ("$reduce_or", "$reduce_bool"):
            return f"(u32){self.nonzero(a)}"
        if kind == "$logic_not":
            return f"(u32)!{self.nonzero(a)}"
        if kind in ("$logic_and", "$logic_or"):
            op = "&" if kind == "$logic_and" else "|"
            return f"(u32)({self.nonzero(a)} {op} {self.nonzero(inputs['B'])})"
        if kind == "$reduce_and":
            parts = [
                f"({self.x(a[low : low + WORD])} == {_mask(min(WORD, len(a) - low))})"
                for low in range(0, len(a), WORD)
            ]
            return "(u32)(" + " & ".join(parts or ["1"]) + ")"
        if kind in ("$reduce_xor", "$reduce_xnor"):
            parts = [f"(u64){self.x(a[low : low + WORD])}" for low in range(0, len(a), WORD)]
            text = f"(u32)__builtin_parityll({' ^ '.join(parts or ['0'])})"
            return text if kind == "$reduce_xor" else f"(u32)!{text}"
        to = max(len(a), len(inputs["B"]))
        a, b = extended("A", to, both), extended("B", to, both)
        parts = [
            f"({self.x(a[low : low + WORD])} == {self.x(b[low : low + WORD])})"
            for low in range(0, to, WORD)
        ]
        text = "(" + " & ".join(parts) + ")"
        return f"(u32){text}" if kind in ("$eq", "$eqx") else f"(u32)!{text}"

    def wide(self, cell, inputs, extended, signed, both):
        """Arithmetic on more than 64 bits."""
        kind, out, n = cell.kind, cell.output, cell.output.number
        width = out.width
        to = max(width, len(inputs["A"]))
        if kind in ("$div", "$mod", "$divfloor", "$modfloor"):
            to = max(to, len(inputs["B"]))
        count = -(-to // WORD)
        sign = signed if kind in ("$shl", "$sshl", "$shr", "$sshr", "$shift", "$shiftx", "$neg") else both
        a = self.array(extended("A", count * WORD, sign), count, "a", n)
        result = f"y{n}"
        self.lines.append(f"u64 {result}[{count}];")
        if kind in ("$add", "$sub", "$mul"):
            b = self.array(extended("B", count * WORD, both), count, "b", n)
            call = {"$add": f"w_add({result}, {a}, {b}, {count}, 0);",
                    "$sub": f"w_add({result}, {a}, {b}, {count}, 1);",
                    "$mul": f"w_mul({result}, {a}, {b}, {count});"}[kind]
            self.lines.append(call)
        elif kind == "$neg":
            self.lines.append(f"const u64 z{n}[{count}] = {{0}}; w_add({result}, z{n}, {a}, {count}, 1);")
        elif kind in ("$shl", "$sshl", "$shr", "$sshr", "$shift", "$shiftx"):
            amount = inputs["B"]
            if cell.signed.get("B_SIGNED") and kind in ("$shift", "$shiftx"):
                by = f"(i64){self.signed(amount[:64])}"
            else:
                big = self.nonzero(amount[31:]) if len(amount) > 31 else "0"
                by = f"({big} ? 0x40000000ll : (i64){self.x(amount[:31])})"
            if kind in ("$shl", "$sshl"):
                self.lines.append(f"w_shift({result}, {count}, {a}, {count}, -{by});")
            elif kind == "$sshr" and signed:
                fill = self.x([inputs["A"][-1]])
                self.lines.append(
                    f"u64 e{n}[{2 * count}]; memcpy(e{n}, {a}, sizeof {a}); "
                    f"memset(e{n} + {count}, {fill} ? 255 : 0, sizeof {a});"
                    f"i64 b{n} = {by}; w_shift({result}, {count}, e{n}, {2 * count}, "
                    f"b{n} > {WORD * count} ? {WORD * count} : b{n});"
                )
            else:
                self.lines.append(f"w_shift({result}, {count}, {a}, {count}, {by});")
        elif kind in ("$div", "$mod", "$divfloor", "$modfloor") and not both:
            b = self.array(extended("B", count * WORD, both), count, "b", n)
            q, r = (result, f"r{n}") if "div" in kind else (f"q{n}", result)
            self.lines.append(f"u64 {f'r{n}' if 'div' in kind else f'q{n}'}[{count}];")
            self.lines.append(
                f"if ({self.nonzero(inputs['B'])}) w_divmod({q}, {r}, {a}, {b}, {count}); else "
                f"{{ memcpy({r}, {a}, sizeof {a}); memset({q}, 0, sizeof {a}); }}"
            )
        elif kind == "$bmux":
            total = out.width
            for word, part in enumerate(words(total)):
                text = None
                for i in range(len(inputs["A"]) // total):
                    low = i * total + WORD * word
                    one = self.x(inputs["A"][low : low + part])
                    text = one if text is None else f"({self.x(inputs['S'])} == {i} ? {one} : {text})"
                self.define(out, word, text)
            return
        else:
            raise Unsupported(
                f"{cell.name} {cell.source}: cell {kind} of {to} bits is not supported"
            )
        for word, part in enumerate(words(width)):
            text = f"{result}[{word}]"
            text = text if part == WORD else f"{text} & {_mask(part)}"
            self.define(out, word, f"({_ctype(part)})({text})")

    def read(self, cell, addr):
        """A memory's read port without a clock."""
        memory, out = cell.signed["memory"], cell.output
        e, k = self.e, self.e.memory_number[id(cell.signed["memory"])]
        e.use_memory(memory)
        n = out.number
        self.lines.append(f"const u64 a{n} = {self.x(addr[:64])};")
        lane = "l" if self.group else "0"
        count = len(words(memory.width))
        ctype = _storage(words(memory.width)[0])
        guard = f"a{n} < {memory.depth}" if memory.depth < 1 << len(addr) else "1"
        self.lines.append(
            f"const {ctype} *r{n} = s->m{k} + ((({guard}) ? a{n} : 0) * {self.context.lanes} + {lane})"
            f" * {count};"
        )
        for word, width in enumerate(words(memory.width)):
            self.define(out, word, f"({_ctype(width)})(({guard}) ? r{n}[{word}] : 0)")

    # Storing --------------------------------------------------------------------------------------

    def keep(self, value):
        """Store a value for other functions."""
        e = self.e
        for word, width in enumerate(words(value.width)):
            stored = e.stored(value, word)
            text = self.local[value.number, word]
            if self.group:
                self.pointer(stored, f"s->{stored}", _storage(width), const=False)
                self.ends.append(f"{stored}[l] = ({_storage(width)}){text};")
            else:
                self.ends.append(f"s->{stored} = {text};")

    def sink(self, name, bits):
        """Store some bits, at most 64, under a name."""
        width = len(bits)
        self.lines.append(f"const {_ctype(width)} z{name} = {self.x(self.e.resolve(bits))};")
        if self.group:
            self.e.member(name, _storage(width), self.context.lanes)
            self.pointer(name, f"s->{name}", _storage(width), const=False)
            self.ends.append(f"{name}[l] = ({_storage(width)})z{name};")
        else:
            self.e.member(name, _ctype(width), 0)
            self.ends.append(f"s->{name} = z{name};")

    def register(self, cell, deferred=False):
        """The next contents of a register."""
        e, out = self.e, cell.output
        total = out.width
        inputs = {n: e.resolve(b) for n, b in cell.inputs.items() if n != "CLK"}
        polarity = {n: cell.signed.get(f"{n}_POLARITY", 1) for n in ("EN", "SRST")}

        def condition(name):
            text = self.x(inputs[name])
            return text if polarity[name] else f"!{text}"

        for word, width in enumerate(words(total)):
            part = slice(WORD * word, WORD * word + width)
            text = self.x(inputs["D"][part])
            if "EN" in inputs or cell.kind == "$sdffce":
                old, _ = self.word(out.number, word, 0)
            reset = _literal(
                (cell.signed.get("SRST_VALUE", 0) >> WORD * word) & ((1 << width) - 1), width
            )
            if cell.kind == "$sdffce":
                text = f"{_select(width)}({condition('SRST')}, {reset}, {text})"
            if "EN" in inputs:
                text = f"{_select(width)}({condition('EN')}, {text}, {old})"
            if "SRST" in inputs and cell.kind != "$sdffce":
                text = f"{_select(width)}({condition('SRST')}, {reset}, {text})"
            stored = e.stored(out, word)
            name = f"n{out.number}_{word}"
            self.lines.append(f"const {_ctype(width)} {name} = {text};")
            if not self.group:
                if deferred:
                    e.member(f"n{stored}", _ctype(width), 0)
                    self.ends.append(f"s->n{stored} = {name};")
                else:
                    self.ends.append(f"s->{stored} = {name};")
            elif out.number in e.doubled:
                lanes = self.context.lanes
                self.pointer(
                    f"w{stored}", f"s->{stored} + !s->flip * {lanes}", _storage(width), const=False
                )
                self.ends.append(f"w{stored}[l] = ({_storage(width)}){name};")
            else:
                self.pointer(stored, f"s->{stored}", _storage(width), const=False)
                self.ends.append(f"{stored}[l] = ({_storage(width)}){name};")

    def text(self):
        """The function."""
        out = [f"static void {self.name}(struct state *restrict s) {{"]
        if self.group:
            for lines in self.stage.values():
                if lines:
                    out += ["    {", *(f"        {line}" for line in self.staging_pointers(lines)), "    }"]
            out += [f"    {line}" for line in self.pointers.values()]
            out += ["    LANES", f"    for (int l = 0; l < {self.context.lanes}; ++l) {{"]
            out += [f"        {line}" for line in (*self.lines, *self.ends)]
            out += ["    }"]
        else:
            out += [f"    {line}" for line in (*self.pointers.values(), *self.lines, *self.ends)]
        return "\n".join([*out, "}", ""])

    def staging_pointers(self, lines):
        """Staging writes through the state: the arrays' own names come later."""
        return [f"{'' if line.startswith('for') else 's->'}{line}".replace(
            "++l) f", "++l) s->f") for line in lines]


def _whole(emitter):
    """All the functions, and the C file."""
    e, netlist, plan = emitter, emitter.netlist, emitter.plan
    values = netlist.values
    used_in = Counter()
    early_calls, late_calls = [], []

    # Which comb values are read by another function than the one that makes them?
    bodies = []  # (context, cells, registers, sinks, deferred)

    def reads_of(cell):
        found = set()
        for name, bits in cell.inputs.items():
            if name == "CLK":
                continue
            for value, _, _ in e.resolve(bits):
                if value >= 0:
                    found.add(value)
        return found

    for number, run in enumerate(plan.early):
        context = netlist.contexts[run.context]
        step = CHUNK if not context.number else len(run.cells)
        for low in range(0, len(run.cells), step):
            bodies.append((context, run.cells[low : low + step], [], [], f"early{number}_{low}"))
    early_count = len(bodies)
    for context in sorted(netlist.contexts, key=lambda c: (c.number == 0, c.number)):
        registers = [c for c in context.cells if c.kind in CLOCKED]
        sinks = e.sinks(context)
        if context.number:
            bodies.append((context, plan.late[context.number], registers, sinks, f"commit{context.number}"))
            continue
        bodies += _parts(e, context, plan.late[0], registers, sinks, reads_of)
    made, used = {}, {}
    for i, (context, cells, registers, sinks, _) in enumerate(bodies):
        for cell in cells:
            made[cell.output.number] = i
        for cell in (*cells, *registers):
            for value in reads_of(cell):
                used.setdefault(value, set()).add(i)
        for _, bits in sinks:
            for value, _, _ in e.resolve(bits):
                if value >= 0:
                    used.setdefault(value, set()).add(i)
    kept = {v for v, i in made.items() if used.get(v, set()) - {i}}
    kept |= {v for v in plan.crossing if v in made}
    for bits in netlist.outputs.values():
        kept |= {v for v, _, _ in e.resolve(bits) if v in made}
    kept |= {v for v in e.watched if v in made}
    # A register of the rest that a later function still reads is set at the end.
    deferred = set()
    for i, (context, _, registers, _, _) in enumerate(bodies):
        if context.number == 0:
            for cell in registers:
                if any(j > i for j in used.get(cell.output.number, ())):
                    deferred.add(cell.output.number)
    moves = []
    for i, (context, cells, registers, sinks, name) in enumerate(bodies):
        body = Body(e, context, name)
        for cell in cells:
            body.cell(cell)
            if cell.output.number in kept:
                body.keep(cell.output)
        for cell in registers:
            late = cell.output.number in deferred
            body.register(cell, late)
            if late:
                moves += [
                    f"s->{e.stored(cell.output, w)} = s->n{e.stored(cell.output, w)};"
                    for w in range(len(words(cell.output.width)))
                ]
        for sink, bits in sinks:
            body.sink(sink, bits)
        e.functions.append(body.text())
        (early_calls if i < early_count else late_calls).append(f"{name}(s);")
    del used_in
    # Inputs, registers and read data are in the state even if nothing reads them.
    for value in values:
        if value.kind in ("reg", "read", "input", "extern"):
            for word in range(len(words(value.width))):
                e.stored(value, word)
    return early_calls, late_calls, moves


def _parts(e, context, late, registers, sinks, reads_of):
    """Cut the commit of the rest into functions: registers with the cells that feed them."""
    maker = {cell.output.number: cell for cell in late}
    position = {id(cell): i for i, cell in enumerate(late)}
    done, parts = set(), []
    cells, own, asked = [], [], []

    def close():
        nonlocal cells, own, asked
        if cells or own or asked:
            ordered = sorted(cells, key=lambda cell: position[id(cell)])
            parts.append((context, ordered, own, asked, f"commit0_{len(parts)}"))
        cells, own, asked = [], [], []

    def cone(roots):
        stack = [v for v in roots if v in maker and v not in done]
        while stack:
            v = stack.pop()
            if v in done:
                continue
            done.add(v)
            cells.append(maker[v])
            stack += [u for u in reads_of(maker[v]) if u in maker and u not in done]

    for register in registers:
        cone(reads_of(register))
        own.append(register)
        if len(cells) + len(own) > CHUNK:
            close()
    for sink in sinks:
        cone({v for v, _, _ in e.resolve(sink[1]) if v >= 0})
        asked.append(sink)
        if len(cells) + len(asked) > CHUNK:
            close()
    close()
    return parts


def _sinks(self, context):
    """What a context's memories and externs are asked: names and bits, at most 64 each."""
    found = []

    def add(name, bits):
        for word, low in enumerate(range(0, len(bits), WORD)):
            found.append((f"{name}_{word}", bits[low : low + WORD]))

    for memory in context.memories:
        k = self.memory_number[id(memory)]
        for i, (addr, en, _, _, clocked) in enumerate(memory.reads):
            if clocked:
                add(f"m{k}r{i}a", addr)
                add(f"m{k}r{i}e", en)
        for i, (addr, en, data) in enumerate(memory.writes):
            add(f"m{k}w{i}a", addr)
            add(f"m{k}w{i}d", data)
            add(f"m{k}w{i}e", [int(b) for b in self.enables(en)[0]])
    if context.number == 0:
        for number, (_, _, ports) in enumerate(self.netlist.externs):
            for name, port in ports.items():
                if not isinstance(port, Value):
                    add(f"e{number}_{name}", port)
    return found


def _enables(self, en):
    """Enables of a write port without repetition, and how many bits each stands for."""
    groups, sizes = [], []
    for bit in en:
        if groups and bit == groups[-1]:
            sizes[-1] += 1
        else:
            groups.append(bit)
            sizes.append(1)
    return groups, sizes


def _use_memory(self, memory):
    k = self.memory_number[id(memory)]
    lanes = self.netlist.contexts[memory.context].lanes
    parts = words(memory.width)
    self.member(f"m{k}", _storage(parts[0]), memory.depth * lanes * len(parts))


def _memory_function(self, memory):
    """C that answers a memory's reads, then writes."""
    k = self.memory_number[id(memory)]
    context = self.netlist.contexts[memory.context]
    self.use_memory(memory)
    lanes, parts = context.lanes, words(memory.width)
    n, store = len(parts), _storage(parts[0])
    group = context.number > 0
    at = (lambda name: f"s->{name}[l]") if group else (lambda name: f"s->{name}")
    lines = []

    def row(address, bits):
        guard = f"{address} < {memory.depth}" if memory.depth < 1 << bits else "1"
        return guard, f"s->m{k} + ((u64){address} * {lanes} + {'l' if group else 0}) * {n}"

    for i, (addr, _, value, mask, clocked) in enumerate(memory.reads):
        if not clocked:
            continue
        address = at(f"m{k}r{i}a_0")
        guard, place = row(address, len(addr))
        lines.append(f"if ({at(f'm{k}r{i}e_0')}) {{")
        lines.append(f"    const {store} *row = {place};")
        for word, width in enumerate(parts):
            stored = self.stored(value, word)
            text = f"({guard}) ? row[{word}] : 0"
            lines.append(f"    {at(stored)} = {text};")
        for w, (_, en, _) in enumerate(memory.writes):
            if not mask[w]:
                continue
            lines.append(f"    if ({at(f'm{k}w{w}a_0')} == {address}) {{")
            for word, _ in enumerate(parts):
                stored = self.stored(value, word)
                lines.append(f"        u64 k{w}_{word} = {self.write_mask(k, w, en, word, at)};")
                lines.append(
                    f"        {at(stored)} = ({at(stored)} & ~k{w}_{word}) | "
                    f"({at(f'm{k}w{w}d_{word}')} & k{w}_{word});"
                )
            lines.append("    }")
        lines.append("}")
    for w, (addr, en, _) in enumerate(memory.writes):
        address = at(f"m{k}w{w}a_0")
        guard, place = row(address, len(addr))
        enabled = " | ".join(at(f"m{k}w{w}e_{i}") for i in range(-(-len(self.enables(en)[0]) // WORD)))
        lines.append(f"if (({enabled}) && ({guard})) {{")
        lines.append(f"    {store} *row = {place};")
        for word, _ in enumerate(parts):
            data = at(f"m{k}w{w}d_{word}")
            if len(self.enables(en)[0]) == 1:
                lines.append(f"    row[{word}] = {data};")
            else:
                lines.append(f"    u64 k{word} = {self.write_mask(k, w, en, word, at)};")
                lines.append(f"    row[{word}] = (row[{word}] & ~k{word}) | ({data} & k{word});")
        lines.append("}")
    out = [f"/* {memory.name} */", f"static void memory{k}(struct state *restrict s) {{"]
    if group:
        out += [f"    for (int l = 0; l < {lanes}; ++l) {{", *(f"        {x}" for x in lines), "    }"]
    else:
        out += [f"    {x}" for x in lines]
    return "\n".join([*out, "}", ""])


def _write_mask(self, k, w, en, word, at):
    """C of the bits of a word that a port writes."""
    groups, sizes = self.enables(en)
    terms, low = [], 0
    for i, size in enumerate(sizes):
        first, last = max(low, WORD * word), min(low + size, WORD * (word + 1))
        if first < last:
            ones = ((1 << (last - first)) - 1) << (first - WORD * word)
            name = at(f"m{k}w{w}e_{i // WORD}")
            terms.append(f"((u64)({name} >> {i % WORD} & 1) ? {ones:#x}ull : 0)")
        low += size
    return " | ".join(terms) or "0"


Emitter.sinks = _sinks
Emitter.enables = staticmethod(lambda en: _enables(None, en))
Emitter.use_memory = _use_memory
Emitter.memory_function = _memory_function
Emitter.write_mask = _write_mask


def _write(self, *, watched=(), externs=None, prelude="", glue=""):
    """Return the C file.

    Parameters
    ----------
    watched : set of int
        Values that can be looked at though nothing else needs them stored.
    externs : dict
        C of ``static void NAME(struct state *, int number, ...)`` per module that was not given.
    """
    self.watched = set(watched)
    externs = externs or {}
    early, late, moves = _whole(self)
    for memory in self.memories:
        self.functions.append(self.memory_function(memory))
        late_name = f"memory{self.memory_number[id(memory)]}(s);"
        self.memory_calls.append(late_name)
    calls = []
    for number, (kind, path, ports) in enumerate(self.netlist.externs):
        for name, port in ports.items():
            if not isinstance(port, Value):
                for i in range(-(-len(port) // WORD)):
                    self.member(f"e{number}_{name}_{i}", _ctype(min(64, len(port) - 64 * i)), 0)
        calls.append(externs[kind].code(self, number, ports))
    api = self.api()
    order = sorted(self.members.items(), key=lambda item: (item[1][1] * 0 + (item[1][1] > 0), 0))
    big = [f"    _Alignas(64) {t} {n}[{c}];" for n, (t, c) in order if c]
    small = [f"    {t} {n};" for n, (t, c) in order if not c]
    struct = "\n".join(
        ["struct state {", "    u64 cycles;", "    void *user;", "    u32 flip;", "    u32 ready;",
         *small, *big, "};", ""]
    )  # fmt: skip
    step = "\n".join(
        ["static void early(struct state *restrict s) {", *(f"    {x}" for x in early), "}", "",
         "static void late(struct state *restrict s) {", *(f"    {x}" for x in late),
         *(f"    {x}" for x in moves), *(f"    {x}" for x in self.memory_calls),
         *(f"    {x}" for x in calls),
         "    s->flip ^= 1;", "    s->cycles++;", "}", ""]
    )  # fmt: skip
    ports = [
        f"#define in_{name} {self.stored(value, 0)}"
        for name, value in self.netlist.inputs.items()
        if value.width <= WORD
    ]
    return "\n".join([PRELUDE, struct, prelude, *self.functions, step, api, *ports, glue])


def _api(self):
    """Reading and writing of inputs, outputs and values by number."""
    lines = ["size_t state_size(void) { return sizeof(struct state); }", ""]
    lines += ["struct state *state_open(void) {",
              "    struct state *s = aligned_alloc(64, (sizeof *s + 63) / 64 * 64);",
              "    if (!s) return 0;", "    memset(s, 0, sizeof *s);"]
    for value in self.netlist.values:
        if value.kind in ("reg", "read") and value.init:
            lanes = self.netlist.contexts[value.context].lanes
            for word, width in enumerate(words(value.width)):
                part = value.init >> WORD * word & ((1 << width) - 1)
                name = self.stored(value, word)
                if not part:
                    continue
                if value.context == 0:
                    lines.append(f"    s->{name} = {_literal(part, width)};")
                else:
                    count = lanes * (2 if value.number in self.doubled else 1)
                    lines.append(
                        f"    for (int l = 0; l < {count}; ++l) s->{name}[l] = {_literal(part, width)};"
                    )
    for memory in self.memories:
        if memory.init:
            k = self.memory_number[id(memory)]
            lanes = self.netlist.contexts[memory.context].lanes
            parts = words(memory.width)
            rows = [
                _literal(row >> WORD * word & ((1 << width) - 1), width)
                for row in memory.init
                for word, width in enumerate(parts)
            ]
            lines.append(f"    static const u64 i{k}[] = {{{', '.join(rows)}}};")
            lines.append(
                f"    for (int r = 0; r < {len(memory.init)}; ++r) for (int l = 0; l < {lanes}; ++l)"
                f" for (int w = 0; w < {len(parts)}; ++w)"
                f" s->m{k}[(r * {lanes} + l) * {len(parts)} + w] = i{k}[r * {len(parts)} + w];"
            )
    lines += ["    return s;", "}", "", "void state_close(struct state *s) { free(s); }", ""]
    body = Body(self, self.netlist.contexts[0], "outputs")
    for name, bits in self.netlist.outputs.items():
        for word, low in enumerate(range(0, len(bits), WORD)):
            part = self.resolve([int(b) for b in bits[low : low + WORD]])
            lines += [
                f"static inline u64 out_{name}_{word}(const struct state *s) {{",
                f"    return {self.expression(body, part)};",
                "}",
            ]
    lines += ["u64 output(const struct state *s, int number) {", "    switch (number) {"]
    number = 0
    for name, bits in self.netlist.outputs.items():
        for word in range(-(-len(bits) // WORD)):
            lines.append(f"    case {number}: return out_{name}_{word}(s);")
            number += 1
    lines += ["    }", "    return 0;", "}", ""]
    lines += ["void settle(struct state *s) { early(s); }",
              "void clock_once(struct state *s) { late(s); }",
              "void step(struct state *s, u64 cycles) {",
              "    while (cycles--) { early(s); late(s); }", "}", ""]
    lines += ["const struct { const char *name; size_t offset, size, count; } members[] = {"]
    for name, (ctype, count) in self.members.items():
        lines.append(
            f'    {{"{name}", offsetof(struct state, {name}), sizeof({ctype}), {max(count, 1)}}},'
        )
    lines += ["};", "size_t member_count(void) { return sizeof members / sizeof *members; }",
              "const char *member_name(size_t i) { return members[i].name; }",
              "size_t member_offset(size_t i) { return members[i].offset; }", ""]
    return "\n".join(["#include <stddef.h>", *lines])


Emitter.write = _write
Emitter.api = _api
