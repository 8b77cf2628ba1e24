"""The instruction set, declared once: engines, instruction words, DMA descriptors, error codes.

An :class:`Instruction` subclass *is* its encoding, its checked constructor, its disassembly, its
hardware layout and its page of the manual. The words are 128 bytes, little-endian:

==========  ======================================================================================
bits        meaning
==========  ======================================================================================
0..175      header, the same for all: opcode, engine, two waits, one update
176..255    reserved (zero): room for register operands
256..1023   body, declared by the instruction: access patterns first, then scalar fields
==========  ======================================================================================

Every bit that no field claims must be zero; the hardware stops the engine otherwise. An instruction
with a count of zero or no partitions in any operand does nothing but complete and update.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from amaranth.lib import data

from . import formats
from .config import AXI_ADDR_BITS

__all__ = [
    "AP_BITS", "BITWISE_OPS", "BODY_BIT", "DESCRIPTOR_BYTES", "EIGHT", "EIGHT_LIMIT",
    "ERROR_REPORTS", "INSTRUCTIONS", "WORD_BITS", "WORD_BYTES", "AccessPattern", "Activation",
    "AffineSelect", "AluOp", "Compare", "CopyPredicated", "Descriptor", "DescriptorSide",
    "DmaStart", "Engine", "ErrorCode", "ErrorReport", "EventSemaphore", "Field", "FindIndex8",
    "Function", "Half", "Instruction", "IntegerTensorScalar", "IntegerTensorTensor", "Iota",
    "IsaError", "LoadStationary", "MatchReplace8", "MatmulMoving", "Max8", "Memset", "Operand",
    "ReduceOp", "Rng", "ScalarTensorTensor", "Space", "TensorCopy", "TensorReduce", "TensorScalar",
    "TensorTensor", "TensorTensorScan", "Update", "UpdateMode", "Wait", "WaitMode", "decode",
]  # fmt: skip

WORD_BYTES = 128
WORD_BITS = 8 * WORD_BYTES
HEADER_BITS = 176
BODY_BIT = 256
AP_BITS = 224
DESCRIPTOR_BYTES = 128


class IsaError(ValueError):
    """An instruction or descriptor that cannot be encoded or decoded."""


class Engine(IntEnum):
    """Instruction queues, by AWS's names. The order is that of the queue registers."""

    PE = 0
    """Tensor engine."""
    ACT = 1
    """Scalar engine (activation)."""
    DVE = 2
    """Vector engine."""
    POOL = 3
    """GpSimd engine."""
    SP = 4
    """Sync engine: control and DMA triggers only."""


class Space(IntEnum):
    """On-chip memory of an access pattern."""

    SBUF = 0
    PSUM = 1


class WaitMode(IntEnum):
    """Condition of a semaphore wait (unsigned comparison)."""

    NONE = 0
    GE = 1
    EQ = 2


class UpdateMode(IntEnum):
    """What an instruction does to its semaphore when it has completed."""

    NONE = 0
    ADD = 1
    SET = 2


class Half(IntEnum):
    """Which part of a binary32 operand enters the array."""

    WHOLE = 0
    """The value itself (formats of at most 12 significand bits)."""
    HI = 1
    """The value with the low 12 bits of its encoding cleared."""
    LO = 2
    """The value minus its HI half; void where that is zero or the value is infinite or NaN."""


class AluOp(IntEnum):
    """Operations on two elements, in binary32 unless they are bitwise.

    A NaN that an operation produces is the canonical one. Comparisons and logical operations give
    1.0 or 0.0. Bitwise operations take the elements' bits, extended by zeros to 32, and store the
    low bits of the result; so does everything else in the same instruction: another operation takes
    the 32 bits as a binary32 number.
    """

    BYPASS = 0
    """The first operand, unchanged."""
    ADD = 1
    """``a + b``, rounded to nearest even."""
    SUBTRACT = 2
    """``a - b``, rounded to nearest even."""
    MULTIPLY = 3
    """``a * b``, rounded to nearest even."""
    MAX = 4
    """The greater one; NaN if either is; +0 is greater than -0."""
    MIN = 5
    """The smaller one; NaN if either is; -0 is smaller than +0."""
    ABS_MAX = 6
    """The greater magnitude, positive; NaN if either is."""
    ABS_MIN = 7
    """The smaller magnitude, positive; NaN if either is."""
    EQUAL = 8
    """``a == b``; false with NaN; -0 equals +0, here and below."""
    NOT_EQUAL = 9
    """``a != b``; true with NaN."""
    GREATER_EQUAL = 10
    """``a >= b``; false with NaN."""
    GREATER = 11
    """``a > b``; false with NaN."""
    LESS_EQUAL = 12
    """``a <= b``; false with NaN."""
    LESS = 13
    """``a < b``; false with NaN."""
    LOGICAL_AND = 14
    """Neither is zero (NaN is not)."""
    LOGICAL_OR = 15
    """Not both are zero."""
    LOGICAL_XOR = 16
    """One of them is zero."""
    BITWISE_AND = 17
    """Bits set in both."""
    BITWISE_OR = 18
    """Bits set in either."""
    BITWISE_XOR = 19
    """Bits that differ."""
    BITWISE_NOT = 20
    """The bits of ``a`` inverted."""
    LEFT_SHIFT = 21
    """``a`` shifted left by ``b`` (unsigned); 0 from 32 on."""
    RIGHT_SHIFT = 22
    """``a`` shifted right by ``b`` (unsigned), zeros from the left; 0 from 32 on."""


BITWISE_OPS = tuple(op for op in AluOp if op >= AluOp.BITWISE_AND)
"""Operations on bits. One of them in an instruction makes all its operands and its result bits."""


class ReduceOp(IntEnum):
    """The operations of :class:`AluOp` that reduce."""

    ADD = AluOp.ADD
    MAX = AluOp.MAX
    MIN = AluOp.MIN
    ABS_MAX = AluOp.ABS_MAX
    ABS_MIN = AluOp.ABS_MIN
    LOGICAL_AND = AluOp.LOGICAL_AND
    LOGICAL_OR = AluOp.LOGICAL_OR
    LOGICAL_XOR = AluOp.LOGICAL_XOR
    BITWISE_AND = AluOp.BITWISE_AND
    BITWISE_OR = AluOp.BITWISE_OR
    BITWISE_XOR = AluOp.BITWISE_XOR

    @property
    def identity(self):
        """Bits of the operand that changes nothing."""
        return {
            "ADD": 0x80000000, "MAX": 0xFF800000, "MIN": 0x7F800000, "ABS_MIN": 0x7F800000,
            "LOGICAL_AND": 0x3F800000, "BITWISE_AND": 0xFFFFFFFF,
        }.get(self.name, 0)  # fmt: skip


