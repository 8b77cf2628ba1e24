"""In which order the cells of a netlist are evaluated: passes over the lanes of one context each.

A clock cycle has two halves. *Early* passes compute what other contexts, or the outputs, need. Then
each context is *committed*: what is left of its cells, the next contents of its registers, and what
its memories are asked. Registers that other contexts read have two copies, so that the order of
commits does not matter; the rest, context 0, is committed last, and then the memories.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from .netlist import CLOCKED, CONST0, CONST1, WORD, Cell, Unsupported, Value

__all__ = ["Field", "Pass", "Schedule", "schedule"]


@dataclass(eq=False)
class Field:
    """Part of an input of a group: in every lane a run of bits of one value, or a constant.

    ``source``, ``offset``, ``lane`` are arrays over lanes; a negative source is a constant, whose
    value is in ``offset``.
    """

    value: Value
    source: np.ndarray
    offset: np.ndarray
    lane: np.ndarray

    @property
    def uniform(self):
        """Whether all lanes see the same."""
        return bool(
            (self.source == self.source[0]).all()
            and (self.offset == self.offset[0]).all()
            and (self.lane == self.lane[0]).all()
        )


@dataclass(eq=False)
class Pass:
    """Cells of one context, in an order in which they can be evaluated."""

    context: int
    cells: list


@dataclass(eq=False)
class Schedule:
    """Passes, and what the netlist's values are used for.

    Attributes
    ----------
    early : list of :class:`Pass`
    late : list of lists of cells, by context
    fields : list of lists of :class:`Field`, by context
    crossing : set of values that are read outside of their context
    """

    early: list
    late: list
    fields: list
    crossing: set = field(default_factory=set)


def _fields(netlist, group):
    """Split the inputs of a group; afterwards their bits belong to the fields."""
    fields, port, matrix = [], group.port, group.binding
    if matrix.shape[1]:
        constant = matrix < 0
        index = np.where(constant, 0, matrix)
        source = np.where(constant, matrix, netlist.value_of[index])
        offset = np.where(constant, 0, netlist.offset_of[index])
        lane = np.where(constant, 0, netlist.lane_of[index])
        is_constant = source < 0
        same = (
            (source[:, 1:] == source[:, :-1])
            & (offset[:, 1:] == offset[:, :-1] + 1)
            & (lane[:, 1:] == lane[:, :-1])
        ) | (is_constant[:, 1:] & is_constant[:, :-1])
        cuts = [0]
        for bit in range(1, matrix.shape[1]):
            first = cuts[-1]
            whole = same[:, bit - 1].all()
            # A run of a wide value does not cross its words.
            crosses = ((offset[:, bit] % WORD == 0) & ~is_constant[:, bit]).any()
            if not whole or bit - first >= WORD or crosses:
                cuts.append(bit)
        cuts.append(matrix.shape[1])
        own = np.nonzero(netlist.value_of == port.number)[0]
        by_offset = own[np.argsort(netlist.offset_of[own])]
        for low, high in pairwise(cuts):
            name = group.labels[low]
            value = Value(len(netlist.values), group.number, high - low, "field", name)
            netlist.values.append(value)
            for i, bit in enumerate(by_offset[low:high]):
                netlist.value_of[bit], netlist.offset_of[bit] = value.number, i
            start = source[:, low]
            values = (
                ((source[:, low:high] == CONST1) << np.arange(high - low, dtype=object)).sum(axis=1)
                if is_constant[:, low].any()
                else np.zeros(len(start), object)
            )
            fields.append(
                Field(
                    value,
                    np.where(is_constant[:, low], CONST0, start),
                    np.where(is_constant[:, low], values, offset[:, low]).astype(object),
                    np.where(is_constant[:, low], 0, lane[:, low]),
                )
            )
    return fields


def _reads(netlist, bits):
    """Values that some bits belong to."""
    bits = np.asarray(bits, dtype=np.int64)
    bits = bits[bits >= 0]
    values = netlist.value_of[bits]
    return set(values[values >= 0].tolist())


def _inputs(cell):
    return [b for name, bits in cell.inputs.items() if name != "CLK" for b in bits]


def _sinks(netlist, context):
    """Bits that a context's commit reads, beside those of its late cells."""
    bits = []
    for cell in context.cells:
        if cell.kind in CLOCKED:
            bits += _inputs(cell)
    return bits + [bit for asked in netlist.asked(context) for bit in asked]


