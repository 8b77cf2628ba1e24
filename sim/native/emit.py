"""The C file of a scheduled netlist.

All state lies in one ``struct state``, so that a checkpoint is a copy of it. Names: ``v`` is a word
of a value (``v12_1``: bits 64 to 127 of value 12), in the rest one word, in a group an array over
lanes; ``f`` is a field of a group's input; ``m`` a memory, laid out ``[row][lane]``.

A group does nothing in a cycle in which neither its inputs nor its registers have changed since the
one before: then its next contents are the present ones. ``was`` tells which groups' registers
changed at the last edge, ``seen`` the same of those that other groups read, ``ran`` which computed
something early in this cycle, and ``act`` which memories are asked for anything.
"""

import re
from pathlib import Path

import numpy as np

from .active import Rest
from .cells import WORD, Body, comment, ctype, literal, storage, words
from .netlist import CLOCKED, Value

__all__ = ["Emitter"]

LOOP = 100
"""Cells per loop over lanes: what such a loop computes should find room in vector registers."""

BLOCK = 256
"""Lanes that are done at a time: what one loop leaves to the next stays in the nearest cache."""

APART = 17 * 64
"""Bytes left free after an array of a group: caches keep few lines that are a power of 2 apart."""

FILES, LENGTH = 8, 100_000
"""Most C files besides the main one, and their length if fewer do; compilers take two at a time."""

_RUNTIME = Path(__file__).with_name("runtime.h")
_POOL = Path(__file__).with_name("pool.h")
_RUN = Path(__file__).with_name("run.h")


