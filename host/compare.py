"""Two simulations of the hardware in lock step, and where they part: ``makalu compare``.

A program is recorded on the golden model, where :class:`~.device.Device` places it as everywhere.
Both machines then run it from the same memories through the same register accesses, in windows.
At the end of each, memories are compared, which takes no time, then counters, queues and
semaphores, which takes the same accesses on both. Where something differs, both start again, and
the window is narrowed to the first cycle after which they differ. At the end the memories are
compared with the golden model's.

Cycles are those of :attr:`~..sim.backends.Machine.cycles`, from the start of the simulation.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..firmware.program import Program
from ..rtl.arch.events import COUNTERS
from ..rtl.arch.formats import FP32, UINT8
from ..rtl.arch.isa import WORD_BYTES, Engine, Space, WaitMode
from ..rtl.arch.registers import REGISTERS, SEMAPHORE_BASE, address_of, counter_address
from . import devices
from .device import Device
from .errors import MakaluError, UsageError, disassemble

__all__ = [
    "Comparison", "Difference", "Machines", "Recorded", "Recorder", "check_backends", "compare",
    "rerun_commands",
]  # fmt: skip

WINDOW_CYCLES = 1000
_SHOWN = 8
"""Differing elements that are shown of one memory, and registers in all."""

_CANDIDATES = 4
"""Registers of which the first difference is looked for, one by one."""

_READ_CYCLES = 16
"""A read of a register takes no more."""

_HIGH = ", high word"
_MEMORIES = ("SBUF", "PSUM", "HBM")


# The program --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A program as it was run on the golden model.

    Parameters
    ----------
    program : :class:`~..firmware.program.Program`
    addresses : dict
        Tensor to address in HBM.
    image_address : :class:`int`
    queues : dict
        Engine to address and count.
    before, after : dict
        Memory (``SBUF``, ``PSUM``, ``HBM``) to its contents.
    banks : :class:`int`
        Of PSUM.
    """

    program: Program
    addresses: dict
    image_address: int
    queues: dict
    before: dict
    after: dict
    banks: int


class Recorder(Device):
    """A device on the golden model that remembers what ran on it, in :attr:`recorded`."""

    def __init__(self, config, *, hbm=None):
        super().__init__(config, "golden", hbm=hbm)
        self.recorded: list[Recorded] = []

    def _memories(self):
        hbm = np.frombuffer(self._runner.hbm_read(0, self.hbm.size_bytes), np.uint8)
        return {"SBUF": self._runner.sbuf(), "PSUM": self._runner.psum(), "HBM": hbm}

    def _run(self, loaded, addresses, progress=None):
        queues = loaded._place(addresses)
        before = self._memories()
        super()._run(loaded, addresses, progress)
        self.recorded.append(
            Recorded(
                loaded.program, dict(addresses), loaded._image_address, dict(queues), before,
                self._memories(), self.config.psum_banks,
            )
        )  # fmt: skip


def check_backends(names):
    """Two backends that count cycles, of a list of them; ``golden`` may be named too.

    Raises
    ------
    :exc:`UsageError`
    """
    unknown = [name for name in names if name not in devices.BACKENDS]
    if unknown:
        raise UsageError(
            f"no backend is called {unknown[0]!r}; there are {', '.join(devices.BACKENDS)}"
        )
    exact = [name for name in names if name != "golden"]
    if len(exact) != 2:
        raise UsageError(
            "two backends that count cycles are compared, such as native,verilator, "
            f"not {','.join(names)}; golden is compared with at the end in any case"
        )
    return tuple(exact)


