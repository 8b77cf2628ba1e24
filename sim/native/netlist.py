"""Yosys' word-level netlist: modules that occur often become lanes, everything else one flat rest.

A *context* is a set of cells that are evaluated together: context 0 is the rest, each further one
a *group* of equal instances, its lanes. Every bit of the flat design has a number; a
:class:`Value` is what one output of one cell makes, for all lanes of its context.
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "Cell",
    "Context",
    "Extern",
    "Group",
    "Memory",
    "Netlist",
    "Unsupported",
    "Value",
    "flatten",
    "natural",
]

CONST0, CONST1 = -1, -2
"""Numbers of constant bits."""

CONSTANTS = {"0": CONST0, "1": CONST1, "x": CONST0, "z": CONST0}
"""The same by what Yosys writes."""

WORD = 64
"""Bits of a word of C."""

MIN_LANES = 8
"""Fewest instances that make a group."""

MIN_CELLS = 8
SINGLE_CELLS = 60
"""Fewest cells of a lane, and of all lanes of a group."""

MAX_CELLS = 1700
"""Size of a lane in cells, everything in it included."""

ARRAY_CELLS = 700
"""The same for a lane that consists of many equal parts; these make better lanes."""

ARRAY_REST = 4096
"""Cells that may be left over, in all, if the parts become the lanes; they are computed singly."""

CLOCKED = {"$dff", "$dffe", "$sdff", "$sdffe", "$sdffce"}
COMBINATIONAL = {
    "$add", "$and", "$div", "$divfloor", "$eq", "$ge", "$gt", "$le", "$logic_and", "$logic_not",
    "$logic_or", "$lt", "$mod", "$modfloor", "$mul", "$mux", "$ne", "$neg", "$not", "$or", "$pmux",
    "$pos", "$reduce_and", "$reduce_bool", "$reduce_or", "$reduce_xnor", "$reduce_xor", "$shift",
    "$shiftx", "$shl", "$shr", "$sshl", "$sshr", "$sub", "$xnor", "$xor", "$eqx", "$nex", "$bmux",
}  # fmt: skip
IGNORED = {"$scopeinfo", "$print", "$check"}


class Unsupported(ValueError):
    """The design has something that cannot be simulated; the message names it and its source."""


@dataclass(frozen=True)
class Extern:
    """What stands in for a module that is not given: C that runs once per rising edge.

    Attributes
    ----------
    is_output : callable(:class:`str`)
        Whether the port of that name is an output; outputs change at the edge only.
    code : callable(emitter, number, ports)
        Returns C that reads the inputs of the instance, as they were before the edge, as
        ``s->eNUMBER_PORT_WORD``, and sets its outputs.
    """

    is_output: object
    code: object


@dataclass(eq=False)
class Value:
    """A word: the output of a cell, a register, the data of a memory's read port, or an input."""

    number: int
    context: int
    width: int
    kind: str  # "comb", "reg", "read", "input", "extern"
    name: str
    init: int = 0


@dataclass(eq=False)
class Cell:
    """A cell of a context: ``inputs`` are arrays of bit numbers, ``output`` its value."""

    kind: str
    inputs: dict
    output: Value | None
    signed: dict
    name: str
    source: str = ""


@dataclass(eq=False)
class Memory:
    """A memory of a context, one per lane."""

    context: int
    name: str
    width: int
    depth: int
    init: list[int] | None
    reads: list = field(
        default_factory=list
    )  # (addr, en | None, Value, transparent ports, clocked)
    writes: list = field(default_factory=list)  # (addr, en per bit, data)


@dataclass(eq=False)
class Context:
    """Cells evaluated together."""

    number: int
    name: str
    lanes: int
    cells: list = field(default_factory=list)
    memories: list = field(default_factory=list)
    paths: list = field(default_factory=list)
    """Path of each lane in the hierarchy."""
    scopes: list = field(default_factory=list)
    """Instances in it: path, module, and the bits of each name; in a group, of the module's."""


@dataclass(eq=False)
class Group(Context):
    """Equal instances.

    Attributes
    ----------
    inputs : list of the group's own bits that its surroundings drive
    binding : int array [lanes, inputs]
        Bits of the surroundings.
    port : :class:`Value`
        Of the inputs.
    labels : list of :class:`str`
        Names of the inputs.
    kinds : list of :class:`str`
        Module of each lane; all are equal but for names.
    """

    inputs: list = field(default_factory=list)
    binding: list = field(default_factory=list)
    columns: dict = field(default_factory=dict)
    own: dict = field(default_factory=dict)
    port: object = None
    kinds: list = field(default_factory=list)
    labels: list = field(default_factory=list)