class Compare(IntEnum):
    """The operations of :class:`AluOp` that compare a number with zero."""

    EQUAL = AluOp.EQUAL
    NOT_EQUAL = AluOp.NOT_EQUAL
    GREATER_EQUAL = AluOp.GREATER_EQUAL
    GREATER = AluOp.GREATER
    LESS_EQUAL = AluOp.LESS_EQUAL
    LESS = AluOp.LESS


class Function(IntEnum):
    """Functions of the scalar engine. Derivatives end in ``DX``."""

    COPY = 0
    SQUARE = 1
    ABS = 2
    SIGN = 3
    RELU = 4
    PRELU = 5
    """``x`` where it is not negative, else ``alpha * x``."""
    EXP = 8
    LOG = 9
    SQRT = 10
    RSQRT = 11
    RECIPROCAL = 12
    TANH = 13
    SIGMOID = 14
    GELU = 15
    GELU_DX = 16
    GELU_TANH = 17
    """The approximation of GELU by tanh."""
    GELU_TANH_DX = 18
    GELU_SIGMOID = 19
    """The approximation of GELU by ``x * sigmoid(1.702 x)``."""
    SILU = 20
    SILU_DX = 21
    SOFTPLUS = 22
    MISH = 23
    ERF = 24
    ERF_DX = 25
    SIN = 26
    ARCTAN = 27


class ErrorCode(IntEnum):
    """What stopped the core; :data:`ERROR_REPORTS` says what its registers hold then."""

    NONE = 0
    ILLEGAL_OPCODE = 1
    """Unknown opcode, one of another engine, or a wrong engine field."""
    RESERVED_BITS = 2
    """A bit that no field claims is set."""
    BAD_FIELD = 3
    """A field holds a code without meaning (dtype, space, half, wait mode, ...)."""
    BAD_PARTITION = 4
    """Partitions outside the memory or start not allowed for the count."""
    OUT_OF_RANGE = 5
    """An element outside its memory, misaligned, or outside its PSUM bank."""
    SIZE_MISMATCH = 6
    """Operands differ in elements or partitions, or exceed the instruction's limit."""
    BAD_DESCRIPTOR = 7
    """A DMA descriptor failed its checks."""
    BUS_READ = 8
    """SLVERR or DECERR on a DMA read, of data or of a descriptor."""
    BUS_WRITE = 9
    """SLVERR or DECERR on a DMA write."""
    BUS_FETCH = 10
    """SLVERR or DECERR while fetching an instruction, or a base that cannot be fetched from."""
    SEMAPHORE_OVERFLOW = 11
    """An addition would have passed 2**32 - 1. The semaphore keeps its value."""
    WATCHDOG = 12
    """Nothing moved for as long as the watchdog allows. The queue registers say who waits."""


@dataclass(frozen=True)
class ErrorReport:
    """What the error registers hold after an error of one code."""

    source: str
    field: str
    pc: str
    address: str


def _of_word(field):
    return ErrorReport("queue", field, "instruction", "0")


_BURST = "bus word (a multiple of 8) with which the first refused burst begins"

ERROR_REPORTS = {
    ErrorCode.NONE: ErrorReport("0", "0", "0", "0"),
    ErrorCode.ILLEGAL_OPCODE: _of_word("0"),
    ErrorCode.RESERVED_BITS: _of_word("0"),
    ErrorCode.BAD_FIELD: _of_word("the field"),
    ErrorCode.BAD_PARTITION: _of_word("`start_partition` of the operand"),
    ErrorCode.OUT_OF_RANGE: _of_word("`offset` of the operand"),
    ErrorCode.SIZE_MISMATCH: _of_word("`count0` or `num_partitions` of the operand"),
    ErrorCode.BAD_DESCRIPTOR: ErrorReport(
        "16 + DMA engine", "the field of the descriptor; 576 beyond the last", "descriptor",
        "descriptor",
    ),
    ErrorCode.BUS_READ: ErrorReport("16 + DMA engine", "0", "descriptor", _BURST),
    ErrorCode.BUS_WRITE: ErrorReport("16 + DMA engine", "0", "descriptor", _BURST),
    ErrorCode.BUS_FETCH: ErrorReport("queue", "0", "instruction", "instruction"),
    ErrorCode.SEMAPHORE_OVERFLOW: ErrorReport(
        "queue, or 16 + DMA engine, whose update it was", "`update_semaphore`",
        "instruction if it is an `eventsemaphore`, else 0", "number of the semaphore",
    ),
    ErrorCode.WATCHDOG: ErrorReport(
        "first queue that waits for a semaphore, else the first with work left, else 0", "0",
        "its next instruction, or 0", "0",
    ),
}  # fmt: skip
"""Contents of the registers ``error``, ``error_pc`` and ``error_address`` by code.

``field`` is a first bit in the instruction word or descriptor; ``pc`` is an address modulo 2**40.
Engines complete instructions without knowing their addresses, hence the 0 of an overflow.
"""


@dataclass(frozen=True)
class Field:
    """A scalar field of an instruction body.

    ``values`` (an :class:`IntEnum`) limits the legal codes; the hardware raises BAD_FIELD
    otherwise. ``pointer`` names the flag which, when set, makes the field the byte offset in SBUF
    of one number of 32 bits in each partition of the first source (of dst where there is none),
    instead of a number: it must then be a multiple of 4 and lie in SBUF (BAD_FIELD otherwise), even
    if the instruction does nothing.
    """

    width: int
    meaning: str
    unit: str = ""
    values: type[IntEnum] | None = None
    pointer: str | None = None


@dataclass(frozen=True)
class Operand:
    """An access pattern of an instruction body, and what the checker enforces about it.

    Parameters
    ----------
    meaning : :class:`str`
    spaces : tuple of :class:`Space`
    formats : tuple of formats
        Legal dtypes.
    writes : :class:`bool`
        Whether the operand is written.
    limit : :class:`str`, :class:`int` or ``None``
        Largest number of elements per partition: ``"cols"``, ``"bank"`` (``psum_bank_words``), a
        number or ``None``.
    exactly : :class:`int` or ``None``
        The number of elements per partition, which is then compared with that of no other operand.
    one_bank : :class:`bool`
        In PSUM all elements must lie in one bank.
    start_zero : :class:`bool`
        The start partition must be 0.
    reduced : :class:`str` or ``None``
        Field that holds one less than the number of innermost dimensions that do not count when
        its elements are compared with those of the first operand, whatever their counts.

    Of two sources at most one may lie in PSUM (BAD_FIELD in the space of the second).
    """

    meaning: str
    spaces: tuple[Space, ...]
    formats: tuple
    writes: bool = False
    limit: str | int | None = None
    exactly: int | None = None
    one_bank: bool = False
    start_zero: bool = False
    reduced: str | None = None


