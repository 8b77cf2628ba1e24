"""What the signals of a design are made of: bits of values, by path as in the design.

The hierarchy is that of the RTLIL, the names those of Amaranth. What equal instances have in common
is kept once: a signal of a lane is a lane number and bits of its group's values.
"""

import difflib
import re
from fnmatch import translate

from .netlist import CONST1, IGNORED, natural

__all__ = ["Signal", "Signals", "UnknownSignal", "WindowError", "table_of"]

_CONSTANT = -1


class UnknownSignal(LookupError):
    """No signal has such a name; the message lists those that are near."""


class WindowError(ValueError):
    """The cycles of which waveforms are wanted lie in the past, or have not come."""


# When a model is built ----------------------------------------------------------------------------


class _Bits:
    """What the bits of a netlist are made of."""

    def __init__(self, netlist):
        self.value_of, self.offset_of = netlist.value_of.tolist(), netlist.offset_of.tolist()
        self.lane_of, self.undriven = netlist.lane_of.tolist(), netlist.undriven

    def runs(self, bits):
        """Bits as a flat list of value, offset, lane and length; None if one is not driven.

        The value of a constant is -1 and its offset what it is.
        """
        if not self.undriven.isdisjoint(bits):
            return None
        runs = []
        for bit in bits:
            value = self.value_of[bit] if bit >= 0 else bit
            if value < 0:
                one = int(value == CONST1)
                if runs and runs[-4] == _CONSTANT:
                    runs[-3] |= one << runs[-1]
                    runs[-1] += 1
                else:
                    runs += [_CONSTANT, one, 0, 1]
                continue
            offset, lane = self.offset_of[bit], self.lane_of[bit]
            if runs and (runs[-4], runs[-3] + runs[-1], runs[-2]) == (value, offset, lane):
                runs[-1] += 1
            else:
                runs += [value, offset, lane, 1]
        return runs


def _walk(modules, name, path=""):
    """Paths and modules of an instance and those in it, in the order of the netlist."""
    yield path, name
    for label, cell in sorted(modules[name]["cells"].items(), key=natural):
        if cell["type"] in modules and cell["type"] not in IGNORED:
            yield from _walk(modules, cell["type"], f"{path}.{label}")


def _named(module):
    """Names of a module that stand in the source, and their bits."""
    for label, net in module["netnames"].items():
        if not net.get("hide_name"):
            yield label, net["bits"]


def _lane_scopes(netlist, bits_of, group, kind):
    """Signals of lanes of a module: path in the lane to name to runs."""
    found = {}
    for (path, module), (_, first, numbers) in zip(
        _walk(netlist.modules, kind), group.scopes, strict=True
    ):
        own = {netlist.shared[first][bit]: at for bit, at in numbers.items()
               if bit in netlist.shared[first]}  # fmt: skip
        names = found.setdefault(path, {})
        for label, raw in _named(netlist.modules[module]):
            bits = []
            for bit in raw:
                if module == first or isinstance(bit, str):
                    bits.append(numbers[bit])
                else:
                    bits.append(own.get(netlist.shared[module].get(bit)))
            runs = None if None in bits else bits_of.runs(bits)
            if runs:
                names[label] = runs
    return found


def table_of(netlist, plan):
    """What :class:`Signals` is made of, after the netlist was scheduled; fit for JSON."""
    rest, bits_of = {}, _Bits(netlist)
    for path, module, numbers in netlist.contexts[0].scopes:
        runs = {
            label: bits_of.runs([numbers[bit] for bit in raw])
            for label, raw in _named(netlist.modules[module])
        }
        rest[path] = {label: found for label, found in runs.items() if found}
    kinds, lanes = [], []
    for group in netlist.contexts[1:]:
        index = {}
        for lane, (path, kind) in enumerate(zip(group.paths, group.kinds, strict=True)):
            if kind not in index:
                index[kind] = len(kinds)
                kinds.append(_lane_scopes(netlist, bits_of, group, kind))
            lanes.append([path, index[kind], lane])
    late = [cell.output.number for cells in plan.late for cell in cells]
    return {
        "rest": rest,
        "kinds": kinds,
        "lanes": lanes,
        "late": late,
        "clock": netlist.clock.number if netlist.clock else None,
        "values": [[v.context, v.width] for v in netlist.values],
        "fields": {
            field.value.number: [
                field.source.tolist(), [int(x) for x in field.offset], field.lane.tolist()
            ]
            for fields in plan.fields
            for field in fields
        },
    }  # fmt: skip


