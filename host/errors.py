"""Everything the host raises, in one place; each message says what to do.

Errors of the compiler (:exc:`~..firmware.program.ProgramError`) come from the compiler.
"""

from dataclasses import dataclass

from ..rtl.arch.isa import (
    DESCRIPTOR_LAYOUT,
    HEADER,
    INSTRUCTIONS,
    AccessPattern,
    Engine,
    ErrorCode,
    IsaError,
    WaitMode,
    decode,
)

__all__ = [
    "ArgumentError", "ClosedError", "Deadlock", "DeviceError", "DeviceFaulted", "DtypeError",
    "FileFormatError", "HbmOutOfMemory", "KernelFileError", "MakaluError", "QueueStatus",
    "ShapeError", "TensorError", "ToolMissing", "UsageError", "WatchdogTimeout", "describe_field",
    "disassemble",
]  # fmt: skip


class MakaluError(Exception):
    """Base of all errors of the host."""


class ToolMissing(MakaluError):
    """A backend needs a program that this machine does not have; the message says how to get it."""


class ClosedError(MakaluError):
    """A device, program or tensor is used after it was closed, unloaded or freed."""


class DeviceFaulted(MakaluError):
    """The device stopped with an error and was not reset."""


class ShapeError(MakaluError, ValueError):
    """Shapes do not fit each other."""


class DtypeError(MakaluError, TypeError):
    """A number format is not what it must be."""


class ArgumentError(MakaluError, TypeError):
    """An argument is of a kind that is not taken there."""


class TensorError(MakaluError, ValueError):
    """The tensors given to a program are not those it has."""


class FileFormatError(MakaluError, ValueError):
    """A file does not hold what it should."""


class UsageError(MakaluError, ValueError):
    """What is asked for by name or number does not exist, or does not go together."""


class KernelFileError(MakaluError):
    """The Python code of a kernel file failed; the message names the lines."""


class HbmOutOfMemory(MakaluError, MemoryError):
    """HBM has no room.

    Attributes
    ----------
    needed, free, largest : :class:`int`, bytes
        What was asked for, what is free in all and in one piece.
    """

    remedy = "free tensors or programs, or open the device with a larger hbm="

    def __init__(self, what, *, needed, free, largest, total, remedy=remedy):
        self.needed, self.free, self.largest = needed, free, largest
        detail = "" if largest == free else f" ({largest:,} in one piece)"
        super().__init__(
            f"no room in HBM for {what}: {needed:,} bytes needed, {free:,} of {total:,} "
            f"free{detail}; {remedy}"
        )


MEANINGS = {
    ErrorCode.ILLEGAL_OPCODE: "no such instruction on this queue",
    ErrorCode.RESERVED_BITS: "a bit that no field claims is set",
    ErrorCode.BAD_FIELD: "the field holds a code without meaning",
    ErrorCode.BAD_PARTITION: "these partitions are not allowed",
    ErrorCode.OUT_OF_RANGE: "an element lies outside its memory or bank, or is misaligned",
    ErrorCode.SIZE_MISMATCH: "operands differ in size or are too large",
    ErrorCode.BAD_DESCRIPTOR: "a DMA descriptor is not legal",
    ErrorCode.BUS_READ: "a DMA read was refused by the bus",
    ErrorCode.BUS_WRITE: "a DMA write was refused by the bus",
    ErrorCode.BUS_FETCH: "an instruction fetch was refused by the bus",
    ErrorCode.SEMAPHORE_OVERFLOW: "a semaphore passed 2**32 - 1",
    ErrorCode.WATCHDOG: "nothing moved",
}


def disassemble(word):
    """An instruction word as text; one that does not decode as its opcode and bytes."""
    try:
        return str(decode(word))
    except IsaError as error:
        return f"{word[:16].hex()}... ({error})"


def describe_field(word, bit, *, descriptor=False):
    """Name of the field of an instruction word (or DMA descriptor) whose first bit is ``bit``."""
    if descriptor:
        names = {first: name for name, first, _ in DESCRIPTOR_LAYOUT}
        return names.get(bit, f"bit {bit}")
    if bit == 0:
        return "opcode"
    for name, first, _ in HEADER:
        if first == bit:
            return name
    cls = INSTRUCTIONS.get(word[0]) if word else None
    if cls is not None:
        for name, _, first in cls.operands:
            for part, offset, _ in AccessPattern.LAYOUT:
                if first + offset == bit:
                    return f"{name}.{part}"
        for name, _, first in cls.scalars:
            if first == bit:
                return name
    return f"bit {bit}"