@dataclass(frozen=True)
class AccessPattern:
    """Where an operand lies: the same free-axis pattern in each of several partitions.

    Parameters
    ----------
    dtype : format
        Number format of an element.
    start_partition, num_partitions : :class:`int`
    offset : :class:`int`, bytes
        Of element 0 within a partition; a multiple of the element size.
    dims : tuple of ``(step, count)``
        Up to four, innermost first, step in elements, -32768..32767; count 0..65535. Missing
        dimensions are ``(0, 1)``. Element ``i`` lies at ``offset + size * sum(step * index)``.
    space : :class:`Space`
    """

    dtype: object
    start_partition: int
    num_partitions: int
    offset: int
    dims: tuple[tuple[int, int], ...]
    space: Space = Space.SBUF

    # name, bit, width
    LAYOUT = (
        ("dtype", 0, 8),
        ("space", 8, 8),
        ("start_partition", 16, 16),
        ("num_partitions", 32, 16),
        ("_reserved", 48, 16),
        ("offset", 64, 32),
        *((f"step{i}", 96 + 32 * i, 16) for i in range(4)),
        *((f"count{i}", 112 + 32 * i, 16) for i in range(4)),
    )

    @property
    def elements(self):
        """Elements per partition."""
        n = 1
        for _, count in self.dims:
            n *= count
        return n

    def element_offsets(self):
        """Byte offset of every element within a partition, innermost dimension fastest."""
        import numpy as np

        total = np.array([self.offset], dtype=np.int64)
        for step, count in self.dims:
            index = np.arange(count, dtype=np.int64) * (step * self.dtype.bytes)
            total = (index[:, None] + total[None, :]).reshape(-1)
        return total

    def encode(self, where):
        """The pattern as an integer of :data:`AP_BITS` bits; ``where`` names it in errors."""
        if len(self.dims) > 4:
            raise IsaError(f"{where}: at most 4 dimensions fit, not {len(self.dims)}")
        word = 0
        dims = (*self.dims, *((0, 1),) * (4 - len(self.dims)))
        values = {
            "dtype": self.dtype.code,
            "space": int(self.space),
            "start_partition": self.start_partition,
            "num_partitions": self.num_partitions,
            "_reserved": 0,
            "offset": self.offset,
        }
        for i, (step, count) in enumerate(dims):
            if not -(1 << 15) <= step < 1 << 15:
                raise IsaError(f"{where}.step{i} = {step} does not fit in 16 signed bits")
            values[f"step{i}"] = step & 0xFFFF
            values[f"count{i}"] = count
        for name, bit, width in self.LAYOUT:
            word |= _fit(values[name], width, f"{where}.{name}") << bit
        return word

    @classmethod
    def decode(cls, word, where):
        """The inverse of :meth:`encode`."""
        raw = {name: word >> bit & (1 << width) - 1 for name, bit, width in cls.LAYOUT}
        if raw["_reserved"]:
            raise IsaError(f"{where}: reserved bits are set")
        try:
            dtype = formats.format_by_code(raw["dtype"])
            space = Space(raw["space"])
        except ValueError as error:
            raise IsaError(f"{where}: {error}") from None
        dims = []
        for i in range(4):
            step = raw[f"step{i}"]
            dims.append((step - (1 << 16) if step >> 15 else step, raw[f"count{i}"]))
        while len(dims) > 1 and dims[-1] == (0, 1):
            dims.pop()
        return cls(
            dtype, raw["start_partition"], raw["num_partitions"], raw["offset"], tuple(dims), space
        )

    @staticmethod
    def layout():
        """The pattern as an Amaranth layout."""
        members = {}
        for name, bit, width in AccessPattern.LAYOUT:
            from amaranth.hdl import signed

            shape = signed(width) if name.startswith("step") else width
            members[name] = data.Field(shape, bit)
        return data.FlexibleLayout(AP_BITS, members)

    def __str__(self):
        dims = " ".join(f"[{step},{count}]" for step, count in self.dims)
        stop = self.start_partition + self.num_partitions
        return (
            f"{self.space.name.lower()}.{self.dtype.name}"
            f"[{self.start_partition}:{stop}]+{self.offset:#x}{dims}"
        )


@dataclass(frozen=True)
class Wait:
    """Hold the instruction until ``semaphore`` compares true with ``value``."""

    semaphore: int = 0
    mode: WaitMode = WaitMode.NONE
    value: int = 0

    def __str__(self):
        return f"$S[{self.semaphore}]{'>=' if self.mode == WaitMode.GE else '=='}{self.value}"


@dataclass(frozen=True)
class Update:
    """Change ``semaphore`` once the instruction has completed."""

    semaphore: int = 0
    mode: UpdateMode = UpdateMode.NONE
    value: int = 0

    def __str__(self):
        return f"$S[{self.semaphore}]{'+=' if self.mode == UpdateMode.ADD else '='}{self.value}"


HEADER = (
    ("opcode", 0, 8),
    ("engine", 8, 4),
    ("_reserved", 12, 20),
    ("wait0_semaphore", 32, 8),
    ("wait0_mode", 40, 8),
    ("wait0_value", 48, 32),
    ("wait1_semaphore", 80, 8),
    ("wait1_mode", 88, 8),
    ("wait1_value", 96, 32),
    ("update_semaphore", 128, 8),
    ("update_mode", 136, 8),
    ("update_value", 144, 32),
)
"""Name, first bit and width of each header field."""


def _fit(value, width, where):
    value = int(value)
    if not 0 <= value < 1 << width:
        raise IsaError(f"{where} = {value} does not fit in {width} bits")
    return value