def schedule(netlist):
    """Return the :class:`Schedule` of a netlist.

    Raises
    ------
    :exc:`~.netlist.Unsupported`
        If cells depend on each other in a loop.
    """
    contexts = netlist.contexts
    fields = [[] if not c.number else _fields(netlist, c) for c in contexts]
    field_of = {f.value.number: f for per in fields for f in per}
    values = netlist.values
    maker = {}  # value -> (context, cell)
    cells = []
    for context in contexts:
        for cell in context.cells:
            if cell.kind not in CLOCKED:
                maker[cell.output.number] = len(cells)
                cells.append((context.number, cell))
        for memory in context.memories:
            for addr, _, value, _, clocked in memory.reads:
                if not clocked:
                    cell = Cell("read", {"A": addr}, value, {"memory": memory}, memory.name)
                    maker[value.number] = len(cells)
                    cells.append((context.number, cell))

    crossing = set()

    def through_fields(numbers, context):
        """Values behind fields; those of other contexts cross."""
        found = set()
        for number in numbers:
            if number in field_of:
                sources = set(field_of[number].source.tolist())
                for source in sources:
                    if source >= 0:
                        found.add(source)
                        crossing.add(source)
            else:
                found.add(number)
                if values[number].context != context:
                    crossing.add(number)
        return found

    reads = [through_fields(_reads(netlist, _inputs(cell)), number) for number, cell in cells]
    depends = [sorted({maker[v] for v in found if v in maker}) for found in reads]
    for context in contexts:
        through_fields(_reads(netlist, _sinks(netlist, context)), context.number)
    wanted = set(crossing)
    for bits in netlist.outputs.values():
        found = _reads(netlist, bits)
        wanted |= found
        crossing |= {v for v in found if values[v].context}

    early, stack = set(), [maker[v] for v in wanted if v in maker]
    while stack:
        node = stack.pop()
        if node not in early:
            early.add(node)
            stack += depends[node]

    passes = _passes(cells, depends, early)
    late = [[] for _ in contexts]
    for node in _ordered(cells, depends, set(range(len(cells))) - early):
        late[cells[node][0]].append(cells[node][1])
    return Schedule(
        [Pass(c, [cells[n][1] for n in nodes]) for c, nodes in passes], late, fields, crossing
    )


def _ordered(cells, depends, nodes):
    """Nodes, each after those it depends on; cells near each other stay so."""
    order, state = [], {}
    for root in sorted(nodes):
        stack = [(root, iter(depends[root]))]
        if root in state:
            continue
        state[root] = 1
        while stack:
            node, below = stack[-1]
            for other in below:
                if other not in nodes:
                    continue
                if state.get(other) == 1:
                    raise Unsupported(
                        f"a combinational loop through {cells[other][1].name} "
                        f"{cells[other][1].source}"
                    )
                if other not in state:
                    state[other] = 1
                    stack.append((other, iter(depends[other])))
                    break
            else:
                state[node] = 2
                order.append(node)
                stack.pop()
    return order


def _passes(cells, depends, nodes):
    """Cut an order of nodes into as few runs over one context as a greedy choice finds."""
    waiting = {n: sum(d in nodes for d in depends[n]) for n in nodes}
    users = {n: [] for n in nodes}
    for n in nodes:
        for d in depends[n]:
            if d in nodes:
                users[d].append(n)
    ready = {}
    for n in sorted(nodes):
        if not waiting[n]:
            ready.setdefault(cells[n][0], []).append(n)
    passes = []
    done = 0
    while done < len(nodes):
        # What is ready in each context, and what becomes ready of the same.
        best, run = None, []
        for context in sorted(ready):
            left, order, stack = {}, [], list(reversed(ready[context]))
            while stack:
                n = stack.pop()
                order.append(n)
                for user in users[n]:
                    left[user] = left.get(user, waiting[user]) - 1
                    if not left[user] and cells[user][0] == context:
                        stack.append(user)
            # Groups before the rest: the rest waits for them, and is one anyway.
            if best is None or (context != 0, len(order)) > (best != 0, len(run)):
                best, run = context, order
        if best is None:
            stuck = next(n for n in sorted(nodes) if waiting[n] > 0)
            name, source = cells[stuck][1].name, cells[stuck][1].source
            groups = sorted({cells[n][0] for n in nodes if waiting[n] > 0} - {0})
            raise LoopError(name, source, groups)
        del ready[best]
        for n in run:
            waiting[n] = -1
            for user in users[n]:
                if waiting[user] > 0:
                    waiting[user] -= 1
                    if not waiting[user] and cells[user][0] != best:
                        ready.setdefault(cells[user][0], []).append(user)
        done += len(run)
        passes.append((best, run))
    return passes


class LoopError(Unsupported):
    """Cells wait for each other; perhaps only because lanes are evaluated together."""

    def __init__(self, name, source, groups):
        super().__init__(f"a combinational loop near {name} {source}")
        self.groups = groups