class Emitter:
    """Writes the C of one netlist.

    Parameters
    ----------
    netlist : :class:`~.netlist.Netlist`
    plan : :class:`~.schedule.Schedule`
    externs : dict of :class:`~.netlist.Extern`, by module
    """

    def __init__(self, netlist, plan, externs=None):
        self.netlist, self.plan, self.externs = netlist, plan, externs or {}
        self.members = {}  # of the state: name -> (type, length or 0)
        self._value_of, self._offset_of = netlist.value_of.tolist(), netlist.offset_of.tolist()
        self._lane_of, self._known = netlist.lane_of.tolist(), {}
        self.fields = {f.value.number: f for per in plan.fields for f in per}
        self.doubled = {
            number
            for number in plan.crossing
            if netlist.values[number].kind == "reg" and netlist.values[number].context
        }
        self.memories = [memory for context in netlist.contexts for memory in context.memories]
        self._number = {id(memory): i for i, memory in enumerate(self.memories)}

    # For function bodies --------------------------------------------------------------------------

    def resolve(self, bits):
        """Bits as ``(value, offset, lane)``; the value of a constant is negative."""
        return [
            (bit, 0, 0)
            if bit < 0
            else (self._value_of[bit], self._offset_of[bit], self._lane_of[bit])
            for bit in bits
        ]

    def member(self, name, kind, count):
        """Declare a member of the state; a count of 0 is no array."""
        self.members.setdefault(name, (kind, count))

    def stored(self, value, word):
        """Name of the member that holds a word of a value."""
        name = f"v{value.number}_{word}"
        width = words(value.width)[word]
        if value.context == 0:
            self.member(name, ctype(width), 0)
        else:
            lanes = self.netlist.contexts[value.context].lanes
            self.member(name, storage(width), lanes * (2 if value.number in self.doubled else 1))
        return name

    def use_memory(self, memory):
        """Number of a memory."""
        k = self._number[id(memory)]
        lanes = self.netlist.contexts[memory.context].lanes
        parts = words(memory.width)
        self.member(f"m{k}", storage(parts[0]), memory.depth * lanes * len(parts))
        return k

    # Functions ------------------------------------------------------------------------------------

    def reads(self, cell):
        """Values that a cell or register reads."""
        found = self._known.get(id(cell))
        if found is None:
            found = self._known[id(cell)] = set()
            for name, bits in cell.inputs.items():
                if name != "CLK":
                    found.update(self._value_of[bit] for bit in bits if bit >= 0)
            found -= {value for value in found if value < 0}
        return found

    def sinks(self, context):
        """What memories and externs are asked: ``(name, bits, active)``, at most 64 bits each."""
        found = []

        def add(name, bits, active=None):
            for word, low in enumerate(range(0, len(bits), WORD)):
                found.append((f"{name}_{word}", bits[low : low + WORD], active))

        for memory in context.memories:
            k = self.use_memory(memory)
            for i, (addr, en, _, _, clocked) in enumerate(memory.reads):
                if clocked:
                    add(f"m{k}r{i}a", addr)
                    add(f"m{k}r{i}e", en, f"act{k}")
            for i, (addr, en, data) in enumerate(memory.writes):
                add(f"m{k}w{i}a", addr)
                add(f"m{k}w{i}d", data)
                add(f"m{k}w{i}e", _enables(en)[0], f"act{k}")
        if context.number == 0:
            for number, (_, _, ports) in enumerate(self.netlist.externs):
                for name, port in ports.items():
                    if not isinstance(port, Value):
                        add(f"e{number}_{name}", port)
        return found

    def block(self, context):
        """How many lanes of a group are done at a time."""
        size = max(n for n in range(1, BLOCK + 1) if context.lanes % n == 0)
        return size if 8 * size >= BLOCK else context.lanes

    def _plan(self):
        """Functions of groups as ``(context, parts, name, early)``, in order.

        A part, ``(cells, registers, sinks)``, is a loop over lanes.
        """
        netlist, found = self.netlist, []
        for number, run in enumerate(self.plan.early):
            if run.context:
                context = netlist.contexts[run.context]
                parts = self._parts(run.cells, [], [])
                found.append((context, parts, f"early{number}", True))
        for context in netlist.contexts[1:]:
            number = context.number
            registers = [cell for cell in context.cells if cell.kind in CLOCKED]
            late = self.plan.late[number]
            registers = self._upstream_last(late, registers)
            parts = self._parts(late, registers, self.sinks(context))
            found.append((context, parts, f"commit{number}", False))
        return found

    def _upstream_last(self, late, registers):
        """Order registers so that most change after what reads them has done so."""
        maker = {cell.output.number: cell for cell in late}
        owner = {cell.output.number: cell for cell in registers}
        readers = {number: [] for number in owner}
        for register in registers:
            stack, seen = list(self.reads(register)), set()
            while stack:
                v = stack.pop()
                if v in seen:
                    continue
                seen.add(v)
                if v in maker:
                    stack += self.reads(maker[v])
                elif v in owner and owner[v] is not register:
                    readers[v].append(register.output.number)
        order, state = [], set()
        for root in owner:
            if root in state:
                continue
            state.add(root)
            stack = [(root, iter(readers[root]))]
            while stack:
                node, left = stack[-1]
                for other in left:
                    if other not in state:
                        state.add(other)
                        stack.append((other, iter(readers[other])))
                        break
                else:
                    order.append(owner[node])
                    stack.pop()
        return order

    def _parts(self, late, registers, sinks):
        """Cut cells, registers and sinks into parts: each root with the cells that feed it."""
        maker = {cell.output.number: cell for cell in late}
        done, pieces = set(), []

        def cone(roots):
            """The cells below some values that are not yet anywhere."""
            cells = []
            for root in sorted(roots):
                if root not in maker or root in done:
                    continue
                done.add(root)
                stack = [(root, iter(sorted(self.reads(maker[root]))))]
                while stack:
                    node, below = stack[-1]
                    for v in below:
                        if v in maker and v not in done:
                            done.add(v)
                            stack.append((v, iter(sorted(self.reads(maker[v])))))
                            break
                    else:
                        cells.append(maker[node])
                        stack.pop()
            return cells

        for register in registers:
            pieces.append((cone(self.reads(register)), [register], []))
        by_memory = {}  # a memory's activity is gathered in one function
        for sink in sinks:
            by_memory.setdefault(sink[2] or sink[0].partition("_")[0], []).append(sink)
        for group in by_memory.values():
            roots = {v for _, bits, _ in group for v, _, _ in self.resolve(bits) if v >= 0}
            pieces.append((cone(roots), [], group))
        for cell in late:  # early passes have no registers
            if cell.output.number not in done:
                pieces.append((cone([cell.output.number]), [], []))
        return self._joined(pieces)

    def _joined(self, pieces):
        """Join pieces to parts of about ``LOOP`` cells, cut where least is handed on."""
        last = {}  # value -> last piece that reads it
        for i, (cells, registers, sinks) in enumerate(pieces):
            for cell in (*cells, *registers):
                last.update(dict.fromkeys(self.reads(cell), i))
            for _, bits, _ in sinks:
                last.update({v: i for v, _, _ in self.resolve(bits) if v >= 0})
        change = [0] * (len(pieces) + 1)
        for i, (cells, _, _) in enumerate(pieces):
            for cell in cells:
                change[i] += 1
                change[max(i, last.get(cell.output.number, i))] -= 1
        handed = np.cumsum(change).tolist()  # after each piece
        parts, first = [], 0
        while first < len(pieces):
            size, best = 0, (0, first)
            for i in range(first, len(pieces)):
                size += sum(len(part) for part in pieces[i])
                cost = 0 if i == len(pieces) - 1 else handed[i]
                if 2 * size <= LOOP or cost < best[0]:
                    best = cost, i
                if 2 * size > 3 * LOOP:
                    break
            end = best[1] + 1
            parts.append(
                tuple([x for piece in pieces[first:end] for x in piece[k]] for k in range(3))
            )
            first = end
        return parts

    def actives(self, sinks):
        """Names of what gathers whether memories are asked for anything."""
        return list(dict.fromkeys(active for _, _, active in sinks if active))

    def _functions(self, watched):
        """C of all functions; calls of the early and the late ones."""
        plan, netlist = self._plan(), self.netlist
        made, used = {}, {}  # by (function, part)
        for i, (_, parts, _, _) in enumerate(plan):
            for j, (cells, registers, sinks) in enumerate(parts):
                for cell in cells:
                    made[cell.output.number] = i, j
                reads = [self.reads(cell) for cell in (*cells, *registers)]
                reads += [{v for v, _, _ in self.resolve(bits) if v >= 0} for _, bits, _ in sinks]
                for value in set().union(*reads):
                    used.setdefault(value, set()).add((i, j))
        kept = {v for v, (i, _) in made.items() if any(k != i for k, _ in used.get(v, ()))}
        kept |= set(watched) | self.plan.crossing
        for bits in netlist.outputs.values():
            kept |= {v for v, _, _ in self.resolve(bits) if v >= 0}
        rest = self.rest = Rest(self, kept)
        self.member("dirty", "u64", rest.count)
        texts, early, late = [], {}, []
        for i, (context, parts, name, first) in enumerate(plan):
            body = Body(self, context, name)
            for j, (cells, registers, sinks) in enumerate(parts):
                body.begin([cell.output.number for cell in registers])
                for cell in cells:
                    body.cell(cell)
                    number = cell.output.number
                    if number in kept:
                        body.keep(cell.output)
                    elif any(k == i and part != j for k, part in used.get(number, ())):
                        body.share(cell.output)
                for cell in registers:  # what a later part still reads is saved
                    users = used.get(cell.output.number, ())
                    body.register(cell, any(k == i and part > j for k, part in users))
                for sink in sinks:
                    body.sink(*sink)
                body.end()
            sinks = [sink for _, _, sinks in parts for sink in sinks]
            actives, blocks = self.actives(sinks), context.lanes // body.size
            for active in actives:
                self.member(active, "u8", 2)
            texts.append(body.text(commit=not first, actives=actives))
            texts.append(body.head(commit=not first, actives=actives))
            if first:
                early[name] = context, {c.output.number for cells, _, _ in parts for c in cells}
            else:
                size = sum(len(x) for part in parts for x in part) * body.size
                late.append((name, blocks, size))
        texts += rest.functions()
        more, calls = self._calls(rest, early)
        return texts + more, calls, late

    def _calls(self, rest, early):
        """Functions through which the rest sees others; calls of the early half of a cycle."""
        values, foreign = self.netlist.values, rest.foreign()
        texts, calls = [], []

        def look(name, found, flag):
            if found:
                texts.append(rest.look(name, found))
                calls.append(f"if (!SKIP || {flag}) {name}(s);" if flag else f"{name}(s);")

        look("look", {f for f in foreign if not values[f[0]].context}, None)
        for kind, flag in (("reg", "seen"), ("read", "was")):
            for context in self.netlist.contexts[1:]:
                number = context.number
                found = {
                    f for f in foreign
                    if values[f[0]].context == number and values[f[0]].kind == kind
                }  # fmt: skip
                look(f"look_{kind}{number}", found, f"s->{flag}[{number}]")
        number = 0
        for i, run in enumerate(self.plan.early):
            if not run.context:
                calls.append(f"rest{number}(s);")
                number += 1
                continue
            name = f"early{i}"
            context, made = early[name]
            blocks = context.lanes // self.block(context)
            calls.append(f"if (head_{name}(s)) {name}(s, 0, {blocks}, 0);")
            found = {f for f in foreign if f[0] in made}
            look(f"look_{name}", found, f"s->ran[{context.number}]")
        return texts, calls

    def _memory(self, memory):
        """C that answers a memory's reads, then writes."""
        k, context = self.use_memory(memory), self.netlist.contexts[memory.context]
        lanes, parts, group = context.lanes, words(memory.width), context.number > 0
        kind, lines = storage(parts[0]), []

        def at(name):
            return f"s->{name}[l]" if group else f"s->{name}"

        def row(name, bits):
            address = at(name)
            guard, inside = "1", address
            if memory.depth < 1 << len(bits):
                guard = f"{address} < {memory.depth}"
                inside = f"({guard} ? {address} : 0)"
            place = f"s->m{k} + ((u64){inside} * {lanes} + {'l' if group else 0}) * {len(parts)}"
            return guard, place

        def mask(w, en, word):
            terms, low = [], 0
            for i, size in enumerate(_enables(en)[1]):
                first, last = max(low, WORD * word), min(low + size, WORD * (word + 1))
                if first < last:
                    ones = ((1 << (last - first)) - 1) << (first - WORD * word)
                    name = at(f"m{k}w{w}e_{i // WORD}")
                    terms.append(f"(0 - (u64)({name} >> {i % WORD} & 1) & {ones:#x}ull)")
                low += size
            return " | ".join(terms) or "0"

        for i, (addr, _, value, transparent, clocked) in enumerate(memory.reads):
            if not clocked:
                continue
            guard, place = row(f"m{k}r{i}a_0", addr)
            lines += [f"if ({at(f'm{k}r{i}e_0')}) {{", f"    const {kind} *row = {place};"]
            for word in range(len(parts)):
                lines.append(f"    u64 x{word} = ({guard}) ? row[{word}] : 0;")
            for w, (_, en, _) in enumerate(memory.writes):
                if transparent[w]:
                    lines.append(f"    if ({at(f'm{k}w{w}a_0')} == {at(f'm{k}r{i}a_0')}) {{")
                    for word in range(len(parts)):
                        lines.append(
                            f"        u64 k = {mask(w, en, word)}; x{word} = (x{word} & ~k) | "
                            f"({at(f'm{k}w{w}d_{word}')} & k);"
                            if word == 0
                            else f"        k = {mask(w, en, word)}; x{word} = (x{word} & ~k) | "
                            f"({at(f'm{k}w{w}d_{word}')} & k);"
                        )
                    lines.append("    }")
            for word in range(len(parts)):
                stored = at(self.stored(value, word))
                if group:
                    lines.append(f"    new |= x{word} ^ {stored};")
                    lines.append(f"    {stored} = x{word};")
                else:
                    lines.append("    " + self.rest.changed(stored, f"x{word}", value.number))
            lines.append("}")
        for w, (addr, en, _) in enumerate(memory.writes):
            guard, place = row(f"m{k}w{w}a_0", addr)
            groups = _enables(en)[0]
            any_set = " | ".join(at(f"m{k}w{w}e_{i}") for i in range(len(words(len(groups)))))
            lines += [f"if (({any_set}) && ({guard})) {{", f"    {kind} *row = {place};"]
            for word in range(len(parts)):
                data = at(f"m{k}w{w}d_{word}")
                if len(groups) == 1:
                    lines.append(f"    row[{word}] = {data};")
                else:
                    lines.append(
                        f"    {{ const u64 k = {mask(w, en, word)}; "
                        f"row[{word}] = (row[{word}] & ~k) | ({data} & k); }}"
                    )
            if not all(clocked for *_, clocked in memory.reads):
                lines.append("    new = 1;" if group else f"    {self.rest.written(memory)}")
            lines.append("}")
        out = [f"/* {memory.name} */", f"void memory{k}(struct state *restrict s, int thread) {{"]
        if group:
            asked = [f"m{k}r{i}e_0" for i, read in enumerate(memory.reads) if read[4]]
            asked += [
                f"m{k}w{w}e_{i}"
                for w, (_, en, _) in enumerate(memory.writes)
                for i in range(len(words(len(_enables(en)[0]))))
            ]
            out += ["    u64 new = 0;", f"    for (int l = 0; l < {lanes}; ++l) {{"]
            out += [f"        if (!({' | '.join(f's->{name}[l]' for name in asked)})) continue;"]
            out += [f"        {line}" for line in lines]
            out += ["    }", f"    if (new) s->busy[thread][{context.number}] = 1;"]
        else:
            out += [f"    {line}" for line in lines]
        return "\n".join([*out, "}", ""])

    # The file -------------------------------------------------------------------------------------

    def write(self, *, watched=(), prelude="", glue=""):
        """Return the C files: a dict of texts by name, with one header.

        Parameters
        ----------
        watched : set of int
            Values to store though nothing else needs them.
        prelude, glue : :class:`str`
            C that follows the declaration of the state, and C that ends the file.
        """
        functions, early, commits = self._functions(watched)
        for value in self.netlist.values:  # what holds the state is in it even if nothing reads it
            if value.kind in ("reg", "read", "input", "extern"):
                for word in range(len(words(value.width))):
                    self.stored(value, word)
        answers, serial = [], [f"rest{len(self.rest.passes) - 1}(s);"]
        after = []
        for memory in self.memories:
            k = self.use_memory(memory)
            if not memory.writes and not any(clocked for *_, clocked in memory.reads):
                continue
            functions.append(self._memory(memory))
            if memory.context:
                lanes = self.netlist.contexts[memory.context].lanes
                answers.append((k, lanes * (len(memory.reads) + len(memory.writes))))
            else:
                self.member(f"act{k}", "u32", 0)
                after.append(f"if (s->act{k}) memory{k}(s, 0);")
        for number, (kind, _, ports) in enumerate(self.netlist.externs):
            after.append(self.externs[kind].code(self, number, ports))
        after.append("copies(s);")
        groups = len(self.netlist.contexts)
        padded = -(-groups // 64) * 64  # threads write into lines of their own
        api = self._api()
        small = [
            f"    {kind} {name};{self._about(name)}"
            for name, (kind, count) in self.members.items()
            if not count
        ]
        large = [
            f"    _Alignas(64) {kind} {name}[{count} + {_apart(kind, count)}];{self._about(name)}"
            for name, (kind, count) in self.members.items()
            if count
        ]
        tasks = sum(blocks for _, blocks, _ in commits) + len(answers) + 1
        state = [
            "struct state {", "    u64 cycles;", "    void *user;", "    struct pool *pool;",
            "    struct notes *notes;", "    u32 flip;",
            *(f"    u8 {name}[{groups}];" for name in ("was", "seen", "ran")),
            *(f"    _Alignas(64) u8 {name}[2][{padded}];" for name in ("busy", "moved")),
            f"    u16 tasks[{tasks}];", *small, *large, "};",
            "", "#ifndef SKIP", "#define SKIP 1", "#endif", "",
            "static void take_notes(struct state *s, int after);", "",
        ]  # fmt: skip
        declared = [
            f"{head};"
            for text in functions
            for head in re.findall(r"^(?:NOINLINE )?((?:void|int) \w+\([^)]*\)) {", text, re.M)
        ]
        step = ["static void run_task(struct state *restrict s, int task, int thread) {",
                "    switch (task) {"]  # fmt: skip
        heads, looks, task = [], [], 0
        for name, blocks, cells in sorted(commits, key=lambda commit: commit[1] * commit[2]):
            heads += [
                f"    if (head_{name}(s)) {{",
                f"        for (int i = 0; i < {blocks}; ++i) s->tasks[n++] = {task} + i;",
                f"        work += {blocks * cells};", "    }",
            ]  # fmt: skip
            for i in range(blocks):
                step.append(f"    case {task + i}: {name}(s, {i}, {i + 1}, thread); return;")
            task += blocks
        for k, work in answers:
            looks.append(f"    if (s->act{k}[0] | s->act{k}[1]) s->tasks[n++] = {task}, "
                         f"work += {10 * work};")  # fmt: skip
            step.append(f"    case {task}: memory{k}(s, thread); return;")
            task += 1
        step += [
            "    }", "}", "",
            "static void early(struct state *restrict s) {", *(f"    {x}" for x in early), "}", "",
            "static void late(struct state *restrict s) {", "    int n = 0;", "    u64 work = 0;",
            "    if (s->notes) take_notes(s, 0);",
            *heads, "    begin(s, n, work);", *(f"    {x}" for x in serial), "    finish(s);",
            "    n = 0, work = 0;", *looks, "    begin(s, n, work);", *(f"    {x}" for x in after),
            "    finish(s);", "    if (s->notes) take_notes(s, 1);",
            f"    for (int g = 0; g < {groups}; ++g) {{",
            "        s->was[g] = s->busy[0][g] | s->busy[1][g];",
            "        s->seen[g] = s->moved[0][g] | s->moved[1][g];", "    }",
            "    memset(s->ran, 0, sizeof s->ran);",
            "    s->flip ^= 1;", "    s->cycles++;", "}", "",
        ]  # fmt: skip
        ports = [
            f"#define in_{name} {self.stored(value, 0)}"
            for name, value in self.netlist.inputs.items()
            if value.width <= WORD
        ]
        hidden = [
            "#pragma GCC visibility push(hidden)",
            *declared,
            "#pragma GCC visibility pop",
            "",
        ]
        header = [_RUNTIME.read_text(), *state, prelude, *hidden]
        main = [_POOL.read_text(), *step, api, _RUN.read_text(), *ports, glue]
        files = {"model.h": "\n".join(header)}
        include = '#include "model.h"\n'
        files["model.c"] = "\n".join([include, *main])
        for number, part in enumerate(_evenly(functions)):
            files[f"model{number}.c"] = "\n".join([include, *part])
        return files

    def _about(self, name):
        """A comment on a member of the state: the signal or memory, and in how many lanes."""
        if found := re.fullmatch(r"(n?)([vfq])(\d+)(?:_(\d+))?(?:_(\d+))?", name):
            value = self.netlist.values[int(found[3])]
            text = ("next: " if found[1] else "") + value.name
            text += f", from bit {WORD * int(found[4])} on" if int(found[4] or 0) else ""
            if found[2] == "q":
                return " " + comment(f"seen of {text}, lane {found[5]}")
        elif found := re.fullmatch(r"m(\d+)", name):
            value = self.memories[int(found[1])]
            text = f"{value.name}, {value.depth} rows of {value.width} bits"
        else:
            return ""
        lanes = self.netlist.contexts[value.context].lanes
        return " " + comment(text + (f", {lanes} lanes" if value.context else ""))

    def _initial(self):
        """C that gives registers and memories their first contents."""
        lines = []
        for value in self.netlist.values:
            if value.kind not in ("reg", "read") or not value.init:
                continue
            lanes = self.netlist.contexts[value.context].lanes
            for word, width in enumerate(words(value.width)):
                part = value.init >> WORD * word & ((1 << width) - 1)
                name = self.stored(value, word)
                if part and value.context == 0:
                    lines.append(f"    s->{name} = {literal(part, width)};")
                    if value.number in self.rest.copied:
                        lines.append(f"    s->n{name} = {literal(part, width)};")
                elif part:
                    count = lanes * (2 if value.number in self.doubled else 1)
                    lines.append(
                        f"    for (int l = 0; l < {count}; ++l) "
                        f"s->{name}[l] = {literal(part, width)};"
                    )
        for memory in self.memories:
            if not memory.init:
                continue
            k, parts = self._number[id(memory)], words(memory.width)
            lanes = self.netlist.contexts[memory.context].lanes
            rows = [
                literal(row >> WORD * word & ((1 << width) - 1), width)
                for row in memory.init
                for word, width in enumerate(parts)
            ]
            n = len(parts)
            lines.append(f"    static const u64 i{k}[] = {{{', '.join(rows)}}};")
            lines.append(
                f"    for (int r = 0; r < {len(memory.init)}; ++r) "
                f"for (int l = 0; l < {lanes}; ++l) for (int w = 0; w < {n}; ++w) "
                f"s->m{k}[(r * {lanes} + l) * {n} + w] = i{k}[r * {n} + w];"
            )
        return lines

    def _api(self):
        """C to open and step a state and to look at outputs."""
        lines = [
            "size_t state_size(void) { return sizeof(struct state); }", "",
            "/* Recompute everything: something was changed from outside. */",
            "void touch(struct state *s) {",
            "    memset(s->was, 1, sizeof s->was);",
            "    memset(s->busy, 1, sizeof s->busy);",
            "    memset(s->seen, 1, sizeof s->seen);",
            "    memset(s->dirty, 255, sizeof s->dirty);",
            "}", "",
            "struct state *state_open(void) {",
            "    struct state *s = room(sizeof(struct state));",
            "    if (!s) return 0;",
            "    memset(s, 0, sizeof(struct state));",
            *self._initial(),
            "    touch(s);",
            "    return s;", "}", "",
            "void state_close(struct state *s) { threads(s, 1); free(s); }", "",
        ]  # fmt: skip
        body, number, cases = Body(self, self.netlist.contexts[0], "outputs"), 0, []
        for name, bits in self.netlist.outputs.items():
            for word, low in enumerate(range(0, len(bits), WORD)):
                part = self.resolve([int(bit) for bit in bits[low : low + WORD]])
                lines.append(
                    f"static inline u64 out_{name}_{word}(const struct state *s) "
                    f"{{ return {body.x(part)}; }}"
                )
                cases.append(f"    case {number}: return out_{name}_{word}(s);")
                number += 1
        lines += [
            "", "u64 output(const struct state *s, int number) {", "    switch (number) {", *cases,
            "    }", "    return 0;", "}", "",
            "void settle(struct state *s) { early(s); }",
            "void step(struct state *s, u64 cycles) {",
            "    while (cycles--) { early(s); late(s); }", "}", "",
            "static const struct { const char *name; size_t offset; } members[] = {",
            *(
                f'    {{"{name}", offsetof(struct state, {name})}},'
                for name in ("cycles", "flip", *self.members)
            ),
            "};", "size_t member_count(void) { return sizeof members / sizeof *members; }",
            "const char *member_name(size_t i) { return members[i].name; }",
            "size_t member_offset(size_t i) { return members[i].offset; }", "",
        ]  # fmt: skip
        return "\n".join(lines)


def _apart(kind, count):
    """Elements to leave free after an array, so that equal places of several fit into a cache."""
    size = int(kind[1:]) // 8
    return APART // size if size * count >= 1024 else 0


def _evenly(texts):
    """Texts in their order, cut into parts of about the same length."""
    total, parts, size = sum(map(len, texts)), [[]], 0
    count = min(FILES, -(-total // LENGTH))
    for text in texts:
        if parts[-1] and size >= total * len(parts) / count:
            parts.append([])
        parts[-1].append(text)
        size += len(text)
    return parts


def _enables(en):
    """Enables of a write port without repetition, and how many bits each stands for."""
    groups, sizes = [], []
    for bit in en:
        if groups and bit == groups[-1]:
            sizes[-1] += 1
        else:
            groups.append(bit)
            sizes.append(1)
    return groups, sizes