INSTRUCTIONS: dict[int, type["Instruction"]] = {}
"""Every instruction by opcode."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Base of all instructions; subclasses declare ``Operand`` and ``Field`` class attributes.

    Construct with keywords: the body's names, and optionally ``engine`` (for instructions that
    several queues take), ``waits`` (at most two) and ``update``.
    """

    engine: Engine
    waits: tuple[Wait, ...] = ()
    update: Update = field(default_factory=Update)
    values: dict = field(default_factory=dict)

    opcode = 0
    mnemonic = ""
    engines = ()
    operands = ()  # (name, Operand, first bit)
    scalars = ()  # (name, Field, first bit)

    def __init_subclass__(cls, *, opcode, engines):
        if opcode in INSTRUCTIONS:
            raise TypeError(f"opcode {opcode:#x} of {cls.__name__} is taken")
        if not cls.__doc__:
            raise TypeError(f"{cls.__name__} needs a docstring: it is its page of the manual")
        cls.opcode = opcode
        cls.mnemonic = cls.__name__.lower()
        cls.engines = tuple(engines)
        bit = BODY_BIT
        operands, scalars = [], []
        declared = [(k, v) for k, v in vars(cls).items() if isinstance(v, Operand | Field)]
        for name, item in declared:
            if isinstance(item, Operand):
                operands.append((name, item, bit))
                bit += AP_BITS
        for name, item in declared:
            if isinstance(item, Field):
                scalars.append((name, item, bit))
                bit += item.width
        if bit > WORD_BITS:
            raise TypeError(f"{cls.__name__} needs {bit} bits")
        cls.operands, cls.scalars = tuple(operands), tuple(scalars)
        INSTRUCTIONS[opcode] = cls

    def __init__(self, *, engine=None, waits=(), update=None, **values):
        cls = type(self)
        engine = cls.engines[0] if engine is None else Engine(engine)
        if engine not in cls.engines:
            names = ", ".join(e.name for e in cls.engines)
            raise IsaError(f"{cls.mnemonic} runs on {names}, not on {engine.name}")
        waits = tuple(waits)
        if len(waits) > 2:
            raise IsaError(f"{cls.mnemonic}: an instruction has two waits, not {len(waits)}")
        known = {name for name, _, _ in cls.operands + cls.scalars}
        unknown = set(values) - known
        if unknown:
            raise IsaError(f"{cls.mnemonic} has no field {', '.join(sorted(unknown))}")
        for name, _, _ in cls.operands:
            if not isinstance(values.get(name), AccessPattern):
                raise IsaError(f"{cls.mnemonic}.{name} must be an AccessPattern")
        for name, _, _ in cls.scalars:
            values.setdefault(name, 0)
        object.__setattr__(self, "engine", engine)
        object.__setattr__(self, "waits", waits)
        object.__setattr__(self, "update", Update() if update is None else update)
        object.__setattr__(self, "values", values)

    def __getattribute__(self, name):
        # Instance values shadow the class declarations of the same name.
        if not name.startswith("_"):
            values = object.__getattribute__(self, "values") if name != "values" else None
            if values is not None and name in values:
                return values[name]
        return object.__getattribute__(self, name)

    def replace(self, **changes):
        """A copy with other ``waits``, ``update`` or body values."""
        args = {"engine": self.engine, "waits": self.waits, "update": self.update, **self.values}
        return type(self)(**{**args, **changes})

    def encode(self):
        """The instruction as :data:`WORD_BYTES` bytes.

        Raises
        ------
        :exc:`IsaError`
            If a value does not fit its field.
        """
        waits = (*self.waits, Wait(), Wait())[:2]
        header = {"opcode": self.opcode, "engine": int(self.engine), "_reserved": 0}
        for i, wait in enumerate(waits):
            header[f"wait{i}_semaphore"] = wait.semaphore
            header[f"wait{i}_mode"] = int(wait.mode)
            header[f"wait{i}_value"] = wait.value
        header["update_semaphore"] = self.update.semaphore
        header["update_mode"] = int(self.update.mode)
        header["update_value"] = self.update.value
        word = 0
        for name, bit, width in HEADER:
            word |= _fit(header[name], width, f"{self.mnemonic}.{name}") << bit
        for name, _, bit in self.operands:
            word |= self.values[name].encode(f"{self.mnemonic}.{name}") << bit
        for name, item, bit in self.scalars:
            word |= _fit(self.values[name], item.width, f"{self.mnemonic}.{name}") << bit
        return word.to_bytes(WORD_BYTES, "little")

    @classmethod
    def used_mask(cls):
        """Integer with a one for every bit that a field claims."""
        mask = 0
        for name, bit, width in HEADER:
            if not name.startswith("_"):
                mask |= (1 << width) - 1 << bit
        for _, _, bit in cls.operands:
            for name, first, width in AccessPattern.LAYOUT:
                if not name.startswith("_"):
                    mask |= (1 << width) - 1 << (bit + first)
        for _, item, bit in cls.scalars:
            mask |= (1 << item.width) - 1 << bit
        return mask

    @classmethod
    def layout(cls):
        """The 1024-bit word as an Amaranth layout: header fields, operands, scalars by name."""
        members = {n: data.Field(w, b) for n, b, w in HEADER if not n.startswith("_")}
        for name, _, bit in cls.operands:
            members[name] = data.Field(AccessPattern.layout(), bit)
        for name, item, bit in cls.scalars:
            members[name] = data.Field(item.width, bit)
        return data.FlexibleLayout(WORD_BITS, members)

    def __str__(self):
        parts = [f"{name}={self.values[name]}" for name, _, _ in self.operands]
        flags = {item.pointer for _, item, _ in self.scalars}
        for name, item, _ in self.scalars:
            value = self.values[name]
            if item.pointer is not None and self.values[item.pointer]:
                parts.append(f"{name}=sbuf+{value:#x}")
            elif name not in flags:
                parts.append(f"{name}={item.values(value).name if item.values else hex(value)}")
        waits = "".join(f" {w}?" for w in self.waits if w.mode != WaitMode.NONE)
        update = f" {self.update}" if self.update.mode != UpdateMode.NONE else ""
        return f"{self.engine.name:4} {self.mnemonic} {' '.join(parts)}{waits}{update}".rstrip()

    def __eq__(self, other):
        return isinstance(other, Instruction) and self.encode() == other.encode()

    def __hash__(self):
        return hash(self.encode())