# Machines -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """How to make the two machines, again and again.

    Parameters
    ----------
    names : tuple of two :class:`str`
        As they are called in what is printed.
    make : tuple of two functions
        Each returns a new :class:`~.devices.registers.RegisterRunner`.
    """

    names: tuple[str, ...]
    make: tuple[Callable, ...]

    @classmethod
    def of(cls, backends, config, hbm, on_build=None):
        """Machines of two backends."""
        names = tuple(backends)
        if names[0] == names[1]:
            names = tuple(f"{name} {i}" for i, name in enumerate(names, 1))

        def maker(name):
            return lambda: devices.start(devices.choose(name, config)[0], config, hbm, on_build)

        return cls(names, (maker(backends[0]), maker(backends[1])))


class _Pair:
    """Both machines, started on a program and stepped together."""

    def __init__(self, machines, recorded):
        self.recorded = recorded
        self.runners = []
        try:
            for make in machines.make:
                self.runners.append(make())
            self.machines = [runner.machine for runner in self.runners]
            for runner, machine in zip(self.runners, self.machines, strict=True):
                machine.hbm_write(0, recorded.before["HBM"])
                machine.sbuf_write(recorded.before["SBUF"])
                machine.psum_write(recorded.before["PSUM"])
                runner.begin(recorded.queues)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Free both."""
        for runner in self.runners:
            runner.close()

    @property
    def cycle(self):
        """Where they are; the first machine's, should they differ."""
        return self.machines[0].cycles

    def step_to(self, cycle):
        """Let both get to a cycle."""
        left = cycle - self.cycle
        if left > 0:
            for machine in self.machines:
                machine.step(left)

    def read(self, address):
        """A register of both; text where one does not answer."""
        values = []
        for machine in self.machines:
            try:
                values.append(machine.reg_read(address))
            except RuntimeError as error:
                values.append(str(error))
        return values

    def memory(self, name):
        """A memory of both."""
        if name == "SBUF":
            return [machine.sbuf_read() for machine in self.machines]
        if name == "PSUM":
            return [machine.psum_read() for machine in self.machines]
        size = len(self.recorded.before["HBM"])
        return [np.frombuffer(machine.hbm_read(0, size), np.uint8) for machine in self.machines]

    def differing_memories(self):
        """Names of the memories that differ."""
        found = []
        for name in _MEMORIES:
            a, b = self.memory(name)
            if not np.array_equal(a, b):
                found.append(name)
        return found

    def differing_registers(self, registers):
        """Name to both values of the registers that differ."""
        found = {}
        for name, address in registers.items():
            a, b = self.read(address)
            if a != b:
                found[name] = a, b
        return found

    def same_time(self):
        """Whether equally many cycles have passed on both."""
        return self.machines[0].cycles == self.machines[1].cycles


def _registers(recorded):
    """Name to address of what is compared: those that come first are what others follow from."""
    found = {}
    for event in COUNTERS:
        address = counter_address(event.full_name)
        found[event.full_name] = address
        found[event.full_name + _HIGH] = address + 4  # as it was when the low one was read
    for register in REGISTERS:
        if "r" in register.access:
            found[register.name] = register.address
    used = set()
    for engine, (_, count) in recorded.queues.items():
        for row in range(count):
            instruction = recorded.program.instruction(engine, row)
            used |= {wait.semaphore for wait in instruction.waits if wait.mode != WaitMode.NONE}
            used.add(instruction.update.semaphore)
    for semaphore in sorted(used):
        found[f"semaphore {semaphore}"] = SEMAPHORE_BASE + 4 * semaphore
    return found


# Comparing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One thing that differs: what it is and, as text, what each side has."""

    what: str
    values: tuple[str, ...]


@dataclass
class Comparison:
    """What came out.

    Attributes
    ----------
    names : tuple of :class:`str`
        Of the sides.
    equal : :class:`bool`
    cycles : :class:`int`
        Of the run, as ``core_cycles`` counts, if they are equal.
    cycle : :class:`int` or ``None``
        First cycle after which the sides differ; ``None`` if they do not, or only from golden.
    differences : list of :class:`Difference`
    queues : list of :class:`str`
        What each queue does there.
    more : :class:`str`
        What else is to be said.
    """

    names: tuple
    equal: bool
    cycles: int = 0
    cycle: int | None = None
    differences: list = field(default_factory=list)
    queues: list = field(default_factory=list)
    more: str = ""

    def lines(self):
        """As text."""
        if self.equal:
            return [f"equal in every byte and counter after {self.cycles:,} cycles{self.more}"]
        if self.cycle is None:
            lines = [f"DIFFERENT from the golden model after {self.cycles:,} cycles{self.more}"]
        else:
            lines = [f"DIFFERENT from cycle {self.cycle:,} on{self.more}"]
        width = max(len(name) for name in self.names)
        for difference in self.differences:
            lines.append(difference.what)
            lines += [
                f"  {name:{width}}  {value}"
                for name, value in zip(self.names, difference.values, strict=True)
            ]
        return lines + (["", "in flight", *self.queues] if self.queues else [])

    def to_dict(self):
        """Ready for JSON."""
        return {
            "equal": self.equal, "sides": list(self.names), "cycles": self.cycles,
            "cycle": self.cycle, "text": self.lines(), "queues": self.queues,
            "differences": [
                {"what": d.what, "values": list(d.values)} for d in self.differences
            ],
        }  # fmt: skip