@dataclass(eq=False)
class Netlist:
    """A flat design.

    ``value_of``, ``offset_of`` and ``lane_of`` say for each bit what it is: index of a value, which
    of its bits, of which lane. ``outputs`` maps the top's outputs to bits; ``externs`` are
    instances of modules that were not given. ``undriven`` are bits that nothing drives, ``clock``
    is the input that clocks everything, ``modules`` what the netlist was made of, and ``shared``
    says for each module how equal modules number its bits.
    """

    contexts: list
    values: list
    value_of: np.ndarray
    offset_of: np.ndarray
    lane_of: np.ndarray
    inputs: dict
    outputs: dict
    externs: list
    undriven: set
    clock: Value | None
    modules: dict
    shared: dict

    def asked(self, context):
        """Lists of the bits that a context's memories, and the externs, look at."""
        found = []
        for memory in context.memories:
            for addr, en, _, _, clocked in memory.reads:
                found += [addr, en] if clocked else []
            for port in memory.writes:
                found += port
        if context.number == 0:
            for _, _, ports in self.externs:
                found += [bits for bits in ports.values() if not isinstance(bits, Value)]
        return found


# Reading ------------------------------------------------------------------------------------------


def _number(text):
    return int(text.replace("x", "0").replace("z", "0"), 2) if isinstance(text, str) else int(text)


def _source(cell):
    return cell.get("attributes", {}).get("src", "").partition("|")[0]


def _told(where, module, cell):
    """Where a cell is, what it drives, and where in the source that is: for messages."""
    source, found = _source(cell), ""
    driven = {bit for port in ("Q", "Y") for bit in cell["connections"].get(port, ())}
    for label, net in sorted(module["netnames"].items()):
        if not net.get("hide_name") and driven.intersection(net["bits"]):
            found = found or f" ({label})"
            source = source or _source(net)
    return f"{where}{found} {source}"