def decode(word):
    """The :class:`Instruction` encoded in 128 bytes.

    Raises
    ------
    :exc:`IsaError`
        If the opcode is unknown, the engine does not take it, a reserved bit is set or a field
        holds a code without meaning.
    """
    if len(word) != WORD_BYTES:
        raise IsaError(f"an instruction has {WORD_BYTES} bytes, not {len(word)}")
    value = int.from_bytes(word, "little")
    raw = {name: value >> bit & (1 << width) - 1 for name, bit, width in HEADER}
    cls = INSTRUCTIONS.get(raw["opcode"])
    if cls is None:
        raise IsaError(f"opcode {raw['opcode']:#x} is unknown")
    if value & ~cls.used_mask():
        raise IsaError(f"{cls.mnemonic}: reserved bits are set")
    try:
        engine = Engine(raw["engine"])
        waits = tuple(
            Wait(raw[f"wait{i}_semaphore"], WaitMode(raw[f"wait{i}_mode"]), raw[f"wait{i}_value"])
            for i in range(2)
        )
        update = Update(
            raw["update_semaphore"], UpdateMode(raw["update_mode"]), raw["update_value"]
        )
    except ValueError as error:
        raise IsaError(f"{cls.mnemonic}: {error}") from None
    while waits and waits[-1] == Wait():
        waits = waits[:-1]
    values = {}
    for name, _, bit in cls.operands:
        part = value >> bit & (1 << AP_BITS) - 1
        values[name] = AccessPattern.decode(part, f"{cls.mnemonic}.{name}")
    for name, item, bit in cls.scalars:
        code = value >> bit & (1 << item.width) - 1
        if item.values is not None and code not in item.values.__members__.values():
            raise IsaError(f"{cls.mnemonic}.{name} = {code} is not a {item.values.__name__}")
        values[name] = code
    return cls(engine=engine, waits=waits, update=update, **values)


# Instructions -------------------------------------------------------------------------------------


class EventSemaphore(Instruction, opcode=0x01, engines=tuple(Engine)):
    """Wait for up to two semaphores, then update one. Moves no data.

    Cost: 1 cycle after the waits hold.
    """


class LoadStationary(Instruction, opcode=0x10, engines=(Engine.PE,)):
    """Load a stationary tile ``[K partitions, M elements]`` into the array's shadow weights.

    Element ``m`` of partition ``k`` becomes the weight of row ``k``, column ``m``. Rows outside the
    partitions become void. The weights take effect with the next :class:`MatmulMoving`. Columns at
    and beyond ``M`` are left unspecified. A tile without elements or partitions loads nothing: the
    next matmul uses the weights that it would have used anyway.

    Memory: SBUF. Size: M <= array columns. Cost: M/4 cycles for contiguous elements that start at a
    multiple of four elements, hidden behind the matmul before it. Completes when the last element
    has been read.
    """

    src = Operand("Stationary tile.", (Space.SBUF,), formats.MATMUL_FORMATS, limit="cols")
    half = Field(2, "Part of a binary32 operand that is used.", values=Half)


class MatmulMoving(Instruction, opcode=0x11, engines=(Engine.PE,)):
    """Stream a moving tile ``[K partitions, N elements]`` through the array into PSUM.

    ``dst[m, n] (+)= sum over k of stationary[k, m] * moving[k, n]``, each sum by fused binary32
    multiply-adds from +0 in ascending ``k``; with ``accumulate`` one binary32 addition of the sum
    to the old value follows. Partitions outside the tile contribute nothing. A matmul without
    elements or partitions on either side writes nothing, and weights that wait in the shadow wait
    for the next one.

    Memory: moving SBUF, dst PSUM binary32, one bank, start partition 0. Size: N <= one PSUM bank;
    dst has N elements and M partitions. Cost: issue interval max(N, 6). Completes when the last sum
    has been written.
    """

    dst = Operand(
        "Sums.",
        (Space.PSUM,),
        (formats.FP32,),
        writes=True,
        limit="bank",
        one_bank=True,
        start_zero=True,
    )
    src = Operand("Moving tile.", (Space.SBUF,), formats.MATMUL_FORMATS, limit="bank")
    half = Field(2, "Part of a binary32 operand that is used.", values=Half)
    accumulate = Field(1, "Add to the old value instead of overwriting it.")


class TensorCopy(Instruction, opcode=0x20, engines=(Engine.DVE,)):
    """Copy ``src`` to ``dst`` element by element, converting the number format.

    Equal formats copy the bits. Otherwise the value goes through binary32 (integers beyond 24 bits
    round to it) and is rounded to nearest even; integers saturate and NaN becomes 0; ``saturate``
    clamps floating-point overflow instead of producing infinity or NaN. NaN keeps its sign and
    becomes the canonical NaN of the format.

    Memory: src SBUF or PSUM, dst SBUF. Size: any; both have the same elements and partitions, their
    start partitions may differ by whole quadrants. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", (Space.SBUF, Space.PSUM), formats.FORMATS)
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class Memset(Instruction, opcode=0x21, engines=(Engine.DVE,)):
    """Fill ``dst`` with one bit pattern.

    Memory: SBUF. Size: any. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    value = Field(32, "The element's bits, in dst's format.")


_CHIP = (Space.SBUF, Space.PSUM)


