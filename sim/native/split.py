"""Cut wide words into parts of at most 32 bits, where their users cut them anyway.

A packed structure in one register is often 40 bits of which nobody wants more than 24 at once.
Lanes of 32 bits are twice as many as lanes of 64, and parts need no shifts.
"""

from itertools import pairwise

import numpy as np

from .netlist import CLOCKED, CONST0, Cell, Value

__all__ = ["split"]

PART = 32

_BITWISE = {"$and", "$or", "$xor", "$xnor", "$not", "$pos", "$mux", "$pmux"}


def _cuts(netlist, wide):
    """Offsets at which some user of a value begins or ends, by value."""
    found = {number: set() for number in wide}
    value_of, offset_of = netlist.value_of.tolist(), netlist.offset_of.tolist()
    lane_of = netlist.lane_of.tolist()

    def look(bits):
        """One word that is read."""
        before = None
        for bit in [*bits, -1]:
            at = (value_of[bit], offset_of[bit], lane_of[bit]) if bit >= 0 else (-1, 0, 0)
            if before != (at[0], at[1] - 1, at[2]):
                if before is not None and before[0] in found:
                    found[before[0]].add(before[1] + 1)
                if at[0] in found:
                    found[at[0]].add(at[1])
            before = at

    def look_lanes(bits):
        """A word that is read in each lane, a row each."""
        if not bits.size:
            return
        index = np.where(bits < 0, 0, bits)
        value = np.where(bits < 0, -1, netlist.value_of[index])
        offset, lane = netlist.offset_of[index], netlist.lane_of[index]
        joined = np.zeros(bits.shape, bool)  # to the bit before
        joined[:, 1:] = (
            (value[:, 1:] == value[:, :-1])
            & (offset[:, 1:] == offset[:, :-1] + 1)
            & (lane[:, 1:] == lane[:, :-1])
        )
        begins = ~joined & (value >= 0)
        last = np.ones(bits.shape, bool)
        last[:, :-1] = ~joined[:, 1:]
        ends = last & (value >= 0)
        for mask, more in ((begins, 0), (ends, 1)):
            pairs = np.unique(np.stack([value[mask], offset[mask] + more]), axis=1)
            for number, at in pairs.T.tolist():
                if number in found:
                    found[number].add(at)

    for context in netlist.contexts:
        for cell in context.cells:
            for name, bits in cell.inputs.items():
                if name == "CLK":
                    continue
                look(bits)
                if cell.output.number in found and name in "ABD":
                    for at, (before, bit) in enumerate(pairwise(bits), 1):
                        if not _adjacent(netlist, before, bit):
                            found[cell.output.number].add(at % cell.output.width)
        for bits in netlist.asked(context):
            look(bits)
        if context.number:
            look_lanes(context.binding)
    for bits in netlist.outputs.values():
        look(bits.tolist())
    return found


def _adjacent(netlist, before, bit):
    if before < 0 or bit < 0:
        return before < 0 and bit < 0
    return (
        netlist.value_of[before] == netlist.value_of[bit]
        and netlist.offset_of[before] + 1 == netlist.offset_of[bit]
        and netlist.lane_of[before] == netlist.lane_of[bit]
    )


def _parts(width, cuts):
    """Where to cut: as few parts as the cuts allow."""
    places = sorted({at for at in cuts if 0 < at < width} | {width})
    found, start = [0], 0
    while start < width:
        within = [at for at in places if start < at <= start + PART]
        start = max(within) if within else min(width, start + PART)
        found.append(start)
    return found


def split(netlist):
    """Split what can be split in the groups of a netlist, in place."""
    wide = {
        cell.output.number
        for context in netlist.contexts[1:]
        for cell in context.cells
        if cell.output.width > PART and (cell.kind in CLOCKED or cell.kind in _BITWISE)
    }
    if not wide:
        return
    cuts = _cuts(netlist, wide)
    order = np.argsort(netlist.value_of, kind="stable")
    ranked = netlist.value_of[order]
    for context in netlist.contexts[1:]:
        cells = []
        for cell in context.cells:
            old = cell.output
            if old.number not in wide:
                cells.append(cell)
                continue
            places = _parts(old.width, cuts[old.number])
            low, high = np.searchsorted(ranked, [old.number, old.number + 1])
            own = order[low:high]
            offsets = netlist.offset_of[own].copy()
            for first, last in pairwise(places):
                value = Value(
                    len(netlist.values), context.number, last - first, old.kind,
                    f"{old.name}[{first}:{last}]", old.init >> first & ((1 << last - first) - 1),
                )  # fmt: skip
                netlist.values.append(value)
                mine = own[(offsets >= first) & (offsets < last)]
                netlist.value_of[mine] = value.number
                netlist.offset_of[mine] -= first
                cells.append(_part(cell, value, first, last))
        context.cells = cells


def _part(cell, value, first, last):
    """The cell of some bits of a cell's output."""
    total, inputs, signed = cell.output.width, {}, dict(cell.signed)
    for name, bits in cell.inputs.items():
        if name == "B" and cell.kind == "$pmux":
            bits = [
                bit for low in range(0, len(bits), total) for bit in bits[low + first : low + last]
            ]
        elif name in ("A", "B", "D"):
            fill = bits[-1] if cell.signed.get(f"{name}_SIGNED") and bits else CONST0
            bits = [*bits, *[fill] * (total - len(bits))][first:last]
        inputs[name] = bits
    if "SRST_VALUE" in signed:
        signed["SRST_VALUE"] = signed["SRST_VALUE"] >> first & ((1 << last - first) - 1)
    return Cell(cell.kind, inputs, value, signed, cell.name, cell.source)