def compare(machines, recorded, *, window=WINDOW_CYCLES, only=None, progress=None):
    """Run a program on both machines and say where they part.

    Parameters
    ----------
    machines : :class:`Machines`
    recorded : :class:`Recorded`
    window : :class:`int`, cycles
        Between two looks at everything.
    only : tuple of two :class:`int` or ``None``
        Run to the first of these cycles at once, then look at the memories in every cycle up to the
        second, and no further.
    progress : callable or ``None``
        Called with text and cycles.

    Returns
    -------
    :class:`Comparison`
    """
    tell = progress or (lambda text, cycle: None)
    registers = _registers(recorded)
    if only is not None:
        return _look_closely(machines, recorded, registers, *only)
    with _Pair(machines, recorded) as pair:
        low, idle = pair.cycle, False
        while True:
            tell("comparing", pair.cycle)
            at, memories, found, low = _look(pair, registers, low, window)
            end = pair.cycle
            if not pair.same_time():
                return _explain_time(pair, machines, recorded, found)
            if memories or found:
                break
            if idle:
                return _with_golden(pair, machines, recorded)
            status = pair.read(address_of("status"))[0]
            if isinstance(status, str):
                raise MakaluError(f"neither machine answers any more: {status}")
            idle = not status & 1  # then all is looked at once more
            if not idle:
                pair.step_to(at + window)
    replay = _Replay(machines, recorded, tell)
    first, named = end, None
    if memories:
        first = replay.first(low, at, lambda pair: bool(pair.differing_memories()), reads=0)
        found = replay.at(first, lambda pair: pair.differing_registers(registers))
    names = [name for name in found if not name.endswith(_HIGH)]
    for name in names[:_CANDIDATES]:

        def differs(pair, address=registers[name]):
            return len({*map(str, pair.read(address))}) > 1

        known = memories or named
        if known and not replay.at(first, differs):
            continue  # it came later
        earlier = replay.first(low, first, differs, reads=_READ_CYCLES)
        if earlier < first or not known:
            first, named = earlier, name
    with _Pair(machines, recorded) as pair:
        pair.step_to(first)
        return _explained(pair, machines, recorded, registers, first, named, seen=found)


def _look(pair, registers, low, window):
    """Look at the memories, now and then again, and once at every register.

    Returns
    -------
    (:class:`int`, list, dict, :class:`int`)
        When the memories were looked at last, which of them differ, which registers do, and the
        cycle since which the memories have not been looked at, or registers not.
    """
    began, at, found = pair.cycle, None, {}
    for name, address in registers.items():
        if not pair.same_time():
            break
        if at is None or pair.cycle >= at + window:
            before, at = (low if at is None else at), pair.cycle
            memories = pair.differing_memories()
            if memories:
                return at, memories, {}, before
        a, b = pair.read(address)
        if a != b or not pair.same_time():
            found[name] = a, b
    return pair.cycle if at is None else at, [], found, low if found else began