def natural(item):
    """Key of names that Yosys counts up: 999 before 1000."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _shape_of(modules, name, kinds, numbers_of):
    """A text that equal modules share, and what they call their bits alike.

    Amaranth gives equal components different port names, port orders, and no ports for outputs that
    nobody uses; so bits are numbered by the cells that they touch.
    """
    module, numbers = modules[name], {}

    def canonical(bits):
        return [
            bit if isinstance(bit, str) else numbers.setdefault(bit, len(numbers)) for bit in bits
        ]

    parts = []
    for _, cell in sorted(module["cells"].items(), key=natural):
        kind, wires = cell["type"], cell["connections"]
        if kind in IGNORED:
            continue
        if kind in kinds:  # by what the part calls its own bits
            pairs = sorted(
                (numbers_of[kind][own], str(bit), bit)
                for port, bits in wires.items()
                for own, bit in zip(modules[kind]["ports"][port]["bits"], bits, strict=True)
                if own in numbers_of[kind]
            )
            wires = {number: [bit] for number, _, bit in pairs}
            kind = kinds[kind]
        parameters = {k: v for k, v in cell["parameters"].items() if k != "MEMID"}
        parts.append(
            [kind, sorted(parameters.items()), [(n, canonical(bits)) for n, bits in wires.items()]]
        )
    parts.append(
        sorted(
            numbers[bit]
            for port in module["ports"].values()
            if port["direction"] == "input"
            for bit in port["bits"]
            if bit in numbers
        )
    )
    inits = set()
    for net in module["netnames"].values():
        if "init" in net["attributes"]:
            pairs = zip(net["bits"], reversed(net["attributes"]["init"]), strict=False)
            inits.update((str(numbers.get(bit, "")), value) for bit, value in pairs)
    parts.append(sorted(inits))
    return json.dumps(parts), numbers


def _same(modules, order):
    """For each module the first of its kind, and numbers of its bits that the kind shares.

    ``order`` has the innermost modules first.
    """
    kinds, numbers, first = {}, {}, {}
    for name in order:
        shape, numbers[name] = _shape_of(modules, name, kinds, numbers)
        shape = hashlib.sha256(shape.encode()).hexdigest()
        kinds[name] = first.setdefault(shape, name)
    return kinds, numbers


class _Flattener:
    def __init__(self, modules, top, min_lanes, max_cells, banned, externs):
        self.modules, self.top = modules, top
        self.known = externs
        order, seen = [], set()

        def visit(name):
            if name in seen:
                return
            seen.add(name)
            for cell in modules[name]["cells"].values():
                if cell["type"] in modules:
                    visit(cell["type"])
            order.append(name)

        visit(top)
        self.kind, self.numbers = _same(modules, order)
        self.size, self.count = {}, dict.fromkeys(order, 0)
        for name in order:
            self.size[name] = sum(
                self.size[cell["type"]] if cell["type"] in modules else 1
                for cell in modules[name]["cells"].values()
                if cell["type"] not in IGNORED
            )
        self.count[self.kind[top]] = 1
        totals = dict.fromkeys(order, 0)
        totals[top] = 1
        for name in reversed(order):
            for cell in modules[name]["cells"].values():
                if cell["type"] in modules:
                    totals[cell["type"]] += totals[name]
        for name in order:
            if name != top:
                self.count[self.kind[name]] += totals[name]
        inside, unknown = {}, set()  # how often modules are in a module, at any depth
        for name in order:
            inside[name] = Counter()
            for cell in modules[name]["cells"].values():
                if cell["type"] in modules:
                    inside[name] += inside[cell["type"]]
                    inside[name][self.kind[cell["type"]]] += 1
                elif not cell["type"].startswith("$"):
                    inside[name][cell["type"]] += 1
                    unknown.add(cell["type"])

        self.is_group, left = {}, {}  # cells left over if a module is taken apart

        def fits(name):
            count, size = self.count[self.kind[name]], self.size[name]
            limit = max_cells
            equal = any(
                number >= 4 and kind not in unknown and self.size[kind] >= SINGLE_CELLS
                for kind, number in inside[name].items()
            )
            if count == 1 or (equal and left[name] * count <= ARRAY_REST):
                limit = min(limit, ARRAY_CELLS)
            return (
                count >= min_lanes
                and MIN_CELLS <= size <= limit
                and size * count >= SINGLE_CELLS
                and not unknown.intersection(inside[name])
            )

        for name in order:
            cells = [c["type"] for c in modules[name]["cells"].values() if c["type"] not in IGNORED]
            left[name] = sum(
                (0 if self.is_group[kind] else left[kind]) if kind in modules else 1
                for kind in cells
            )
            self.is_group[name] = name != top and self.kind[name] not in banned and fits(name)
        self.values, self.externs = [], []
        self.value_of, self.offset_of, self.lane_of = [], [], []
        self.rest = Context(0, top, 1)
        self.contexts = [self.rest]
        self.groups = {}
        self.aliases = {}
        self.pending = []
        self.clocks = []  # bits, and who is clocked by them
        self.clock, self.undriven = None, set()

    def bits(self, count):
        """Numbers for ``count`` new bits."""
        first = len(self.value_of)
        self.value_of += [-1] * count
        self.offset_of += [0] * count
        self.lane_of += [0] * count
        return range(first, first + count)

    def value(self, context, width, kind, name, init=0):
        value = Value(len(self.values), context.number, width, kind, name, init)
        self.values.append(value)
        return value

    def drive(self, bits, value):
        for offset, bit in enumerate(bits):
            if bit >= 0:
                self.value_of[bit], self.offset_of[bit] = value.number, offset

    def module(self, name, context, ports, path, allow_groups=True):
        """Put an instance of a module into a context; ``ports`` maps its bits to bit numbers."""
        module = self.modules[name]
        numbers = {**ports, **CONSTANTS}
        fresh = set()
        for net in module["netnames"].values():
            fresh.update(net["bits"])
        for cell in module["cells"].values():
            for wires in cell["connections"].values():
                fresh.update(wires)
        fresh = sorted(fresh - numbers.keys())
        numbers.update(zip(fresh, self.bits(len(fresh)), strict=True))

        def bits(raw):
            return [numbers[bit] for bit in raw]

        inits = {}
        for net in module["netnames"].values():
            if "init" in net["attributes"]:
                for bit, init in zip(
                    net["bits"], reversed(net["attributes"]["init"]), strict=False
                ):
                    if init == "1" and not isinstance(bit, str):
                        inits[bit] = 1
        labels = self.labels(module)
        context.scopes.append((path, name, numbers))
        for label, cell in sorted(module["cells"].items(), key=natural):
            kind, wires = cell["type"], cell["connections"]
            where = f"{path}.{label}"
            if kind in IGNORED:
                continue
            if kind in self.modules:
                inner = {n: bits(raw) for n, raw in wires.items()}
                if allow_groups and self.is_group[kind]:
                    self.lane(kind, inner, where)
                else:
                    self.instance(kind, context, inner, where, allow_groups)
            elif kind in CLOCKED or kind in COMBINATIONAL:
                out = "Q" if kind in CLOCKED else "Y"
                raw = wires[out]
                init = sum(inits.get(bit, 0) << i for i, bit in enumerate(raw))
                if kind in CLOCKED:
                    self.clocks += [(bit, where, module, cell) for bit in bits(wires["CLK"])]
                    if _number(cell["parameters"]["CLK_POLARITY"]) != 1:
                        told = _told(where, module, cell)
                        raise Unsupported(f"{told}: clocked by the falling edge")
                name = next((labels[bit] for bit in raw if bit in labels), label)
                value = self.value(
                    context, len(raw), "reg" if kind in CLOCKED else "comb", f"{path}.{name}", init
                )
                self.drive(bits(raw), value)
                parameters = cell["parameters"]
                context.cells.append(
                    Cell(
                        kind,
                        {n: bits(b) for n, b in wires.items() if n != out},
                        value,
                        {n: _number(v) for n, v in parameters.items() if "WIDTH" not in n},
                        where,
                        _source(cell),
                    )
                )
            elif kind == "$mem_v2":
                self.memory(cell, context, bits, where, module)
            elif kind.startswith("$"):
                told = _told(where, module, cell)
                raise Unsupported(f"{told}: cell {kind} is not supported")
            else:
                if context.number:
                    raise Unsupported(
                        f"{where} {_source(cell)}: {kind} is not defined and stands in a lane"
                    )
                self.extern(kind, cell, context, bits, where)
        return numbers

    @staticmethod
    def labels(module):
        """Names of bits, rather those of the source than those made up, and of whole signals."""
        labels = {}
        nets = module["netnames"].items()
        for label, net in sorted(nets, key=lambda item: ("$" in item[0], "." in item[0])):
            if not net.get("hide_name"):
                for bit in net["bits"]:
                    labels.setdefault(bit, label)
        return labels

    def instance(self, kind, context, wires, path, allow_groups):
        ports, joins = {}, []
        for name, port in self.modules[kind]["ports"].items():
            outer = wires.get(name)
            if outer is None:
                outer = list(self.bits(len(port["bits"])))
            for inner, bit in zip(port["bits"], outer, strict=True):
                if port["direction"] == "input":
                    if not isinstance(inner, str):
                        ports[inner] = bit
                else:
                    joins.append((bit, inner))
        drives = []
        for bit, inner in joins:
            if isinstance(inner, str):
                self.aliases[bit] = CONST1 if inner == "1" else CONST0
            elif inner in ports:  # straight through, or twice
                if bit != ports[inner]:
                    self.aliases[bit] = ports[inner]
            else:
                ports[inner] = bit
                drives.append(inner)
        self.module(kind, context, ports, path, allow_groups)

    def lane(self, kind, wires, path):
        """Make an instance a lane of its group."""
        module, numbers, module_name = self.modules[kind], self.numbers[kind], kind
        kind = self.kind[kind]
        group = self.groups.get(kind)
        if group is None:
            group = self.groups[kind] = Group(len(self.contexts), kind, 0)
            self.contexts.append(group)
            shared = self.numbers[kind]
            raw = [
                bit
                for port in self.modules[kind]["ports"].values()
                if port["direction"] == "input"
                for bit in port["bits"]
                if bit in shared
            ]
            raw = list(dict.fromkeys(raw))
            group.inputs = list(self.bits(len(raw)))
            group.columns = {shared[bit]: i for i, bit in enumerate(raw)}
            labels = self.labels(self.modules[kind])
            group.labels = [f"<{kind}>.{labels.get(bit, 'input')}" for bit in raw]
            own = self.module(
                kind, group, dict(zip(raw, group.inputs, strict=True)), f"<{kind}>", False
            )
            group.own = {shared[bit]: number for bit, number in own.items() if bit in shared}
        lane = group.lanes
        group.lanes += 1
        group.paths.append(path)
        group.kinds.append(module_name)
        row, outer = [CONST0] * len(group.inputs), {}
        for name, port in module["ports"].items():
            if port["direction"] == "input":
                for inner, bit in zip(port["bits"], wires.get(name, ()), strict=False):
                    outer[inner] = bit
                    if inner in numbers:
                        row[group.columns[numbers[inner]]] = bit
        group.binding.append(row)
        for name, port in module["ports"].items():
            if port["direction"] != "input":
                for inner, bit in zip(port["bits"], wires.get(name, ()), strict=False):
                    if isinstance(inner, str):
                        self.aliases[bit] = CONST1 if inner == "1" else CONST0
                    elif inner in outer:  # straight through
                        self.aliases[bit] = outer[inner]
                    elif inner in numbers:
                        self.pending.append((bit, group, lane, group.own[numbers[inner]]))

    def memory(self, cell, context, bits, path, module):
        p, wires = cell["parameters"], cell["connections"]
        width, size = _number(p["WIDTH"]), _number(p["SIZE"])
        abits = _number(p["ABITS"])
        init = p["INIT"]
        contents = None
        if "1" in init:
            contents = [
                _number(init[len(init) - (i + 1) * width : len(init) - i * width])
                for i in range(len(init) // width)
            ]
        name = path.rpartition(".")[0] if context.number == 0 else path
        memory = Memory(context.number, name, width, size, contents)
        if _number(p["OFFSET"]):
            raise Unsupported(f"{path} {_source(cell)}: memory with an offset")
        writes, reads = _number(p["WR_PORTS"]), _number(p["RD_PORTS"])
        clocks = [bit for i, bit in enumerate(wires["RD_CLK"]) if p["RD_CLK_ENABLE"][-1 - i] == "1"]
        self.clocks += [(bit, path, module, cell) for bit in bits(clocks + wires["WR_CLK"])]

        def flag(parameter, i):
            text = p[parameter]
            return text[len(text) - 1 - i] == "1"

        for i in range(writes):
            if not flag("WR_CLK_ENABLE", i) or not flag("WR_CLK_POLARITY", i):
                raise Unsupported(f"{path} {_source(cell)}: write port without a rising clock")
            if flag("WR_WIDE_CONTINUATION", i):
                raise Unsupported(f"{path} {_source(cell)}: wide port")
            memory.writes.append(
                (
                    bits(wires["WR_ADDR"][i * abits : (i + 1) * abits]),
                    bits(wires["WR_EN"][i * width : (i + 1) * width]),
                    bits(wires["WR_DATA"][i * width : (i + 1) * width]),
                )
            )
        for i in range(reads):
            clocked = flag("RD_CLK_ENABLE", i)
            if clocked and not flag("RD_CLK_POLARITY", i):
                raise Unsupported(f"{path} {_source(cell)}: read port at the falling edge")
            if flag("RD_WIDE_CONTINUATION", i):
                raise Unsupported(f"{path} {_source(cell)}: wide port")
            for reset in ("RD_ARST", "RD_SRST"):
                if wires[reset][i] != "0":
                    raise Unsupported(f"{path} {_source(cell)}: read port with a reset")
            raw = wires["RD_DATA"][i * width : (i + 1) * width]
            text = p["RD_INIT_VALUE"][::-1][i * width : (i + 1) * width][::-1]
            value = self.value(
                context, width, "read" if clocked else "comb", f"{path}.data{i}", _number(text)
            )
            self.drive(bits(raw), value)
            mask = [flag("RD_TRANSPARENCY_MASK", i * writes + w) for w in range(writes)]
            memory.reads.append(
                (
                    bits(wires["RD_ADDR"][i * abits : (i + 1) * abits]),
                    bits(wires["RD_EN"][i : i + 1]),
                    value,
                    mask,
                    clocked,
                )
            )
        context.memories.append(memory)

    def extern(self, kind, cell, context, bits, path):
        ports = {}
        if kind not in self.known:
            raise Unsupported(
                f"{path} {_source(cell)}: module {kind} is not defined; give an Extern for it"
            )
        for name, raw in cell["connections"].items():
            if self.known[kind].is_output(name):
                value = self.value(context, len(raw), "extern", f"{path}.{name}")
                self.drive(bits(raw), value)
                ports[name] = value
            else:
                ports[name] = bits(raw)
        self.externs.append((kind, path, ports))

    def finish(self):
        top = self.modules[self.top]
        ports, inputs = {}, {}
        for name, port in top["ports"].items():
            if port["direction"] == "input":
                own = self.bits(len(port["bits"]))
                value = self.value(self.rest, len(own), "input", name)
                self.drive(own, value)
                inputs[name] = value
                ports.update(zip(port["bits"], own, strict=True))
        numbers = self.module(self.top, self.rest, ports, self.top)
        outputs = {
            name: np.array([numbers[bit] for bit in port["bits"]])
            for name, port in top["ports"].items()
            if port["direction"] == "output"
        }
        self.resolve()
        self.check_clocks()
        return Netlist(
            self.contexts, self.values, np.array(self.value_of), np.array(self.offset_of),
            np.array(self.lane_of), inputs, outputs, self.externs, self.undriven, self.clock,
            self.modules, self.numbers,
        )  # fmt: skip

    def check_clocks(self):
        """Everything must be clocked by one input of the top."""
        ports = {group.port.number: group for group in self.groups.values()}
        first = None
        for bit, where, module, cell in self.clocks:
            group = ports.get(self.value_of[bit]) if bit >= 0 else None
            seen = {bit} if group is None else set(group.binding[:, self.offset_of[bit]].tolist())
            for source in seen:
                value = self.value_of[source] if source >= 0 else source
                clock = value, self.offset_of[source]
                if value < 0 or self.values[value].kind != "input":
                    told = _told(where, module, cell)
                    raise Unsupported(f"{told}: not clocked by an input of the top")
                if first is None:
                    first, self.clock = clock, self.values[value]
                if clock != first:
                    told = _told(where, module, cell)
                    raise Unsupported(
                        f"{told}: a second clock, {self.values[value].name}; the first is "
                        f"{self.values[first[0]].name}, and there may be only one"
                    )

    def resolve(self):
        """Say for each bit what drives it: bits that lanes drive, and aliases."""
        owner = {}  # input bit of a group -> (group, port, index)
        for group in self.groups.values():
            for i, bit in enumerate(group.inputs):
                owner[bit] = i
        # An output of a lane is a value of the group, a constant, or an input straight through.
        for bit, group, lane, inner in self.pending:
            seen = 0
            while inner in self.aliases:
                inner = self.aliases[inner]
                seen += 1
                if seen > 1 << 20:
                    raise Unsupported("a loop without a cell in it")
            if inner < 0:
                self.aliases[bit] = inner
            elif inner in owner:
                self.aliases[bit] = group.binding[lane][owner[inner]]
            elif self.value_of[inner] >= 0:
                self.value_of[bit] = self.value_of[inner]
                self.offset_of[bit] = self.offset_of[inner]
                self.lane_of[bit] = lane
            else:
                self.aliases[bit] = CONST0
                self.undriven.add(bit)
        for bit in list(self.aliases):
            path = []
            end = bit
            while end in self.aliases:
                path.append(end)
                end = self.aliases[end]
                if len(path) > 1 << 20:
                    raise Unsupported("a loop without a cell in it")
            for step in path:
                self.aliases[step] = end
            if end < 0:
                self.value_of[bit] = end
            else:
                self.value_of[bit] = self.value_of[end]
                self.offset_of[bit] = self.offset_of[end]
                self.lane_of[bit] = self.lane_of[end]
        # What nothing drives is 0; inputs of lanes keep their own numbers.
        for bit, value in enumerate(self.value_of):
            if value == -1 and bit not in owner:
                self.value_of[bit] = CONST0
                self.undriven.add(bit)
        for group in self.groups.values():
            group.port = self.value(group, len(group.inputs), "port", f"<{group.name}>")
            self.drive(group.inputs, group.port)
            group.binding = np.array(group.binding, dtype=np.int64).reshape(group.lanes, -1)


def flatten(modules, top, *, min_lanes=MIN_LANES, max_cells=MAX_CELLS, banned=(), externs=()):
    """Return the :class:`Netlist` of a design as Yosys writes it as JSON."""
    return _Flattener(modules, top, min_lanes, max_cells, banned, externs).finish()
