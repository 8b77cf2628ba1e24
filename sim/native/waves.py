"""Waveforms: what the compiled code notes of each cycle of a window, written as VCD.

A cycle takes 10 ns: cycle 1234 begins at 12340 ns, with the rising edge that ends the one before.
Names and scopes are those of the design; a field of a structure is a signal of its own.
"""

import contextlib
import ctypes
import re
from typing import Any

import numpy as np
from vcd import VCDWriter

from .cells import WORD, ctype, storage, words
from .checkpoint import replacing
from .signals import WindowError

__all__ = ["Recording"]

CYCLE_NS = 10

_ROOM = 1 << 22
"""Words that are noted before they are written."""

_FOREVER = (1 << 64) - 1


class _Word(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("offset", "size", "other")]


class _Notes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start", "until", "count", "early")),
        ("words", ctypes.POINTER(_Word)),
        *((name, ctypes.c_uint64) for name in ("rows", "room")),
        ("data", ctypes.POINTER(ctypes.c_uint64)),
        ("lost", ctypes.c_uint64),
    ]


class _Column:
    """How the words of one signal are made of the words that are noted, 64 bits at a time."""

    def __init__(self, signal, columns):
        self.width, self.parts = signal.width, [[] for _ in words(signal.width)]
        position = 0
        for value, offset, lane, length in signal.runs:
            done = 0
            while done < length:
                at, here = offset + done, position + done
                size = min(length - done, WORD - here % WORD)
                if value < 0:
                    number = offset >> done & ((1 << size) - 1)
                    self.parts[here // WORD].append((None, number, 0, here % WORD))
                else:
                    size = min(size, WORD - at % WORD)
                    column = columns[value, at // WORD, lane]
                    mask = (1 << size) - 1
                    self.parts[here // WORD].append((column, at % WORD, mask, here % WORD))
                done += size
            position += length

    def words(self, data):
        """The signal's words in every row, from the lowest on."""
        found = []
        for parts in self.parts:
            word = np.zeros(len(data), np.uint64)
            for column, by, mask, left in parts:
                if column is None:
                    word |= np.uint64(by << left)
                else:
                    word |= (data[:, column] >> np.uint64(by) & np.uint64(mask)) << np.uint64(left)
            found.append(word)
        return found


class Recording:
    """A window of cycles of which waveforms are written; see :meth:`~.model.Simulation.record`.

    Attributes
    ----------
    signals : list of :class:`~.signals.Signal`
    recorded : :class:`int`
        Cycles so far.
    """

    def __init__(self, simulation, signals, start, cycles, lane, margin, zero):
        self.simulation, self.margin, self.zero = simulation, margin, zero
        self.start = simulation.cycles if start is None else zero + start
        self.until = _FOREVER if cycles is None else self.start + cycles
        if self.start < simulation.cycles or self.until <= self.start:
            raise WindowError(
                f"the window must begin at cycle {simulation.cycles - zero} or later and have at "
                f"least one cycle, not begin at {self.start - zero} and end before "
                f"{self.until - zero}"
            )
        table = simulation.model.signals
        self.signals = table.find(signals, lane)
        used = {
            (value, at // WORD, lane)
            for signal in self.signals
            for value, offset, lane, length in signal.runs
            if value >= 0 and not self._is_clock(signal)
            for at in range(offset - offset % WORD, offset + length, WORD)
        }
        early = sorted(key for key in used if key[0] not in table.late)
        self.words = early + sorted(key for key in used if key[0] in table.late)
        self.early = len(early)
        self.model = simulation.model.watching({value for value, _, _ in used})
        self.rows = max(1, _ROOM // max(1, len(self.words)))
        self.recorded = 0
        self.notes = self._left = None
        self._file: Any = None
        self._writer = self._last = None
        self._columns, self._variables, self._clocks = [], [], []

    def _is_clock(self, signal):
        return len(signal.runs) == 1 and signal.runs[0][0] == self.simulation.model.signals.clock

    # While cycles pass ----------------------------------------------------------------------------

    def next(self, cycles):
        """How many of some cycles may pass before :meth:`drain` must be called."""
        now = self.simulation.cycles
        begin = self.start - self.margin
        if now < begin:
            return min(cycles, begin - now)
        if now >= self.until:
            self.end()
            return cycles
        if self.notes is None:
            self._begin()
        return min(cycles, self.rows, self.until - now)

    def _begin(self):
        """Let notes be taken."""
        simulation, model = self.simulation, self.model
        if model is not simulation.model:
            self._left = simulation.become(model, model.opened())
        table = model.signals.table["values"]
        state = {number: copies for *_, number, _, copies in model.table["state"]}
        found = (_Word * max(1, len(self.words)))()
        for entry, (value, word, lane) in zip(found, self.words, strict=False):
            context, width = table[value]
            part = words(width)[word]
            size = int((storage if context else ctype)(part)[1:]) // 8
            entry.offset = model.offsets[f"v{value}_{word}"] + lane * size
            entry.size = size
            if state.get(value, 1) > 1:
                lanes = next(n for *_, n, v, _, _ in model.table["state"] if v == value)
                entry.other = lanes * size
        self._found = found  # of which the state knows the address
        self.notes = _Notes(
            start=self.start, until=self.until, count=len(self.words), early=self.early, words=found
        )
        model.library.notes_begin(simulation.state, ctypes.addressof(self.notes))

    def drain(self):
        """Write what has been noted."""
        notes = self.notes
        if notes is None or not notes.rows:
            return
        count, width = notes.rows, len(self.words)
        if width:
            data = np.ctypeslib.as_array(notes.data, (count * width,)).reshape(count, width).copy()
        else:
            data = np.zeros((count, 0), np.uint64)
        notes.rows = 0
        if notes.lost:
            raise MemoryError(f"no room for what is noted of cycle {notes.lost}")
        first = min(self.simulation.cycles, self.until) - count - self.zero
        self._write(first, data)
        self.recorded += count

    def end(self):
        """Let no more notes be taken; the simulation goes on with the model it had."""
        if self.notes is None:
            return
        self.drain()
        simulation = self.simulation
        simulation.model.library.notes_end(simulation.state)
        self.notes = None
        if self._left is not None:
            model, state = simulation.become(*self._left)
            model.library.state_close(state)
            self._left = None

    # The file -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, path):
        """Write a file while a block runs; also if it fails, what there is by then."""
        error = None
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(replacing(path, "w", encoding="utf-8"))
            try:
                yield
            except BaseException as raised:
                error = raised
            self.end()
            if self._writer is not None:
                self._writer.close()
            elif error is not None:
                raise error
            else:
                raise WindowError(
                    f"no waveforms: cycle {self.start - self.zero} has not come, "
                    f"the simulation ended at cycle {self.simulation.cycles - self.zero}"
                )
        if error is not None:
            raise error

    def _open(self, first, columns):
        """Declare all signals; ``columns`` are what they are in the first cycle."""
        writer = VCDWriter(
            self._file, timescale="1 ns", comment="written by Makalu: a cycle takes 10 ns",
            init_timestamp=first * CYCLE_NS,
        )  # fmt: skip
        known = {}
        for i, (signal, found) in enumerate(zip(self.signals, columns, strict=True)):
            name = signal.name
            name = name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else f"\\{name}"
            scope, same = signal.path.split("."), tuple(signal.runs)
            if same in known:
                writer.register_alias(scope, name, known[same])
                continue
            is_clock = self._is_clock(signal)
            init = 1 if is_clock else self._number(found, 0)
            known[same] = writer.register_var(scope, name, "wire", signal.width, init=init)
            if is_clock:
                self._clocks.append(known[same])
            else:
                self._variables.append((known[same], i))
        return writer

    @staticmethod
    def _number(found, row):
        return sum(int(word[row]) << WORD * i for i, word in enumerate(found))

    def _write(self, first, data):
        if self._last is None:
            index = {key: i for i, key in enumerate(self.words)}
            self._columns = [
                None if self._is_clock(signal) else _Column(signal, index)
                for signal in self.signals
            ]
        before = data[:1] if self._last is None else self._last
        data = np.concatenate([before, data])
        self._last = data[-1:].copy()
        columns = [[] if column is None else column.words(data) for column in self._columns]
        if self._writer is None:
            self._writer = self._open(first, columns)
        events = []
        for variable, i in self._variables:
            found = columns[i]
            changed = np.zeros(len(data) - 1, bool)
            for word in found:
                changed |= word[1:] != word[:-1]
            for row in np.nonzero(changed)[0].tolist():
                events.append((row, variable, self._number(found, row + 1)))
        events.sort(key=lambda event: event[0])
        change, at = self._writer.change, 0
        if not self._clocks:
            for row, variable, value in events:
                change(variable, (first + row) * CYCLE_NS, value)
            return
        for row in range(len(data) - 1):
            time = (first + row) * CYCLE_NS
            for clock in self._clocks:
                change(clock, time, 1)
            while at < len(events) and events[at][0] == row:
                change(events[at][1], time, events[at][2])
                at += 1
            for clock in self._clocks:
                change(clock, time + CYCLE_NS // 2, 0)
