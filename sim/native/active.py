"""The rest of a design, outside of its groups: parts that are computed when what they read changes.

Cells and registers are gathered in parts of a few dozen, in an order in which each can be evaluated
once per cycle. A bit of ``dirty`` says that a part has to be; who changes a value sets the bits of
the parts that read it. Most of a controller holds still in most cycles, and then costs nothing.

A register changes in place when every part that reads it has been evaluated before; otherwise a
part at the end of the cycle, itself woken by a bit, copies it from ``n``.
"""

import heapq
from dataclasses import dataclass, field

from .cells import WORD, Body, comment, ctype, words
from .netlist import CLOCKED

__all__ = ["Rest"]

LIMIT = 32
"""Cells per part."""

FEW = 10
"""Cells of a part that no longer takes in those of another module."""

COPIES = 16
"""Registers that a part at the end of a cycle copies."""

BITS = 64
"""Parts per word of ``dirty``."""


@dataclass(eq=False)
class _Piece:
    """Cells, registers and requests to memories that are evaluated together."""

    cells: list = field(default_factory=list)
    registers: list = field(default_factory=list)
    sinks: list = field(default_factory=list)

    def __len__(self):
        return len(self.cells) + len(self.registers) + len(self.sinks)


class Rest:
    """Writes the C of context 0.

    Parameters
    ----------
    emitter : :class:`~.emit.Emitter`
    kept : set of int
        Values that others read.
    """

    def __init__(self, emitter, kept):
        self.e, self.kept = emitter, kept
        netlist, plan = emitter.netlist, emitter.plan
        self.context = netlist.contexts[0]
        self.parts, self.passes = [], []  # of a pass: first number of its parts, and the end
        for run in plan.early:
            if not run.context:
                self._cut(run.cells, [], [])
        registers = [cell for cell in self.context.cells if cell.kind in CLOCKED]
        self._cut(plan.late[0], registers, emitter.sinks(self.context))
        self.readers = {}  # value -> parts
        for number, part in enumerate(self.parts):
            own = {cell.output.number for cell in part.cells}
            for v in self._reads(part) - own:
                self.readers.setdefault(v, []).append(number)
        copied = [
            cell.output.number
            for number, part in enumerate(self.parts)
            for cell in part.registers
            if any(q > number for q in self.readers.get(cell.output.number, ()))
        ]
        self.copied = {v: i for i, v in enumerate(copied)}
        self.place, word = {}, -1  # of a part: its word and bit
        for first, end in self.passes:
            for i in range(first, end):
                word += (i - first) % BITS == 0
                self.place[i] = word, (i - first) % BITS
        self.first_copy = word + 1
        self.count = self.first_copy + -(-len(copied) // (COPIES * BITS)) + 1

    # Cutting --------------------------------------------------------------------------------------

    def _reads(self, piece):
        """Values that a piece reads."""
        found = set()
        for cell in (*piece.cells, *piece.registers):
            found |= self.e.reads(cell)
        for _, bits, _ in piece.sinks:
            found |= {v for v, _, _ in self.e.resolve(bits) if v >= 0}
        return found

    def _cut(self, cells, registers, sinks):
        """Append the parts of a pass."""
        pieces = self._pieces(cells, registers, sinks)
        start, part, module = len(self.parts), _Piece(), None
        for number in self._ordered(pieces):
            piece = pieces[number]
            own = (*piece.registers, *piece.cells)
            path = own[0].name.rpartition(".")[0] if own else module
            first, full = len(self.parts) == start, len(part) + len(piece) > LIMIT
            if first or full or (path != module and len(part) >= FEW):
                part = _Piece()
                self.parts.append(part)
            module = path
            part.cells += piece.cells
            part.registers += piece.registers
            part.sinks += piece.sinks
        self.passes.append((start, len(self.parts)))

    def _pieces(self, cells, registers, sinks):
        """Registers, requests, and cells of several users: each with the cells only it reads."""
        maker = {cell.output.number: i for i, cell in enumerate(cells)}
        pieces, users = [], [set() for _ in cells]

        def root(piece):
            for v in self._reads(piece):
                if v in maker:
                    users[maker[v]].add(len(pieces))
            pieces.append(piece)

        for register in registers:
            root(_Piece(registers=[register]))
        by_memory = {}  # whether a memory is asked for anything is gathered in one part
        for sink in sinks:
            by_memory.setdefault(sink[2] or sink[0], []).append(sink)
        for group in by_memory.values():
            root(_Piece(sinks=group))
        for i in reversed(range(len(cells))):
            if len(users[i]) != 1:
                users[i] = {len(pieces)}
                pieces.append(_Piece())
            (number,) = users[i]
            pieces[number].cells.append(cells[i])
            for v in self.e.reads(cells[i]):
                if v in maker:
                    users[maker[v]].add(number)
        for piece in pieces:
            piece.cells.reverse()
        return pieces

    def _ordered(self, pieces):
        """Numbers of pieces: each after those whose cells it reads and near them.

        Where that is possible, also before those whose registers it reads.
        """
        made, owner = {}, {}
        for number, piece in enumerate(pieces):
            made.update((cell.output.number, number) for cell in piece.cells)
            owner.update((cell.output.number, number) for cell in piece.registers)
        needs, after, users, waiters = ([set() for _ in pieces] for _ in range(4))
        for number, piece in enumerate(pieces):
            for v in self._reads(piece):
                if made.get(v, number) != number:
                    needs[number].add(made[v])
                    users[made[v]].add(number)
                elif owner.get(v, number) != number:
                    after[owner[v]].add(number)
                    waiters[number].add(owner[v])
        near, seen = [], set()
        for start in range(len(pieces)):
            if start in seen:
                continue
            seen.add(start)
            stack = [(start, iter(sorted(needs[start])))]
            while stack:
                node, below = stack[-1]
                for other in below:
                    if other not in seen:
                        seen.add(other)
                        stack.append((other, iter(sorted(needs[other]))))
                        break
                else:
                    near.append(node)
                    stack.pop()
        position = {number: i for i, number in enumerate(near)}
        missing, soft = [len(n) for n in needs], [len(n) for n in after]
        ready = [(soft[n] > 0, position[n], n) for n in range(len(pieces)) if not missing[n]]
        heapq.heapify(ready)
        order, done = [], set()
        while ready:
            _, _, number = heapq.heappop(ready)
            if number in done:
                continue
            done.add(number)
            order.append(number)
            for user in users[number]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (soft[user] > 0, position[user], user))
            for other in waiters[number]:
                soft[other] -= 1
                if not soft[other] and not missing[other] and other not in done:
                    heapq.heappush(ready, (False, position[other], other))
        return order

    # Writing --------------------------------------------------------------------------------------

    def _masks(self, parts):
        """Bits that stand for parts, by word."""
        masks = {}
        for number in parts:
            word, bit = self.place[number]
            masks[word] = masks.get(word, 0) | 1 << bit
        return masks

    def wake(self, parts):
        """C that wakes parts."""
        masks = sorted(self._masks(parts).items())
        return " ".join(f"s->dirty[{w}] |= {m:#x}ull;" for w, m in masks)

    def noted(self, old, text, parts, woken):
        """C without a branch that wakes parts if two words differ; they are gathered in locals."""
        masks = self._masks(parts)
        woken.update(masks)
        notes = " ".join(f"w{w} |= {m:#x}ull & d;" for w, m in sorted(masks.items()))
        return f"{{ const u64 d = 0 - (u64)({old} != {text}); {notes} }}" if masks else ""

    def changed(self, place, text, number):
        """C that stores a word of a value, and wakes who reads it if it has changed."""
        wake = self.wake(self.readers.get(number, ()))
        if not wake:
            return f"{place} = {text};"
        return f"if ({place} != {text}) {{ {place} = {text}; {wake} }}"

    def written(self, memory):
        """C that wakes the parts that read a memory without a clock."""
        return self.wake(
            number
            for number, part in enumerate(self.parts)
            if any(c.kind == "read" and c.signed["memory"] is memory for c in part.cells)
        )

    def functions(self):
        """C of all parts and of what calls them: ``rest0``, ``rest1``, ...; ``copies``."""
        texts = [self._part(number) for number in range(len(self.parts))]
        for number, (first, end) in enumerate(self.passes):
            lines = [f"void rest{number}(struct state *restrict s) {{"]
            for low in range(first, end, BITS):
                word = f"s->dirty[{self.place[low][0]}]"
                lines.append(f"    if (!SKIP || {word}) {{")
                for i in range(low, min(low + BITS, end)):
                    bit = f"{1 << self.place[i][1]:#x}ull"
                    run = f"{{ {word} &= ~{bit}; part{i}(s); }}"
                    lines.append(f"        if (!SKIP || {word} & {bit}) {run}")
                lines.append("    }")
            texts.append("\n".join([*lines, "}", ""]))
        lines, copied = ["void copies(struct state *restrict s) {"], list(self.copied)
        for low in range(0, len(copied), COPIES):
            at, bit = self._copy(copied[low])
            at, bit = f"s->dirty[{at}]", f"{1 << bit:#x}ull"
            lines += [f"    if ({at} & {bit}) {{", f"        {at} &= ~{bit};"]
            for v in copied[low : low + COPIES]:
                value = self.e.netlist.values[v]
                for word in range(len(words(value.width))):
                    name = self.e.stored(value, word)
                    lines.append("        " + self.changed(f"s->{name}", f"s->n{name}", v))
            lines.append("    }")
        texts.append("\n".join([*lines, "}", ""]))
        return texts

    def _copy(self, v):
        """Word and bit that stand for the copy of a register."""
        number = self.copied[v] // COPIES
        return self.first_copy + number // BITS, number % BITS

    def _part(self, number):
        """C of a part."""
        part, body, woken = self.parts[number], Body(self.e, self.context, f"part{number}"), set()
        body.begin([cell.output.number for cell in part.registers])
        for cell in part.cells:
            body.cell(cell)
            v = cell.output.number
            if v in self.kept or v in self.readers:
                for word in range(len(words(cell.output.width))):
                    name, text = f"s->{self.e.stored(cell.output, word)}", body.local[v, word]
                    body.lines.append(self.noted(name, text, self.readers.get(v, ()), woken))
                    body.lines.append(f"{name} = {text};")
        for cell in part.registers:
            self._register(body, cell, woken)
        for sink in part.sinks:
            body.sink(*sink)
        body.lines[:0] = [f"u64 w{w} = 0;" for w in sorted(woken)]
        body.lines += [f"s->dirty[{w}] |= w{w};" for w in sorted(woken)]
        body.end()
        return body.plain(self.e.actives(part.sinks))

    def _register(self, body, cell, woken):
        """C of the next contents of a register."""
        value, v = cell.output, cell.output.number
        for word, (text, old, width) in enumerate(body.next(cell)):
            name, new = self.e.stored(value, word), f"n{v}_{word}"
            body.lines.append(f"const {ctype(width)} {new} = {text}; {comment(value.name)}")
            if v not in self.copied:
                body.lines.append(self.noted(old, new, self.readers.get(v, ()), woken))
                body.lines.append(f"s->{name} = {new};")
                continue
            self.e.member(f"n{name}", ctype(width), 0)
            at, bit = self._copy(v)
            woken.add(at)
            body.lines.append(f"s->n{name} = {new}; w{at} |= (u64)({new} != {old}) << {bit};")

    # Looking at others ----------------------------------------------------------------------------

    def foreign(self):
        """What parts read that is not made here: triples of value, word and lane."""
        found = set()
        for part in self.parts:
            bits = [
                bit
                for cell in (*part.cells, *part.registers)
                for name, own in cell.inputs.items()
                if name != "CLK"
                for bit in own
            ]
            bits += [bit for _, own, _ in part.sinks for bit in own]
            for v, offset, lane in self.e.resolve(bits):
                if v >= 0:
                    value = self.e.netlist.values[v]
                    if value.context or value.kind in ("input", "extern"):
                        found.add((v, offset // WORD, lane))
        return found

    def look(self, name, found):
        """C of a function that wakes who reads what has changed of some of these triples."""
        body = Body(self.e, self.context, name)
        lines = [f"void {name}(struct state *restrict s) {{"]
        for v, word, lane in sorted(found):
            value = self.e.netlist.values[v]
            seen, width = f"q{v}_{word}_{lane}", words(value.width)[word]
            self.e.member(seen, ctype(width), 0)
            text = body.outside(value, word, lane)
            lines.append("    " + self.changed(f"s->{seen}", text, v))
        return "\n".join([*lines, "}", ""])