class TensorTensor(Instruction, opcode=0x22, engines=(Engine.DVE,)):
    """``dst = src0 op src1``, element by element.

    Elements are cast to binary32 as by :class:`TensorCopy`, and the result is cast to dst's format
    (from binary32 and to it, too: there a cast changes only NaNs). A bitwise operation takes and
    stores bits, without casts.

    Memory: sources SBUF or PSUM, not both PSUM; dst SBUF. Size: any; all have the same elements and
    partitions, start partitions may differ by whole quadrants. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src0 = Operand("First source.", _CHIP, formats.FORMATS)
    src1 = Operand("Second source.", _CHIP, formats.FORMATS)
    op = Field(5, "Operation.", values=AluOp)
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class TensorScalar(Instruction, opcode=0x23, engines=(Engine.DVE,)):
    """``dst = (src op0 scalar0) op1 scalar1``, element by element.

    A scalar is a binary32 number, or one such number per partition. ``reverse`` exchanges the two
    operands of its operation. Each operation rounds. Casts, bits and sizes as :class:`TensorTensor`
    (a bitwise operation takes all 32 bits of a scalar).

    Memory: src SBUF or PSUM, dst and scalars SBUF. Size: any. Cost: issue interval N elements,
    one more with scalars in SBUF.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", _CHIP, formats.FORMATS)
    op0 = Field(5, "First operation.", values=AluOp)
    op1 = Field(5, "Second operation.", values=AluOp)
    reverse0 = Field(1, "Compute ``scalar0 op0 src``.")
    reverse1 = Field(1, "Compute ``scalar1 op1 result``.")
    scalar0_pointer = Field(1, "``scalar0`` is an SBUF offset.")
    scalar1_pointer = Field(1, "``scalar1`` is an SBUF offset.")
    scalar0 = Field(32, "Bits of the number, or SBUF offset.", pointer="scalar0_pointer")
    scalar1 = Field(32, "Bits of the number, or SBUF offset.", pointer="scalar1_pointer")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class ScalarTensorTensor(Instruction, opcode=0x24, engines=(Engine.DVE,)):
    """``dst = (src0 op0 scalar0) op1 src1``, element by element.

    As :class:`TensorScalar` and :class:`TensorTensor` in one.

    Memory: sources SBUF or PSUM, not both PSUM; dst and scalar SBUF. Size: any. Cost: issue
    interval N elements, one more with the scalar in SBUF.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src0 = Operand("First source.", _CHIP, formats.FORMATS)
    src1 = Operand("Second source.", _CHIP, formats.FORMATS)
    op0 = Field(5, "First operation.", values=AluOp)
    op1 = Field(5, "Second operation.", values=AluOp)
    reverse0 = Field(1, "Compute ``scalar0 op0 src0``.")
    reverse1 = Field(1, "Compute ``src1 op1 result``.")
    scalar0_pointer = Field(1, "``scalar0`` is an SBUF offset.")
    scalar0 = Field(32, "Bits of the number, or SBUF offset.", pointer="scalar0_pointer")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class TensorReduce(Instruction, opcode=0x25, engines=(Engine.DVE,)):
    """Reduce the ``inner + 1`` innermost dimensions of ``src`` to one element of ``dst`` each.

    The elements of a row are numbered in order. Those of even number are combined one after the
    other, beginning with the operation's identity, and so are those of odd number; the result is
    ``even op odd`` (a row of one element: ``even``). ``negate`` inverts bit 31 of it, the sign,
    before it is cast or stored. Casts and bits as :class:`TensorTensor`.

    Memory: src SBUF or PSUM, dst SBUF. Size: any; dst has one element for each row of src and the
    same partitions. Cost: issue interval N elements of src.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", _CHIP, formats.FORMATS, reduced="inner")
    op = Field(5, "Operation.", values=ReduceOp)
    inner = Field(2, "One less than the number of dimensions that are reduced.")
    negate = Field(1, "Invert the sign of the result.")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class TensorTensorScan(Instruction, opcode=0x26, engines=(Engine.DVE,)):
    """``r[i] = (src0[i] op0 r[i - 1]) op1 src1[i]``, element after element; dst is all of ``r``.

    The number before the first element is ``initial``, a binary32 number, or one such number per
    partition. ``reverse`` exchanges the two operands of its operation. Each operation rounds; what
    goes on to the next element is binary32, whatever dst's format. Casts, bits and sizes as
    :class:`TensorTensor`.

    Memory: sources SBUF or PSUM, not both PSUM; dst and initial SBUF. Size: any. Cost: issue
    interval 8 N elements, for an element waits for both operations of the one before.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src0 = Operand("First source.", _CHIP, formats.FORMATS)
    src1 = Operand("Second source.", _CHIP, formats.FORMATS)
    op0 = Field(5, "First operation.", values=AluOp)
    op1 = Field(5, "Second operation.", values=AluOp)
    reverse0 = Field(1, "Compute ``r op0 src0``.")
    reverse1 = Field(1, "Compute ``src1 op1 result``.")
    initial_pointer = Field(1, "``initial`` is an SBUF offset.")
    initial = Field(32, "Bits of the number, or SBUF offset.", pointer="initial_pointer")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class CopyPredicated(Instruction, opcode=0x27, engines=(Engine.DVE,)):
    """Copy the elements of ``src`` whose ``predicate`` is not zero; leave those of dst elsewhere.

    ``reverse`` copies where it is zero instead. What is copied is cast as by :class:`TensorCopy`.

    Memory: sources SBUF or PSUM, not both PSUM; dst SBUF. Size: any; all have the same elements and
    partitions, start partitions may differ by whole quadrants. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", _CHIP, formats.FORMATS)
    predicate = Operand("What to copy.", _CHIP, formats.INTEGER_FORMATS)
    reverse = Field(1, "Copy where ``predicate`` is zero.")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


EIGHT = 8
"""Numbers per partition that :class:`Max8`, :class:`FindIndex8` and :class:`MatchReplace8` hold."""

EIGHT_LIMIT = 16384
"""Elements per partition that they look through, at most."""


