"""C of one function: expressions over bits, and what each kind of cell computes."""

import numpy as np

from .netlist import CONST0, CONST1, WORD, Unsupported

__all__ = ["WORD", "Body", "comment", "literal", "storage", "words"]


def words(width):
    """Widths of the words of a value."""
    return [min(WORD, width - low) for low in range(0, width, WORD)]


def literal(number, width):
    """C of a constant."""
    return f"{number:#x}" + ("ull" if width > 32 else "u")


def storage(width):
    """C type of a word where it is kept for every lane."""
    return "u8" if width <= 8 else "u16" if width <= 16 else "u32" if width <= 32 else "u64"


def ctype(width):
    """C type of a word while it is computed with."""
    return "u32" if width <= 32 else "u64"


def comment(text):
    """C that only people read."""
    return f"/* {text.replace('*/', '* /')} */"


def _mask(width):
    return literal((1 << width) - 1, width)


def _select(width):
    return "sel32" if width <= 32 else "sel64"


def join(runs, width):
    """C of runs of bits side by side: ``(text, its width, offset, length, position)``.

    A text of None is a constant, ``offset`` then its value.
    """
    parts = []
    for text, own, offset, length, position in runs:
        if text is None:
            parts.append(literal(offset << position, width))
            continue
        term = f"({text} >> {offset})" if offset else text
        if own > 32 and width <= 32:
            term = f"(u32){term}"
        if length < own - offset:
            term = f"({term} & {_mask(length)})"
        if position:
            term = f"({'(u64)' if width > 32 and own <= 32 else ''}{term} << {position})"
        parts.append(term)
    if not parts:
        return literal(0, width)
    if len(parts) == 1:
        return f"({parts[0]})"
    return f"((u64)({' | '.join(parts)}))" if width > 32 else f"({' | '.join(parts)})"


LARGE = 20_000
"""Cells in all lanes of a group from which on it is worth several variants of its code."""

LOOK = 8
"""Cycles after which a large group that is busy looks whether it still is; a power of 2."""