class _Replay:
    """Finds the first cycle after which something differs, by starting again."""

    PARTS = 16

    def __init__(self, machines, recorded, tell):
        self.machines, self.recorded, self.tell = machines, recorded, tell

    def at(self, cycle, look):
        """What ``look(pair)`` returns at a cycle."""
        with _Pair(self.machines, self.recorded) as pair:
            pair.step_to(cycle)
            return look(pair)

    def first(self, low, high, differs, *, reads):
        """First cycle in ``(low, high]`` at which ``differs(pair)``; it does not at ``low``.

        ``reads`` is how many cycles ``differs`` takes at most.
        """
        while high - low > 1:
            step = max((high - low) // self.PARTS, 1)
            if step <= reads:
                step = (high - low) // 2
            at = low + step
            with _Pair(self.machines, self.recorded) as pair:
                while True:
                    self.tell("narrowing down", at)
                    pair.step_to(at)
                    if at >= high or differs(pair):
                        high = at
                        break
                    low, at = at, min(at + step, high)
                    if step <= reads:
                        break
        return high


def _look_closely(machines, recorded, registers, first, last):
    """Every cycle from ``first`` to ``last``; the registers at the end."""
    with _Pair(machines, recorded) as pair:
        for cycle in range(max(first, pair.cycle), last + 1):
            pair.step_to(cycle)
            if pair.differing_memories() or not pair.same_time():
                return _explained(pair, machines, recorded, registers, cycle, None)
        found = pair.differing_registers(registers)
        if found:
            return _explained(pair, machines, recorded, registers, last, next(iter(found)))
    text = f"; looked at up to cycle {last:,}"
    return Comparison(machines.names, True, cycles=last, more=text)


def _explain_time(pair, machines, recorded, found):
    """The machines took different times for the same steps and accesses."""
    after = f", the last a read of register {list(found)[-1]}" if found else ""
    cycles = tuple(f"{machine.cycles:,} cycles" for machine in pair.machines)
    differences = [Difference(f"time that passed in the same steps{after}", cycles)]
    cycle = min(machine.cycles for machine in pair.machines)
    queues = _queues(pair, machines, recorded)
    return Comparison(machines.names, False, cycle=cycle, differences=differences, queues=queues)


def _explained(pair, machines, recorded, registers, cycle, name, *, seen=None):
    """The comparison of two machines that stand where they differ first."""
    differences = []
    if not pair.same_time():
        cycles = tuple(f"{machine.cycles:,} cycles" for machine in pair.machines)
        differences.append(Difference("time that passed in the same steps", cycles))
    for memory in pair.differing_memories():
        differences += _memory_differences(memory, pair.memory(memory), recorded)
    chosen = {name: registers[name]} if name is not None else {}
    found = pair.differing_registers(chosen)
    if not found and not differences:  # a register that differed for a while
        found = pair.differing_registers(registers) or seen or {}
    for which, (a, b) in list(found.items())[:_SHOWN]:
        kind = "counter" if which.partition(",")[0] in _COUNTER_NAMES else "register"
        kind = "" if which.startswith("semaphore") else f"{kind} "
        differences.append(Difference(f"{kind}{which}", (_hex(a), _hex(b))))
    return Comparison(
        machines.names, False, cycle=cycle, differences=differences,
        queues=_queues(pair, machines, recorded),
    )  # fmt: skip


_COUNTER_NAMES = {event.full_name for event in COUNTERS}


def _hex(value):
    return value if isinstance(value, str) else f"{value:,} ({value:#x})"


def _with_golden(pair, machines, recorded):
    """Both are done and equal; compare with the golden model's memories."""
    status = pair.read(address_of("status"))[0]
    cycles = pair.read(counter_address("core_cycles"))[0]
    error = ""
    if status & 4:
        code = pair.read(address_of("error"))[0] & 0xFF
        error = f"; both stopped with error {code}"
    differences = []
    for name in _MEMORIES:
        mine, golden = pair.memory(name)[0], recorded.after[name]
        if not np.array_equal(mine, golden):
            differences += _memory_differences(name, (mine, golden), recorded)
    names = ("both", "golden")
    if differences:
        return Comparison(names, False, cycles=cycles, differences=differences, more=error)
    return Comparison(machines.names, True, cycles=cycles, more=f"{error}, golden's bytes too")


# Explaining ---------------------------------------------------------------------------------------


def _memory_differences(name, contents, recorded):
    """The first elements of a memory that differ, in their format."""
    a, b = contents
    places = np.argwhere(a != b)
    out, shown = [], set()
    left = len(places)
    for place in places:
        if len(out) >= _SHOWN:
            break
        place = tuple(int(i) for i in place)
        fmt, first, text = _place(name, place, recorded)
        if (place[:-1], first) in shown:
            continue
        shown.add((place[:-1], first))
        values = []
        for side in (a, b):
            raw = side[(*place[:-1], slice(first, first + fmt.bytes))]
            values.append(_value(fmt, raw))
        out.append(Difference(f"{name} {text}, {fmt.name}", tuple(values)))
    if out and len(places) > 1:
        out[-1] = Difference(f"{out[-1].what}; {left:,} bytes of {name} differ", out[-1].values)
    return out


def _value(fmt, raw):
    """An element as number and as bits."""
    raw = np.ascontiguousarray(raw)
    bits = int.from_bytes(raw.tobytes(), "little")
    value = np.asarray(fmt.decode(raw.view(fmt.dtype)))[0]
    number = f"{float(value):.9g}" if fmt.is_float else f"{int(value)}"
    return f"{number:>16}  {bits:#0{2 + 2 * fmt.bytes}x}"


def _place(name, place, recorded):
    """Format of the element at a byte, its first byte, and where it lies, as text."""
    if name == "PSUM":
        partition, byte = place
        first = byte - byte % 4
        bank = byte // (recorded.before["PSUM"].shape[1] // recorded.banks)
        _, row = _covering(recorded, Engine.PE, Space.PSUM, partition, byte)
        who = "" if row is None else f", of PE instruction {row}"
        return FP32, first, f"partition {partition}, bank {bank}, byte {first:#x}{who}"
    if name == "SBUF":
        partition, byte = place
        fmt, first, who = _of_pattern(partition, byte, recorded)
        return fmt, first, f"partition {partition}, byte {first:#x}{who}"
    (byte,) = place
    for info in recorded.program.tensors:
        address = recorded.addresses[info.name]
        if address <= byte < address + info.nbytes:
            fmt = info.dtype
            index, first = (byte - address) // fmt.bytes, byte - (byte - address) % fmt.bytes
            where = ", ".join(map(str, np.unravel_index(index, info.shape)))
            return fmt, first, f"address {first:#x}, {info.name}[{where}]"
    for engine, (base, count) in recorded.queues.items():
        if base <= byte < base + count * WORD_BYTES:
            row = (byte - base) // WORD_BYTES
            return UINT8, byte, f"address {byte:#x}, instruction {row} of queue {engine.name}"
    first, size = recorded.image_address, recorded.program.image_bytes
    what = ", a descriptor" if first <= byte < first + size else ""
    return UINT8, byte, f"address {byte:#x}{what}"


def _covering(recorded, engine, space, partition, byte):
    """The last operand of a queue's instructions that covers a byte, and the instruction's row."""
    count = recorded.queues.get(engine, (0, 0))[1]
    for row in reversed(range(count)):
        instruction = recorded.program.instruction(engine, row)
        for operand, _, _ in instruction.operands:
            pattern = instruction.values[operand]
            if pattern.space is not space or not pattern.elements:
                continue
            end = pattern.start_partition + pattern.num_partitions
            if partition is not None and not pattern.start_partition <= partition < end:
                continue
            offsets = np.asarray(pattern.element_offsets())
            if ((offsets <= byte) & (byte < offsets + pattern.dtype.bytes)).any():
                return pattern, row
    return None, None


def _of_pattern(partition, byte, recorded):
    """Format and first byte of an element of SBUF, and which instruction reads or writes it."""
    for engine in (Engine.DVE, Engine.PE):
        pattern, row = _covering(recorded, engine, Space.SBUF, partition, byte)
        if pattern is not None:
            first = byte - (byte - pattern.offset) % pattern.dtype.bytes
            where = recorded.program.where(engine, row).rpartition("/")[2]
            return pattern.dtype, first, f", of {engine.name} instruction {row} ({where})"
    return UINT8, byte, ""


def _queues(pair, machines, recorded):
    """What each queue does: its state, the instruction issued last, the one at its head.

    As registers say, which are read from there on: a few cycles late.
    """
    lines = []
    for engine, (base, count) in recorded.queues.items():
        if not count:
            continue
        texts = []
        for runner in pair.runners:
            try:
                state = runner.queue_state(engine)
            except RuntimeError as error:
                texts.append([f"{engine.name}: {error}"])
                continue
            text = [f"{engine.name}: {state.issued} of {count} issued, {state.state}"]
            if state.state == "waiting_semaphore":
                text[0] += f" {state.semaphore}, which is {state.seen}, not {state.wanted}"
            for title, row in (("last issued", state.issued - 1), ("head", state.issued)):
                if 0 <= row < count:
                    word = recorded.program.queues[engine][row].tobytes()
                    where = recorded.program.where(engine, row)
                    text.append(f"  {title} {row}, {base + row * WORD_BYTES:#x}: "
                                f"{disassemble(word)}  ; {where}")  # fmt: skip
            texts.append(text)
        if texts[0] == texts[1]:
            lines += texts[0]
        else:
            for name, text in zip(machines.names, texts, strict=True):
                lines += [f"{name}: {text[0]}", *text[1:]]
    return lines


def rerun_commands(arguments, comparison, margin=50):
    """Commands that look at the place again: without and with waveforms.

    Parameters
    ----------
    arguments : dict
        ``compare``, the words after ``makalu compare`` without ``--cycles``; ``waves``, those of a
        command that runs the same on a device of its own, or ``None``.
    """
    if comparison.cycle is None:
        return []
    first, last = max(comparison.cycle - margin, 0), comparison.cycle + margin
    words = ["makalu", "compare", *arguments["compare"], "--cycles", f"{first}:{last}"]
    commands = [shlex.join(words)]
    if arguments.get("waves"):
        words = ["makalu", *arguments["waves"], "--waves", "out.vcd"]
        commands.append(shlex.join([*words, "--waves-window", f"{first}:{last}"]))
    return commands