class Max8(Instruction, opcode=0x29, engines=(Engine.DVE,)):
    """The eight greatest elements of each partition of ``src``, in descending order.

    Elements are cast to binary32 and ordered as IEEE 754's totalOrder has it: a positive NaN is
    greater than infinity, +0 greater than -0, a negative NaN less than all. Results are cast to
    dst's format. Of fewer than eight elements the rest of dst is NaN; of none nothing is written.

    Memory: src SBUF or PSUM, dst SBUF. Size: src at most 16,384 elements, dst eight; the same
    partitions, start partitions may differ by whole quadrants. Cost: issue interval N + 8 elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True, exactly=EIGHT)
    src = Operand("Source.", _CHIP, formats.FORMATS, limit=EIGHT_LIMIT)
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class FindIndex8(Instruction, opcode=0x2A, engines=(Engine.DVE,)):
    """Where in ``src`` eight values of each partition are: the index of the first equal element.

    Elements are numbered from 0 in their order. Both sides are cast to binary32; equal are equal
    bits, so that NaN and the sign of zero are found as :class:`Max8` gives them. An element answers
    one value only: of equal values the first gets the first such element, the second the second.
    The index of a value that is not found has all bits set.

    Memory: sources SBUF or PSUM, not both PSUM; dst SBUF. Size: src at most 16,384 elements, dst
    and values eight; the same partitions, start partitions may differ by whole quadrants. Cost:
    issue interval N + 16 elements.
    """

    dst = Operand(
        "Indices.", (Space.SBUF,), (formats.UINT16, formats.UINT32), writes=True, exactly=EIGHT
    )
    src = Operand("Source.", _CHIP, formats.FORMATS, limit=EIGHT_LIMIT)
    vals = Operand("Values.", _CHIP, formats.FORMATS, exactly=EIGHT)


class MatchReplace8(Instruction, opcode=0x2B, engines=(Engine.DVE,)):
    """Copy ``src``, with ``value`` in place of the first element equal to each of eight values.

    What is equal to what is the same as in :class:`FindIndex8`. All elements are cast to binary32
    and from there to dst's format.

    Memory: sources SBUF or PSUM, not both PSUM; dst SBUF. Size: dst and src the same, at most
    16,384 elements, values eight; the same partitions, start partitions may differ by whole
    quadrants. Cost: issue interval N + 8 elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", _CHIP, formats.FORMATS, limit=EIGHT_LIMIT)
    vals = Operand("Values.", _CHIP, formats.FORMATS, exactly=EIGHT)
    value = Field(32, "Bits of the binary32 number that replaces them.")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class Activation(Instruction, opcode=0x28, engines=(Engine.ACT,)):
    """``dst = function(src * scale + bias)``, element by element.

    The elements are cast to binary32, the argument is rounded once (fused), the value is cast to
    dst's format. ``scale`` and ``bias`` are binary32 numbers, or one such number per partition.

    Memory: src SBUF or PSUM, dst, scale and bias SBUF. Size: any; both have the same elements and
    partitions, start partitions may differ by whole quadrants. Cost: issue interval N elements, two
    more with scale or bias in SBUF, and the load of the function's table after another function.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", _CHIP, formats.FORMATS)
    function = Field(6, "Function.", values=Function)
    scale_pointer = Field(1, "``scale`` is an SBUF offset.")
    bias_pointer = Field(1, "``bias`` is an SBUF offset.")
    scale = Field(32, "Bits of the number, or SBUF offset.", pointer="scale_pointer")
    bias = Field(32, "Bits of the number, or SBUF offset.", pointer="bias_pointer")
    alpha = Field(32, "Bits of the slope of PRELU; 0 otherwise.")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class Iota(Instruction, opcode=0x38, engines=(Engine.POOL,)):
    """Fill ``dst`` with an affine function of the place, as int32.

    The element at indices ``i0``, ``i1``, ``i2``, ``i3`` of the dimensions of dst, in the ``p``-th
    of its partitions, becomes ``offset + channel_multiplier * p + step0 * i0 + ... + step3 * i3``
    modulo 2**32. It is cast from int32 to dst's format as by :class:`TensorCopy`; uint32 takes the
    bits.

    Memory: SBUF. Size: any. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    offset = Field(32, "Value of the first element of the first partition, int32.")
    channel_multiplier = Field(32, "Increment per partition, int32.")
    step0 = Field(32, "Increment along dst's innermost dimension, int32.")
    step1 = Field(32, "The same for the next one.")
    step2 = Field(32, "The same for the next one.")
    step3 = Field(32, "The same for the outermost one.")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class AffineSelect(Instruction, opcode=0x39, engines=(Engine.POOL,)):
    """``dst = src`` where an affine function of the place compares true with 0, else ``value``.

    The function is that of :class:`Iota`, by the dimensions of dst; it is compared as int32. What
    is kept is cast as by :class:`TensorCopy`; ``value`` is cast from binary32.

    Memory: SBUF. Size: any; both have the same elements and partitions, start partitions may differ
    by whole quadrants. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.FORMATS, writes=True)
    src = Operand("Source.", (Space.SBUF,), formats.FORMATS)
    offset = Field(32, "Value at the first element of the first partition, int32.")
    channel_multiplier = Field(32, "Increment per partition, int32.")
    step0 = Field(32, "Increment along dst's innermost dimension, int32.")
    step1 = Field(32, "The same for the next one.")
    step2 = Field(32, "The same for the next one.")
    step3 = Field(32, "The same for the outermost one.")
    compare = Field(5, "Comparison of the function with 0.", values=Compare)
    value = Field(32, "Bits of the binary32 number of the other elements.")
    saturate = Field(1, "Clamp floating-point overflow to the largest finite value.")


class IntegerTensorTensor(Instruction, opcode=0x3A, engines=(Engine.POOL,)):
    """``dst = src0 op src1``, element by element, in integers modulo 2**32.

    Elements are extended to 32 bits, by their sign if their format has one; dst stores the low
    bits. Operations are those of :class:`AluOp` on integers: exact, truth is 1 or 0. Comparisons,
    the greater and the smaller one take the 32 bits as int32, or as uint32 if src0's format has no
    sign (magnitudes are always compared as uint32). RIGHT_SHIFT copies the sign of int32.

    Memory: SBUF. Size: any; all have the same elements and partitions, start partitions may differ
    by whole quadrants. Cost: issue interval N elements.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.INTEGER_FORMATS, writes=True)
    src0 = Operand("First source.", (Space.SBUF,), formats.INTEGER_FORMATS)
    src1 = Operand("Second source.", (Space.SBUF,), formats.INTEGER_FORMATS)
    op = Field(5, "Operation.", values=AluOp)


class IntegerTensorScalar(Instruction, opcode=0x3B, engines=(Engine.POOL,)):
    """``dst = (src op0 scalar0) op1 scalar1``, element by element, in integers modulo 2**32.

    Operations as :class:`IntegerTensorTensor`. A scalar is a number of 32 bits, or one per
    partition. ``reverse`` exchanges the two operands of its operation.

    Memory: SBUF. Size: any. Cost: issue interval N elements, one more with scalars in SBUF.
    """

    dst = Operand("Destination.", (Space.SBUF,), formats.INTEGER_FORMATS, writes=True)
    src = Operand("Source.", (Space.SBUF,), formats.INTEGER_FORMATS)
    op0 = Field(5, "First operation.", values=AluOp)
    op1 = Field(5, "Second operation.", values=AluOp)
    reverse0 = Field(1, "Compute ``scalar0 op0 src``.")
    reverse1 = Field(1, "Compute ``scalar1 op1 result``.")
    scalar0_pointer = Field(1, "``scalar0`` is an SBUF offset.")
    scalar1_pointer = Field(1, "``scalar1`` is an SBUF offset.")
    scalar0 = Field(32, "The number, or SBUF offset.", pointer="scalar0_pointer")
    scalar1 = Field(32, "The number, or SBUF offset.", pointer="scalar1_pointer")


class Rng(Instruction, opcode=0x3C, engines=(Engine.POOL,)):
    """Fill ``dst`` with random bits: a hash of the place and of a seed, so that no state remains.

    The element at indices ``i0``, ``i1``, ``i2``, ``i3`` of the dimensions of dst, in the ``p``-th
    of its partitions, takes 32 bits from the place ``x = offset + channel_multiplier * p + step0 *
    i0 + ... + step3 * i3``, modulo 2**32::

        s = (seed ^ seed >> 17) * 0xED5AD4BB
        x ^= seed << 13 | seed >> 19
        x ^= x >> 17;  x *= 0xED5AD4BB;  x ^= s
        x ^= x >> 11;  x *= 0xAC4C1B51
        x ^= x >> 15;  x *= 0x31848BAB
        x ^= x >> 14

    Integers store the low bits. FP32 becomes ``(x >> 8) * 2**-24``, exact: uniform from 0 to 1, and
    never 1. Of one seed all 2**32 places have different words. ``seed`` is a number of 32 bits, or
    one per partition of dst.

    Memory: SBUF. Size: any. Cost: issue interval N elements, one more with the seed in SBUF.
    """

    dst = Operand(
        "Destination.", (Space.SBUF,), (*formats.INTEGER_FORMATS, formats.FP32), writes=True
    )
    offset = Field(32, "Place of the first element of the first partition.")
    channel_multiplier = Field(32, "Distance of partitions.")
    step0 = Field(32, "Distance along dst's innermost dimension.")
    step1 = Field(32, "The same for the next one.")
    step2 = Field(32, "The same for the next one.")
    step3 = Field(32, "The same for the outermost one.")
    seed_pointer = Field(1, "``seed`` is an SBUF offset.")
    seed = Field(32, "The seed, or SBUF offset.", pointer="seed_pointer")