@dataclass(frozen=True)
class QueueStatus:
    """What one instruction queue was doing when the device stopped."""

    engine: Engine
    state: str
    """A key of :data:`~..rtl.arch.registers.QUEUE_STATE`."""
    issued: int
    count: int
    pc: int = 0
    wait: int = 0
    mode: WaitMode = WaitMode.NONE
    semaphore: int = 0
    wanted: int = 0
    seen: int = 0
    instruction: str = ""
    source: str = ""

    def __str__(self):
        done = f"{self.engine.name}: {self.issued} of {self.count} instructions issued"
        if self.state == "done":
            return f"{self.engine.name}: done"
        if self.state == "waiting_semaphore":
            sign = ">=" if self.mode == WaitMode.GE else "=="
            done += (
                f", waits for semaphore {self.semaphore} {sign} {self.wanted}, which is {self.seen}"
            )
        else:
            done += f", {self.state.replace('_', ' ')}"
        if self.instruction:
            done += f"\n      {self.instruction}"
        if self.source:
            done += f"\n      from {self.source}"
        return done


class DeviceError(MakaluError):
    """The core stopped with an error. Call ``reset()`` on the device to use it again.

    Attributes
    ----------
    code : :class:`ErrorCode`
    engine : :class:`Engine` or ``None``
        Queue that stopped; ``None`` for a DMA engine.
    dma_engine : :class:`int` or ``None``
    pc : :class:`int`
        HBM address of the instruction, or of the descriptor.
    index : :class:`int` or ``None``
        Number of the instruction within its queue.
    field : :class:`str`
        Name of the offending field.
    field_bit : :class:`int`
    address : :class:`int`
        Bus address of a bus error.
    instruction : :class:`str`
        Disassembly.
    source : :class:`str`
        Line of the kernel it came from, if known.
    queues : tuple of :class:`QueueStatus`
    """

    def __init__(
        self,
        code,
        *,
        engine=None,
        dma_engine=None,
        pc=0,
        index=None,
        field="",
        field_bit=0,
        address=0,
        instruction="",
        source="",
        queues=(),
    ):
        self.code = ErrorCode(code)
        self.engine, self.dma_engine = engine, dma_engine
        self.pc, self.index = pc, index
        self.field, self.field_bit, self.address = field, field_bit, address
        self.instruction, self.source = instruction, source
        self.queues = tuple(queues)
        super().__init__(self._message())

    def _message(self):
        is_dma = self.engine is None
        who = f"DMA engine {self.dma_engine}"
        if self.engine is not None:
            who = f"{self.engine.name} queue"
        text = f"{who} stopped with {self.code.name}: {MEANINGS.get(self.code, '')}"
        what = "descriptor" if is_dma else "instruction"
        where = f"{what} at {self.pc:#x}"
        if self.index is not None:
            where = f"{what} {self.index} at {self.pc:#x}"
        if self.code == ErrorCode.SEMAPHORE_OVERFLOW:
            # Engines do not know which instruction their updates came from.
            where = f"semaphore {self.address}, {where if self.pc else 'by work that ended'}"
        text += f"\n  {where}"
        if self.field:
            text += f", field {self.field}"
        if self.code in (ErrorCode.BUS_READ, ErrorCode.BUS_WRITE, ErrorCode.BUS_FETCH):
            text += f", bus address {self.address:#x}"
        if self.instruction:
            text += f"\n  {self.instruction}"
        if self.source:
            text += f"\n  from {self.source}"
        return text


class WatchdogTimeout(DeviceError):
    """Nothing moved for as long as the watchdog allows; ``queues`` says what each one does."""

    headline = "the program made no progress"

    def _message(self):
        lines = [f"{self.headline}:"]
        lines += [f"    {queue}" for queue in self.queues if queue.state != "done"]
        return "\n".join(lines)


class Deadlock(WatchdogTimeout):
    """Every queue with work left waits for a semaphore that nobody will change."""

    headline = "the program is in a deadlock: every queue that is not done waits for a semaphore"