# When signals are looked for ----------------------------------------------------------------------


class Signal:
    """A signal of the design.

    Attributes
    ----------
    path : :class:`str`
        Of the instance it belongs to.
    name : :class:`str`
    runs : list of tuples (value, offset, lane, length)
        From bit 0 on; a value of -1 is a constant, its offset what it is.
    """

    def __init__(self, path, name, runs):
        self.path, self.name, self.runs = path, name, runs

    @property
    def width(self):
        """Bits."""
        return sum(length for *_, length in self.runs)

    @property
    def full_name(self):
        """Path and name."""
        return f"{self.path}.{self.name}"

    def __repr__(self):
        return f"<Signal {self.full_name} {self.width}>"


def _clean(label):
    return label.removeprefix("\\")


class Signals:
    """All signals of a design, from what :func:`table_of` returned."""

    def __init__(self, table):
        self.table = table
        self.fields = {int(number): field for number, field in table["fields"].items()}
        self.late = frozenset(table["late"])
        self.clock = table["clock"]

    def scopes(self, lane=None):
        """Instances as path, names, and the lane or None; of those in lanes perhaps one lane."""
        for path, names in self.table["rest"].items():
            yield path, names, None
        for path, kind, number in self.table["lanes"]:
            if lane is None or number == lane:
                for inner, names in self.table["kinds"][kind].items():
                    yield path + inner, names, number

    def find(self, patterns, lane=None):
        """Signals that match any of some patterns, in the order of the design.

        Parameters
        ----------
        patterns : sequence of :class:`str`
            Full names or their ends, cut at a dot; ``*``, ``?`` and ``[...]`` are as for files, and
            ``*`` matches dots too.
        lane : :class:`int`, optional
            Leave out all lanes but this one.

        Raises
        ------
        :exc:`UnknownSignal`
            If a pattern matches nothing.
        """
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        tests = [re.compile(rf"(?:.*\.)?(?:{translate(pattern)})").match for pattern in patterns]
        found, met = [], set()
        for path, names, number in self.scopes(lane):
            for label, runs in names.items():
                full = f"{path}.{_clean(label)}"
                hits = [i for i, test in enumerate(tests) if test(full)]
                if hits:
                    met.update(hits)
                    found.append(Signal(path, _clean(label), self._resolved(runs, number)))
        for i, pattern in enumerate(patterns):
            if i not in met:
                raise UnknownSignal(self._unknown(pattern, lane))
        return found

    def _unknown(self, pattern, lane):
        """What to say of a pattern without a signal."""
        parts = pattern.split(".")
        whole = parts[-1] == "*" and len(parts) > 1  # everything of an instance
        parts = parts[:-1] if whole else parts
        candidates = set()
        for path, names, _ in self.scopes(lane):
            ends = [path] if whole else [f"{path}.{_clean(label)}" for label in names]
            candidates.update(".".join(end.split(".")[-len(parts) :]) for end in ends)
        wanted = ".".join(parts)
        plain = re.sub(r"[*?\[\]]", "", wanted) or wanted
        near = difflib.get_close_matches(plain, sorted(candidates), 6, 0.5)
        near = [f"{name}.*" for name in near] if whole else near
        more = "near are " + ", ".join(near) if near else "nothing has a name like it"
        where = "" if lane is None else f" (of lane {lane})"
        return (
            f"no signal matches {pattern!r}{where}: {more}. Signals that nothing depends on are "
            "not simulated"
        )

    def _resolved(self, runs, own):
        """Runs without fields; ``own`` is the lane of a signal of a lane."""
        found = []
        for i in range(0, len(runs), 4):
            value, offset, lane, length = runs[i : i + 4]
            if value != _CONSTANT and own is not None:
                lane = own
            if value in self.fields:
                sources, offsets, lanes = self.fields[value]
                source = sources[lane]
                if source < 0:
                    constant = offsets[lane] >> offset & ((1 << length) - 1)
                    found.append((_CONSTANT, constant, 0, length))
                else:
                    found.append((source, offsets[lane] + offset, lanes[lane], length))
            else:
                found.append((value, offset, lane, length))
        return found