class DmaStart(Instruction, opcode=0x30, engines=(Engine.SP, Engine.ACT, Engine.POOL)):
    """Hand descriptors to one queue of ``engines`` consecutive DMA engines, from ``first``.

    Engine ``first + i`` executes ``count`` descriptors from
    ``table + i * count * 128``. **Every** engine applies the update once its last descriptor is
    complete: a transfer over 4 engines that adds 1 ends at 4 more. A queue executes its descriptors
    in order; queues and engines are independent of each other.

    Checks: ``first + engines_used`` within the core and ``engines_used`` not 0, ``queue`` within an
    engine, ``table`` a multiple of 128 and ``table + engines_used * count * 128`` at most 2**40
    (all BAD_FIELD; the last two of ``table``). Cost: 1 cycle when the queues have room.
    """

    table = Field(AXI_ADDR_BITS, "HBM address of the first descriptor; multiple of 128.", "bytes")
    first = Field(8, "First DMA engine.")
    engines_used = Field(8, "Number of DMA engines, at least 1.")
    queue = Field(4, "Descriptor queue of each engine.")
    count = Field(16, "Descriptors per engine; 0 completes at once.", "descriptors")


# DMA descriptors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DescriptorSide:
    """Source or destination of a descriptor.

    ``address`` is a 48-bit global address (HBM or SBUF window). ``dims`` are up to four
    ``(step, count)``, innermost first, step in **bytes**, signed 32 bits; count 0..65535. In the
    SBUF window a step of ``sbuf_partition_stride`` moves to the next partition.
    """

    address: int
    dims: tuple[tuple[int, int], ...]

    @property
    def elements(self):
        """Elements moved."""
        n = 1
        for _, count in self.dims:
            n *= count
        return n

    def addresses(self, element_bytes):
        """Global address of the first byte of every element, innermost dimension fastest."""
        import numpy as np

        del element_bytes
        total = np.array([self.address], dtype=np.int64)
        for step, count in self.dims:
            index = np.arange(count, dtype=np.int64) * step
            total = (index[:, None] + total[None, :]).reshape(-1)
        return total


DESCRIPTOR_LAYOUT = (
    ("kind", 0, 8),
    ("size_log2", 8, 8),
    ("_reserved", 16, 48),
    ("src_address", 64, 64),
    ("dst_address", 128, 64),
    *((f"src_step{i}", 192 + 32 * i, 32) for i in range(4)),
    *((f"src_count{i}", 320 + 16 * i, 16) for i in range(4)),
    *((f"dst_step{i}", 384 + 32 * i, 32) for i in range(4)),
    *((f"dst_count{i}", 512 + 16 * i, 16) for i in range(4)),
)
"""Name, first bit and width of each field of a 1024-bit descriptor; bits from 576 are reserved."""

DESCRIPTOR_COPY = 0xD1
"""Value of ``kind``: strided copy."""


@dataclass(frozen=True)
class Descriptor:
    """One strided copy of elements of ``1 << size_log2`` bytes (1, 2 or 4).

    Both sides have the same number of elements (zero: a no-op that completes). Elements are taken
    in order; overlapping source and destination give unspecified bytes. In SBUF an element must
    not be split over partitions and its address must be a multiple of its size; in HBM any address
    will do. Consecutive bytes of HBM are moved in bursts that end at multiples of
    ``dma_burst_bytes``.
    """

    size_log2: int
    src: DescriptorSide
    dst: DescriptorSide

    def encode(self):
        """The descriptor as :data:`DESCRIPTOR_BYTES` bytes."""
        if self.size_log2 not in (0, 1, 2):
            raise IsaError(f"descriptor: size_log2 must be 0, 1 or 2, not {self.size_log2}")
        if self.src.elements != self.dst.elements:
            raise IsaError(
                f"descriptor: source has {self.src.elements} elements, "
                f"destination {self.dst.elements}"
            )
        values = {"kind": DESCRIPTOR_COPY, "size_log2": self.size_log2, "_reserved": 0}
        for side, part in (("src", self.src), ("dst", self.dst)):
            if len(part.dims) > 4:
                raise IsaError(f"descriptor.{side}: at most 4 dimensions, not {len(part.dims)}")
            values[f"{side}_address"] = part.address
            for i, (step, count) in enumerate((*part.dims, *((0, 1),) * (4 - len(part.dims)))):
                if not -(1 << 31) <= step < 1 << 31:
                    raise IsaError(f"descriptor.{side}_step{i} = {step} exceeds 32 signed bits")
                values[f"{side}_step{i}"] = step & 0xFFFFFFFF
                values[f"{side}_count{i}"] = count
        word = 0
        for name, bit, width in DESCRIPTOR_LAYOUT:
            word |= _fit(values[name], width, f"descriptor.{name}") << bit
        return word.to_bytes(DESCRIPTOR_BYTES, "little")

    @classmethod
    def decode(cls, raw):
        """The inverse of :meth:`encode`."""
        word = int.from_bytes(raw, "little")
        get = {name: word >> bit & (1 << width) - 1 for name, bit, width in DESCRIPTOR_LAYOUT}
        if get["kind"] != DESCRIPTOR_COPY or get["size_log2"] > 2:
            raise IsaError(f"descriptor: kind {get['kind']:#x}, size_log2 {get['size_log2']}")
        if get["_reserved"] or word >> 576:
            raise IsaError("descriptor: reserved bits are set")
        sides = []
        for side in ("src", "dst"):
            dims = []
            for i in range(4):
                step = get[f"{side}_step{i}"]
                dims.append((step - (1 << 32) if step >> 31 else step, get[f"{side}_count{i}"]))
            while len(dims) > 1 and dims[-1] == (0, 1):
                dims.pop()
            sides.append(DescriptorSide(get[f"{side}_address"], tuple(dims)))
        return cls(get["size_log2"], *sides)

    @staticmethod
    def layout():
        """The descriptor as an Amaranth layout."""
        from amaranth.hdl import signed

        return data.FlexibleLayout(
            8 * DESCRIPTOR_BYTES,
            {
                name: data.Field(signed(width) if "step" in name else width, bit)
                for name, bit, width in DESCRIPTOR_LAYOUT
                if not name.startswith("_")
            },
        )