class Body:
    """A function over the lanes of a context: what it loads, computes and stores.

    It consists of parts, each of them a loop over the lanes of a block; what one part leaves to
    the next is in arrays of the size of a block.

    Attributes
    ----------
    lines : list of :class:`str`
        C of one lane in the present part.
    loops : list of lists of lines
    checks, staging, pointers, blocks : C ahead of the loops
        ``checks`` add to ``diff`` what has changed since the last time; ``staging`` copies what
        lanes see of other lanes, ``blocks`` declares arrays of the size of a block.
    """

    def __init__(self, emitter, context, name):
        self.e, self.context, self.name = emitter, context, name
        self.group = context.number > 0
        self.size = emitter.block(context)
        self.loops, self.checks = [], []
        self.pointers, self.staging, self.tables, self.arrays = {}, {}, {}, {}
        self.sources = set()
        self.shared, self.saved, self.texts = {}, {}, {}
        self.owned = set()
        self.begin(())

    def begin(self, owned):
        """Begin a part, which sets the registers ``owned``."""
        self.lines, self.loads, self.local, self.owned = [], {}, {}, set(owned)
        self.scalar = False

    def end(self):
        """End a part."""
        self.loops.append((self.lines, self.scalar))

    # Reading --------------------------------------------------------------------------------------

    def pointer(self, name, text, kind):
        self.pointers.setdefault(name, f"{kind} *restrict {name} = {text};")

    def array_of(self, name, kind):
        """Declare an array with an element for each lane of a block."""
        self.arrays.setdefault(name, f"_Alignas(64) {kind} {name}[{self.size}];")

    def word(self, number, word, lane):
        """C of a word of a value, and its width."""
        e = self.e
        value = e.netlist.values[number]
        width = words(value.width)[word]
        if value.context != self.context.number:
            return self.outside(value, word, lane), width
        if (number, word) in self.local:
            return self.local[number, word], width
        if not self.group and number not in self.owned:
            return self.outside(value, word, lane), width
        if (number, word) not in self.loads:
            if value.kind == "field":
                if number not in self.texts:
                    self.texts[number] = self.field(e.fields[number])
                text = self.texts[number]
            elif (number, word) in self.shared:
                text = f"{self.shared[number, word]}[l]"
            elif (number, word) in self.saved:
                text = f"{self.saved[number, word]}[l]"
            elif not self.group:
                text = f"(s->{e.stored(value, word)})"
            else:
                name = e.stored(value, word)
                at = f" + s->flip * {self.context.lanes}" if number in e.doubled else ""
                self.pointer(name, f"s->{name}{at} + base", storage(width))
                text = f"{name}[l]"
            name = text
            if text.endswith("]") or text.endswith(")"):
                name = f"x{number}_{word}"
                self.lines.append(f"const {ctype(width)} {name} = {text};")
            self.loads[number, word] = name
        return self.loads[number, word], width

    def outside(self, value, word, lane):
        """C of a word that does not belong to the lane at hand."""
        e = self.e
        width, name = words(value.width)[word], e.stored(value, word)
        if value.context == 0:
            return f"s->{name}"
        at = f"{lane}"
        if value.number in e.doubled:
            at = f"s->flip * {e.netlist.contexts[value.context].lanes} + {lane}"
        return f"({ctype(width)})s->{name}[{at}]"

    def field(self, field):
        """C of a field: what is the same in all lanes, lies in a row, or is gathered before."""
        e, number, width = self.e, field.value.number, field.value.width
        name = f"f{number}"
        if field.uniform:
            source = self.source(field, 0)
            if int(field.source[0]) < 0:
                return source.strip("()")
            e.member(name, ctype(width), 0)
            self.checks.append(f"diff |= s->{name} ^ {source}; s->{name} = {source};")
            self.pointers[name] = f"const {ctype(width)} {name} = s->{name};"
            return name
        direct = self.direct(field)
        if direct:
            return direct
        kind = storage(width)
        if (field.source < 0).all():
            table = ", ".join(str(v) for v in field.offset.tolist())
            self.tables.setdefault(
                name, f"static const {kind} {name}_[{self.context.lanes}] = {{{table}}};"
            )
            self.pointer(name, f"{name}_ + base", f"const {kind}")
            return f"{name}[l]"
        if self.of_neighbours(field):
            self.array_of(name, kind)
            self.staging[number] = self.copied(field, name)
            return f"{name}[l]"
        e.member(name, kind, self.context.lanes)
        self.pointer(name, f"s->{name} + base", f"const {kind}")
        self.checks += self.gathered(field, name)
        return f"{name}[l]"

    def of_neighbours(self, field):
        """Whether a field mostly shows registers of lanes of the same group.

        Then flags tell whether it may have changed, and nothing is compared.
        """
        values, own = self.e.netlist.values, 0
        for v in field.source.tolist():
            if v >= 0:
                value = values[v]
                if not value.context or value.kind not in ("reg", "read"):
                    return False
                own += value.context == self.context.number
        return 2 * own > self.context.lanes

    def source(self, field, lane):
        """C of what a field is in one lane."""
        width = field.value.width
        source, offset = int(field.source[lane]), int(field.offset[lane])
        if source < 0:
            return f"({literal(offset, width)})"
        value = self.e.netlist.values[source]
        text = self.outside(value, offset // WORD, int(field.lane[lane]))
        own = words(value.width)[offset // WORD]
        return join([(text, own, offset % WORD, width, 0)], width)

    def direct(self, field):
        """A field that lies in a row in another group needs no copy."""
        e = self.e
        source, offset = int(field.source[0]), int(field.offset[0])
        steps = np.diff(field.lane.astype(np.int64))
        same = (field.source == source).all() and (field.offset == offset).all()
        if source < 0 or not same or not (steps == 1).all():
            return None
        value = e.netlist.values[source]
        if value.context in (0, self.context.number):
            return None
        word, first = offset // WORD, int(field.lane[0])
        own, stored = words(value.width)[word], e.stored(value, word)
        at = f"{first}"
        if source in e.doubled:
            at = f"s->flip * {e.netlist.contexts[value.context].lanes} + {first}"
        name = f"d{stored}_{first}"
        self.pointer(name, f"s->{stored} + {at} + base", f"const {storage(own)}")
        self.watch(value)
        return join([(f"{name}[l]", own, offset % WORD, field.value.width, 0)], field.value.width)

    def watch(self, value):
        """Let the group run when a value of another one has changed."""
        crossing = value.number in self.e.plan.crossing
        flag = "ran" if value.kind == "comb" else "seen" if crossing else "was"
        if value.context != self.context.number:
            self.sources.add((value.context, "was" if value.kind == "read" else flag))

    def runs(self, field):
        """A field as runs of lanes: ``(first, step, count, source, offset, lane, by)``.

        Most lanes usually see their neighbours: the first run then covers all lanes from its first
        to its last, and what differs from it is put on top.
        """
        lanes, lane = self.context.lanes, field.lane.tolist()
        keys = list(zip(field.source.tolist(), field.offset.tolist(), strict=True))
        found, runs, left = [], {}, list(range(lanes))
        for at in range(lanes):
            if keys[at][0] >= 0 and self.e.netlist.values[keys[at][0]].context:
                runs.setdefault((keys[at], lane[at] - at), []).append(at)
        run = max(runs.values(), key=len, default=[])
        if 2 * len(run) > lanes:
            first, last = run[0], run[-1]
            found.append((first, 1, last - first + 1, *keys[first], lane[first], 1))
            left = sorted(set(left) - set(run))
        while left:
            at, part = left[0], [left[0]]
            for other in left[1:]:
                if keys[other] != keys[at]:
                    continue
                if len(part) > 1 and (
                    other - part[-1] != part[1] - at
                    or lane[other] - lane[part[-1]] != lane[part[1]] - lane[at]
                ):
                    continue
                part.append(other)
            step, by = (part[1] - at, lane[part[1]] - lane[at]) if len(part) > 1 else (1, 0)
            found.append((at, step, len(part), *keys[at], lane[at], by))
            left = sorted(set(left) - set(part))
        return found

    def seen(self, source, offset, lane, width):
        """C of what a field shows of one lane."""
        if source < 0:
            return literal(int(offset), width)
        value, offset = self.e.netlist.values[source], int(offset)
        own = words(value.width)[offset // WORD]
        whole = self.outside(value, offset // WORD, lane)
        return join([(whole, own, offset % WORD, width, 0)], width)

    def gathered(self, field, name):
        """C that copies what a field is in each lane into an array, and compares."""
        width, lanes = field.value.width, self.context.lanes
        lines = [f"{storage(width)} x[{lanes}];"]
        for first, step, count, source, offset, lane, by in self.runs(field):
            if count == 1:
                lines.append(f"x[{first}] = {self.seen(source, offset, lane, width)};")
                continue
            text = self.seen(source, offset, f"({lane} + {by} * i)", width)
            lines.append(f"for (int i = 0; i < {count}; ++i) x[{first} + {step} * i] = {text};")
        lines.append(
            f"for (int l = 0; l < {lanes}; ++l) diff |= x[l] ^ s->{name}[l], s->{name}[l] = x[l];"
        )
        return ["{", *(f"    {line}" for line in lines), "}"]

    def copied(self, field, name):
        """C that copies what a field is in each lane of a block into an array."""
        width, lanes, lines = field.value.width, self.context.lanes, []
        for first, step, count, source, offset, lane, by in self.runs(field):
            if source >= 0:
                self.watch(self.e.netlist.values[source])
            low, high = "0", f"{count}"
            if self.size < lanes:  # those of the run that lie in the block
                low, high = "low", "high"
                lines.append(
                    f"low = base > {first} ? (base - {first} + {step - 1}) / {step} : 0; "
                    f"high = (base + {self.size} - {first} + {step - 1}) / {step};"
                )
                lines.append(f"if (high > {count}) high = {count};")
            text = self.seen(source, offset, f"({lane} + {by} * i)", width)
            place = f"{name}[{first} + {step} * i - base]"
            if count < lanes // 2:
                lines.append("FEW")
            lines.append(f"for (int i = {low}; i < {high}; ++i) {place} = {text};")
        return lines

    def x(self, resolved):
        """C of at most 64 resolved bits."""
        width, runs, at = len(resolved), [], 0
        while at < width:
            value, offset, lane = resolved[at]
            end = at + 1
            if value < 0:
                number, end = 0, at
                while end < width and resolved[end][0] < 0:
                    number |= (resolved[end][0] == CONST1) << (end - at)
                    end += 1
                if number:
                    runs.append((None, 0, number, end - at, at))
                at = end
                continue
            text, own = self.word(value, offset // WORD, lane)
            while end < width and resolved[end] == resolved[at]:
                end += 1
            if end > at + 1:  # a sign, extended
                length = end - at
                bit = f"{text} >> {offset % WORD}" if offset % WORD else text
                if own > 32 or length > 32:
                    bit = f"({ctype(length)})({bit})"
                runs.append((f"((0 - ({bit} & 1)) & {_mask(length)})", length, 0, length, at))
                at = end
                continue
            while (
                end < width
                and (offset + end - at) % WORD
                and resolved[end] == (value, offset + end - at, lane)
            ):
                end += 1
            runs.append((text, own, offset % WORD, end - at, at))
            at = end
        return join(runs, width)

    # Computing ------------------------------------------------------------------------------------

    def define(self, value, word, text):
        width = words(value.width)[word]
        name = f"t{value.number}_{word}"
        self.lines.append(f"const {ctype(width)} {name} = {text}; {comment(value.name)}")
        self.local[value.number, word] = name

    def array(self, resolved, count, name):
        """A local array of words.

        It is the same memory for all lanes, so these cannot be taken several at a time.
        """
        self.scalar = True
        parts = [
            self.x(resolved[WORD * i : WORD * (i + 1)]) if WORD * i < len(resolved) else "0"
            for i in range(count)
        ]
        self.lines.append(f"const u64 {name}[{count}] = {{{', '.join(parts)}}};")
        return name

    def cell(self, cell):
        """Compute a cell's output."""
        if cell.kind == "read":
            self.read(cell)
            return
        kind, out, width = cell.kind, cell.output, cell.output.width
        inputs = {n: self.e.resolve(b) for n, b in cell.inputs.items()}
        signed = bool(cell.signed.get("A_SIGNED"))
        both = signed and bool(cell.signed.get("B_SIGNED", 1))

        def extended(name, to, sign):
            bits = inputs[name]
            fill = bits[-1] if sign and bits else (CONST0, 0, 0)
            return bits[:to] + [fill] * (to - len(bits))

        if kind in _BITWISE:
            self.bitwise(kind, out, inputs, extended, signed)
        elif kind in _FLAGS:
            self.define(out, 0, self.flag(kind, inputs, extended, both))
            for word in range(1, len(words(width))):
                self.define(out, word, "0")
        elif kind == "$bmux":
            for word, part in enumerate(words(width)):
                a, low = inputs["A"], WORD * word
                text = self.x(a[low : low + part])
                for i in range(1, len(a) // width):
                    one = self.x(a[i * width + low : i * width + low + part])
                    text = f"{_select(part)}({self.x(inputs['S'])} == {i}, {one}, {text})"
                self.define(out, word, text)
        elif width > WORD or any(len(bits) > WORD for bits in inputs.values()):
            self.wide(cell, inputs, extended, signed, both)
        else:
            self.narrow(cell, inputs, extended, signed, both)

    def bitwise(self, kind, out, inputs, extended, signed):
        total = out.width
        for word, width in enumerate(words(total)):
            part = slice(WORD * word, WORD * word + width)
            cast = "(u64)" if width > 32 else ""
            if kind == "$mux":
                s, a, b = (self.x(bits) for bits in (
                    inputs["S"], inputs["A"][part], inputs["B"][part]
                ))  # fmt: skip
                text = f"{_select(width)}({s}, {b}, {a})"
            elif kind == "$pmux":
                text = self.x(inputs["A"][part])
                for i in reversed(range(len(inputs["S"]))):
                    s = self.x(inputs["S"][i : i + 1])
                    b = self.x(inputs["B"][i * total : (i + 1) * total][part])
                    text = f"{_select(width)}({s}, {b}, {text})"
            else:
                text = self.x(extended("A", total, signed)[part])
                if kind == "$not":
                    text = f"~{cast}{text} & {_mask(width)}"
                elif kind != "$pos":
                    b = self.x(extended("B", total, signed)[part])
                    op = {"$and": "&", "$or": "|", "$xor": "^", "$xnor": "^"}[kind]
                    text = f"{text} {op} {b}"
                    if kind == "$xnor":
                        text = f"~({cast}({text})) & {_mask(width)}"
            self.define(out, word, text)

    def nonzero(self, bits):
        parts = [f"({self.x(bits[low : low + WORD])} != 0)" for low in range(0, len(bits), WORD)]
        return "(" + " | ".join(parts or ["0"]) + ")"

    def flag(self, kind, inputs, extended, both):
        a = inputs["A"]
        lows = range(0, len(a), WORD)
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
                for low in lows
            ]
            return "(u32)(" + " & ".join(parts or ["1"]) + ")"
        if kind in ("$reduce_xor", "$reduce_xnor"):
            parts = [f"(u64){self.x(a[low : low + WORD])}" for low in lows]
            text = f"(u32)__builtin_parityll({' ^ '.join(parts or ['0'])})"
            return text if kind == "$reduce_xor" else f"(u32)!{text}"
        to = max(len(a), len(inputs["B"]))
        a, b = extended("A", to, both), extended("B", to, both)
        if kind in _ORDER:
            return self.order(kind, a, b, both)
        parts = [
            f"({self.x(a[low : low + WORD])} == {self.x(b[low : low + WORD])})"
            for low in range(0, to, WORD)
        ]
        text = "(" + " & ".join(parts or ["1"]) + ")"
        return f"(u32){text}" if kind in ("$eq", "$eqx") else f"(u32)!{text}"

    def order(self, kind, a, b, both):
        """C of a comparison; numbers of more than a word are compared as arrays."""
        to = len(a)
        if kind in ("$gt", "$ge"):
            a, b = b, a
        strict = kind in ("$lt", "$gt")
        if to <= WORD:
            read = self.signed if both else self.x
            return f"(u32)({read(a)} {'<' if strict else '<='} {read(b)})"
        count, n = -(-to // WORD), len(self.lines)
        if both:  # the order of signed numbers is that of unsigned ones, sign inverted
            a, b = (bits + [bits[-1]] * (count * WORD - to) for bits in (a, b))
        names = [self.array(bits, count, f"{x}{n}") for x, bits in (("left", a), ("right", b))]
        if both:
            for i, name in enumerate(names):
                self.lines.append(
                    f"u64 s{name}[{count}]; memcpy(s{name}, {name}, sizeof s{name}); "
                    f"s{name}[{count - 1}] ^= 1ull << 63;"
                )
                names[i] = f"s{name}"
        x, y = names
        return f"(u32)w_less({x}, {y}, {count})" if strict else f"(u32)!w_less({y}, {x}, {count})"

    def narrow(self, cell, inputs, extended, signed, both):
        """Arithmetic on at most 64 bits."""
        kind, width = cell.kind, cell.output.width
        cast = "(u64)" if width > 32 else ""
        if kind in ("$add", "$sub", "$mul"):
            op = {"$add": "+", "$sub": "-", "$mul": "*"}[kind]
            a, b = (self.x(extended(n, width, both)) for n in "AB")
            text = f"{cast}{a} {op} {cast}{b}"
        elif kind == "$neg":
            text = f"0 - {cast}{self.x(extended('A', width, signed))}"
        elif kind in ("$shl", "$sshl"):
            text = self.shifted(self.x(extended("A", width, signed)), inputs["B"], width, "<<")
        elif kind in ("$shr", "$sshr", "$shift", "$shiftx"):
            to = max(width, len(inputs["A"]))
            bits = extended("A", to, signed)
            b = inputs["B"]
            if kind == "$sshr" and signed:
                top, amount = 31 if to <= 32 else 63, self.x(b)
                if (1 << len(b)) - 1 > top:
                    amount = f"({amount} > {top} ? {top} : {amount})"
                text = f"({ctype(to)})({self.signed(bits)} >> {amount})"
            elif kind in ("$shift", "$shiftx") and cell.signed.get("B_SIGNED"):
                by = self.signed(b)
                left = self.shifted(self.x(bits), None, to, "<<", f"(0 - {by})")
                right = self.shifted(self.x(bits), None, to, ">>", by)
                text = f"{_select(to)}({by} < 0, {left}, {right})"
            else:
                text = self.shifted(self.x(bits), b, to, ">>")
            text = f"({ctype(width)})({text})"
        else:
            text = self.division(cell, extended, inputs, width, both)
        if width not in (32, 64):
            text = f"({text}) & {_mask(width)}"
        self.define(cell.output, 0, text)

    def shifted(self, text, bits, width, op, amount=None):
        """C of a shift by any amount: ``bits``, or C of it that may be anything."""
        size = 32 if width <= 32 else 64
        cast = "(u64)" if width > 32 else ""
        if amount is None:
            amount = self.x(bits)
            if (1 << len(bits)) - 1 < size:
                return f"({cast}{text} {op} {amount})"
        return f"{_select(width)}({amount} < {size}, {cast}{text} {op} ({amount} & {size - 1}), 0)"

    def signed(self, resolved):
        """C of a signed number."""
        width = len(resolved)
        size = 32 if width <= 32 else 64
        if width == size:
            return f"((i{size}){self.x(resolved)})"
        shift = size - width
        return f"((i{size})((u{size}){self.x(resolved)} << {shift}) >> {shift})"

    def division(self, cell, extended, inputs, width, both):
        kind = cell.kind
        if kind not in _DIVISIONS:
            raise Unsupported(f"{cell.name} {cell.source}: cell {kind} is not supported")
        to, at = max(width, len(inputs["A"]), len(inputs["B"])), len(self.lines)
        number, read = ("i64", self.signed) if both else ("u64", self.x)
        a, b = f"n{at}", f"d{at}"
        self.lines.append(
            f"const {number} {a} = ({number}){read(extended('A', to, both))}, "
            f"{b} = ({number}){read(extended('B', to, both))};"
        )
        quotient = kind in ("$div", "$divfloor")
        zero = "0" if quotient else f"(u64){a}"
        result = f"{a} / {b}" if quotient else f"{a} % {b}"
        if not both:
            return f"({ctype(width)})({b} == 0 ? {zero} : (u64)({result}))"
        minus = f"0 - (u64){a}" if quotient else "0"  # by -1, which may overflow
        if kind in ("$divfloor", "$modfloor"):
            apart = f"{a} % {b} != 0 && ({a} < 0) != ({b} < 0)"
            result += f" - ({apart})" if quotient else f" + ({apart} ? {b} : 0)"
        return f"({ctype(width)})({b} == 0 ? {zero} : {b} == -1 ? {minus} : (u64)({result}))"

    def wide(self, cell, inputs, extended, signed, both):
        """Arithmetic on more than 64 bits."""
        kind, out, n = cell.kind, cell.output, cell.output.number
        to = max(out.width, len(inputs["A"]))
        shifts = kind in ("$shl", "$sshl", "$shr", "$sshr", "$shift", "$shiftx")
        if not shifts and "B" in inputs:
            to = max(to, len(inputs["B"]))
        count = -(-to // WORD)
        y = f"y{n}"
        a = self.array(
            extended("A", count * WORD, signed if shifts or kind == "$neg" else both),
            count,
            f"a{n}",
        )
        self.lines.append(f"u64 {y}[{count}];")
        if kind in ("$add", "$sub", "$mul"):
            b = self.array(extended("B", count * WORD, both), count, f"b{n}")
            call = "w_mul" if kind == "$mul" else "w_add"
            more = "" if kind == "$mul" else f", {int(kind == '$sub')}"
            self.lines.append(f"{call}({y}, {a}, {b}, {count}{more});")
        elif kind == "$neg":
            self.lines.append(f"const u64 z{n}[{count}] = {{0}};")
            self.lines.append(f"w_add({y}, z{n}, {a}, {count}, 1);")
        elif shifts:
            amount = inputs["B"]
            if cell.signed.get("B_SIGNED") and kind in ("$shift", "$shiftx"):
                by = f"(i64){self.signed(amount[:WORD])}"
            else:
                far = self.nonzero(amount[31:])
                by = f"({far} ? 0x40000000ll : (i64){self.x(amount[:31])})"
            if kind in ("$shl", "$sshl"):
                self.lines.append(f"w_shift({y}, {count}, {a}, {count}, -{by});")
            elif kind == "$sshr" and signed:
                fill = self.x([inputs["A"][-1]])
                self.lines.append(
                    f"u64 e{n}[{2 * count}]; memcpy(e{n}, {a}, sizeof {a}); "
                    f"memset(e{n} + {count}, {fill} ? 255 : 0, sizeof {a}); i64 b{n} = {by}; "
                    f"w_shift({y}, {count}, e{n}, {2 * count}, "
                    f"b{n} > {WORD * count} ? {WORD * count} : b{n});"
                )
            else:
                self.lines.append(f"w_shift({y}, {count}, {a}, {count}, {by});")
        elif kind in _DIVISIONS:
            b = self.array(extended("B", count * WORD, both), count, f"b{n}")
            self.lines.append(f"u64 o{n}[{count}];")
            q, r = (y, f"o{n}") if kind in ("$div", "$divfloor") else (f"o{n}", y)
            if both:
                floor = int(kind.endswith("floor"))
                self.lines.append(f"w_sdivmod({q}, {r}, {a}, {b}, {count}, {floor});")
            else:
                self.lines.append(f"w_divmod({q}, {r}, {a}, {b}, {count});")
        else:
            raise Unsupported(
                f"{cell.name} {cell.source}: cell {kind} of {to} bits is not supported"
            )
        for word, part in enumerate(words(out.width)):
            text = f"{y}[{word}]" if part == WORD else f"{y}[{word}] & {_mask(part)}"
            self.define(out, word, f"({ctype(part)})({text})")

    def read(self, cell):
        """A memory's read port without a clock."""
        memory, out = cell.signed["memory"], cell.output
        addr, n = self.e.resolve(cell.inputs["A"]), out.number
        parts = words(memory.width)
        k = self.e.use_memory(memory)
        self.lines.append(f"const u64 a{n} = {self.x(addr[:WORD])};")
        guard = f"a{n} < {memory.depth}" if memory.depth < 1 << len(addr) else "1"
        self.lines.append(
            f"const {storage(parts[0])} *r{n} = s->m{k} + ((({guard}) ? a{n} : 0) "
            f"* {self.context.lanes} + {'(base + l)' if self.group else 0}) * {len(parts)};"
        )
        for word, width in enumerate(parts):
            self.define(out, word, f"({ctype(width)})(({guard}) ? r{n}[{word}] : 0)")

    # Storing --------------------------------------------------------------------------------------

    def share(self, value):
        """Store a value for later parts of the function."""
        for word, width in enumerate(words(value.width)):
            name = f"p{value.number}_{word}"
            self.array_of(name, storage(width))
            self.lines.append(f"{name}[l] = ({storage(width)}){self.local[value.number, word]};")
            self.shared[value.number, word] = name

    def keep(self, value):
        """Store a value for other functions."""
        for word, width in enumerate(words(value.width)):
            self.store(self.e.stored(value, word), width, self.local[value.number, word])

    def store(self, name, width, text):
        if self.group:
            self.pointer(name, f"s->{name} + base", storage(width))
            self.lines.append(f"{name}[l] = ({storage(width)}){text};")
        else:
            self.lines.append(f"s->{name} = {text};")

    def sink(self, name, bits, active=None):
        """Store at most 64 bits under a name; ``active`` gathers whether any is set."""
        width = len(bits)
        self.lines.append(f"const {ctype(width)} z{name} = {self.x(self.e.resolve(bits))};")
        self.e.member(
            name, storage(width) if self.group else ctype(width),
            self.context.lanes if self.group else 0,
        )  # fmt: skip
        self.store(name, width, f"z{name}")
        if active:
            self.lines.append(f"{active} |= z{name} != 0;")

    def next(self, cell):
        """The next contents of a register: for each word C of it, C of the present, the width."""
        e, out = self.e, cell.output
        inputs = {n: e.resolve(b) for n, b in cell.inputs.items() if n != "CLK"}

        def condition(name):
            text = self.x(inputs[name])
            return text if cell.signed.get(f"{name}_POLARITY", 1) else f"!{text}"

        for word, width in enumerate(words(out.width)):
            text = self.x(inputs["D"][WORD * word : WORD * word + width])
            old = self.word(out.number, word, 0)[0]
            reset = literal(
                cell.signed.get("SRST_VALUE", 0) >> WORD * word & ((1 << width) - 1), width
            )
            for name in ("SRST", "EN") if cell.kind == "$sdffce" else ("EN", "SRST"):
                if name in inputs:
                    sides = f"{text}, {old}" if name == "EN" else f"{reset}, {text}"
                    text = f"{_select(width)}({condition(name)}, {sides})"
            yield text, old, width

    def register(self, cell, save=False):
        """Set a group's register; the present contents may be saved for later parts."""
        e, out = self.e, cell.output
        for word, (text, old, width) in enumerate(self.next(cell)):
            stored, name = e.stored(out, word), f"n{out.number}_{word}"
            self.lines.append(f"const {ctype(width)} {name} = {text}; {comment(out.name)}")
            kind = "out" if out.number in e.plan.crossing else "new"
            look = "if (look) " if self.context.lanes * len(self.context.cells) >= LARGE else ""
            self.lines.append(f"{look}{kind}{32 if width <= 32 else 64} |= {name} ^ {old};")
            if out.number in e.doubled:
                at = f"s->{stored} + !s->flip * {self.context.lanes} + base"
                self.pointer(f"w{stored}", at, storage(width))
                self.lines.append(f"w{stored}[l] = ({storage(width)}){name};")
                continue
            if save:
                self.array_of(f"o{stored}", storage(width))
                self.lines.append(f"o{stored}[l] = ({storage(width)}){old};")
                self.saved[out.number, word] = f"o{stored}"
            self.store(stored, width, name)

    def plain(self, actives=()):
        """The function, of the rest."""
        out = [f"NOINLINE void {self.name}(struct state *restrict s) {{"]
        out += [f"    u32 {name} = 0;" for name in actives]
        out += [f"    {line}" for loop, _ in self.loops for line in loop]
        out += [f"    s->{name} = {name};" for name in actives]
        return "\n".join([*out, "}", ""])

    def head(self, *, commit, actives=()):
        """A function that tells whether the group has anything to do, and prepares it."""
        g = self.context.number
        ran = " | ".join(f"s->{flag}[{context}]" for context, flag in sorted(self.sources))
        out = [f"int head_{self.name}(struct state *restrict s) {{"]
        out += [f"    u64 diff = s->was[{g}] | s->ran[{g}]{' | ' + ran if ran else ''};"]
        out += [f"    {line}" for line in self.checks]
        out += ["    if (SKIP && !diff) return 0;"]
        out += [f"    s->{name}[0] = s->{name}[1] = 0;" for name in actives]
        if commit:
            names = ("busy", "moved")
            out += [f"    s->{name}[0][{g}] = s->{name}[1][{g}] = 0;" for name in names]
        else:
            out.append(f"    s->ran[{g}] = 1;")
        return "\n".join([*out, "    return 1;", "}", ""])

    def text(self, *, commit, actives=()):
        """A function that does blocks of lanes; two threads may do some each.

        Of a large group there are three variants: with a uniform reset, without it, and without
        it and without looking whether anything has changed, which most cycles of a busy group use.
        """
        g, size = self.context.number, self.size
        large = commit and self.context.lanes * len(self.context.cells) >= LARGE
        name, more, reset = self.name, "", self.reset() if large else None
        if large:
            more = f", const int look{f', const u32 {reset}' if reset else ''}"
            name, kind = f"{self.name}_", "static ALWAYS_INLINE void"
        else:
            kind = "void"
        out = [f"{kind} {name}(struct state *restrict s, int first, int end, int thread{more}) {{"]
        out += [f"    {line}" for line in self.tables.values()]
        if commit:
            out += ["    u32 new32 = 0, out32 = 0;", "    u64 new64 = 0, out64 = 0;"]
        out += [f"    u32 {name} = 0;" for name in actives]
        out.append(f"    for (int base = first * {size}; base < end * {size}; base += {size}) {{")
        out += [f"        {line}" for line in self.arrays.values()]
        staging = [line for lines in self.staging.values() for line in lines]
        if staging:
            out += ["        int low, high;", *(f"        {line}" for line in staging)]
        out += [f"        {line}" for name, line in self.pointers.items() if name != reset]
        for loop, scalar in self.loops:
            out += ["        LANES"] if size >= 8 and not scalar else []
            out += [f"        for (int l = 0; l < {size}; ++l) {{"]
            out += [f"            {line}" for line in loop]
            out += ["        }"]
        out += ["    }"]
        out += [f"    s->{name}[thread] |= {name} != 0;" for name in actives]
        if commit:
            look = "!look | " if large else ""
            out.append(f"    s->moved[thread][{g}] |= {look}((out32 | out64) != 0);")
            out.append(f"    s->busy[thread][{g}] |= {look}((out32 | out64 | new32 | new64) != 0);")
        out += ["}", ""]
        if large:
            call = f"{self.name}_(s, first, end, thread"
            out.append(
                f"void {self.name}(struct state *restrict s, int first, int end, int thread) {{"
            )
            if reset:
                out.append(f"    if (s->{reset}) {call}, 1, s->{reset});")
                out.append("    else")
            out.append(f"    if (s->cycles & {LOOK - 1}) {call}, 0{', 0' if reset else ''});")
            out += [f"    else {call}, 1{', 0' if reset else ''});", "}", ""]
        return "\n".join(out)

    def reset(self):
        """Name of the uniform field that resets most registers of a group."""
        count = {}
        for cell in self.context.cells:
            for value, _, _ in self.e.resolve(cell.inputs.get("SRST", ())):
                if value in self.e.fields and self.e.fields[value].uniform:
                    count[value] = count.get(value, 0) + 1
        names = [
            f"f{v}" for v in sorted(count, key=lambda v: -count[v]) if f"f{v}" in self.pointers
        ]
        return names[0] if names else None


_BITWISE = {"$and", "$or", "$xor", "$xnor", "$not", "$pos", "$mux", "$pmux"}
_ORDER = {"$lt", "$le", "$gt", "$ge"}
_FLAGS = _ORDER | {
    "$reduce_or", "$reduce_bool", "$logic_not", "$reduce_and", "$reduce_xor", "$reduce_xnor",
    "$logic_and", "$logic_or", "$eq", "$ne", "$eqx", "$nex",
}  # fmt: skip
_DIVISIONS = {"$div", "$mod", "$divfloor", "$modfloor"}
