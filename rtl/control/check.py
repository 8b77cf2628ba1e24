"""The checker: decides whether an instruction word may be issued.

Sits between the store of prefetched words and the heads of the queues; one checker serves all
queues. Everything it enforces is taken from :mod:`..arch.isa`: opcodes, engines, claimed bits, enum
fields, and what each :class:`~..arch.isa.Operand` declares. Only the rules of
:class:`~..arch.isa.DmaStart`, which its docstring states in words, are repeated here.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..arch.formats import FORMATS
from ..arch.isa import (
    AP_BITS,
    BODY_BIT,
    DESCRIPTOR_BYTES,
    HEADER,
    INSTRUCTIONS,
    WORD_BITS,
    AccessPattern,
    DmaStart,
    Engine,
    ErrorCode,
    Space,
    UpdateMode,
    WaitMode,
)

__all__ = ["FRAME_CYCLES", "QUEUE_BITS", "CheckRequest", "Checker", "Verdict"]

QUEUE_BITS = max(len(Engine) - 1, 1).bit_length()
"""Width of a queue number inside the control block."""

MAX_OPERANDS = max(len(cls.operands) for cls in INSTRUCTIONS.values())

FRAME_CYCLES = max(MAX_OPERANDS, 2)
"""Cycles for which a word occupies the first stage of the checker: one per access pattern."""

_CHUNK_BITS = 64
_SCALAR_LOG2 = 2  # scalars in SBUF are binary32
_TABLE_BIT = next(bit for name, _, bit in DmaStart.scalars if name == "table")
_HEADER = {name: (bit, width) for name, bit, width in HEADER}
_PATTERN = {name: bit for name, bit, _ in AccessPattern.LAYOUT}
_FIELD_BITS = 10
_NO_ERROR = (1 << 4 + 2 + _FIELD_BITS) - 1


class CheckRequest(data.Struct):
    """A word to be checked (stream payload)."""

    queue: QUEUE_BITS
    word: WORD_BITS


class Verdict(data.Struct):
    """Result of a check (stream payload): code 0 is legal; else as :class:`~..interfaces.Error`."""

    queue: QUEUE_BITS
    code: 8
    field: 16


def _key(code, field, rank=0):
    """Order of errors as a number: by code, then by rank, then by first bit of the field."""
    return int(code) << 2 + _FIELD_BITS | rank << _FIELD_BITS | field


def _not_among(value, codes):
    """Whether ``value`` is none of the constants ``codes``."""
    codes = sorted(int(code) for code in codes)
    if codes == list(range(1 << len(value))):
        return Const(0)
    if codes == list(range(len(codes))):
        return value >= len(codes)
    return ~Cat(value == code for code in codes).any()


def _dma_start_rules(word, config):
    """``(condition, first bit)`` of each rule in the docstring of :class:`DmaStart`, except where
    its descriptors end."""
    bits = {name: bit for name, _, bit in DmaStart.scalars}
    field = {name: word[bit : bit + item.width] for name, item, bit in DmaStart.scalars}
    first, used, engines = field["first"], field["engines_used"], config.dma_engines
    misaligned = field["table"] & (DESCRIPTOR_BYTES - 1)
    return [
        (misaligned.any(), bits["table"]),
        (first >= engines, bits["first"]),
        ((used == 0) | (first + used > engines), bits["engines_used"]),
        (_not_among(field["queue"], range(config.dma_queues)), bits["queue"]),
    ]


def _dma_table(word):
    """First descriptor of a :class:`DmaStart`, in descriptors, and how many there are in all."""
    field = {name: word[bit : bit + item.width] for name, item, bit in DmaStart.scalars}
    return (
        field["table"][(DESCRIPTOR_BYTES - 1).bit_length() :],
        field["engines_used"] * field["count"],
    )


class _Fixed(wiring.Component):
    """Checks of everything but the access patterns, in three stages.

    Members
    -------
    queue, word : inputs
    chosen : :py:`In(len(INSTRUCTIONS))`
        One-hot by opcode, in the order of ``INSTRUCTIONS``.
    key : output
        Order number of the first error; three cycles after ``word``.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "queue": In(QUEUE_BITS),
                "word": In(WORD_BITS),
                "chosen": In(len(INSTRUCTIONS)),
                "key": Out(len(Const(_NO_ERROR))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, word = self.config, self.word
        classes = list(INSTRUCTIONS.values())

        def header(name):
            bit, width = _HEADER[name]
            return word[bit : bit + width]

        # Stage 1: one flag for each thing that can be wrong.
        on_this_queue = Cat(
            self.chosen[i] & Cat(self.queue == engine for engine in cls.engines).any()
            for i, cls in enumerate(classes)
        ).any()
        illegal = Signal()
        m.d.sync += illegal.eq(~on_this_queue | (header("engine") != self.queue))

        reserved = Signal(WORD_BITS // _CHUNK_BITS)
        masks = [cls.used_mask() for cls in classes]
        for c in range(len(reserved)):
            chunk = word.word_select(c, _CHUNK_BITS)
            flags = []
            for i, mask in enumerate(masks):
                free = ~(mask >> c * _CHUNK_BITS) & (1 << _CHUNK_BITS) - 1
                flags.append(self.chosen[i] & (chunk & free).any())
            m.d.sync += reserved[c].eq(Cat(flags).any())

        rules = []  # (first bit, condition)
        for name, modes in (("wait0", WaitMode), ("wait1", WaitMode), ("update", UpdateMode)):
            mode, semaphore = header(f"{name}_mode"), header(f"{name}_semaphore")
            unknown = (semaphore >= config.semaphores) & mode.any()
            rules.append((_HEADER[f"{name}_semaphore"][0], unknown))
            rules.append((_HEADER[f"{name}_mode"][0], _not_among(mode, modes)))
        for i, cls in enumerate(classes):
            fields = {name: word[bit : bit + item.width] for name, item, bit in cls.scalars}
            for name, item, bit in cls.scalars:
                if item.values is not None:
                    wrong = _not_among(fields[name], item.values)
                    rules.append((bit, self.chosen[i] & wrong))
                if item.pointer is not None:
                    value = fields[name]
                    outside = value[:_SCALAR_LOG2].any() | (
                        value[_SCALAR_LOG2:] >= config.sbuf_bytes >> _SCALAR_LOG2
                    )
                    rules.append((bit, self.chosen[i] & fields[item.pointer] & outside))
            spaces = [bit + _PATTERN["space"] for _, item, bit in cls.operands if not item.writes]
            if len(spaces) > 1:
                in_psum = (word[bit : bit + 8] == Space.PSUM for bit in spaces)
                rules.append((spaces[-1], self.chosen[i] & Cat(in_psum).all()))
            if cls is DmaStart:
                for condition, bit in _dma_start_rules(word, config):
                    rules.append((bit, self.chosen[i] & condition))
        rules.sort(key=lambda rule: rule[0])
        bad = Signal(len(rules))
        m.d.sync += bad.eq(Cat(condition for _, condition in rules))
        table, descriptors = _dma_table(word)
        starts_dma = Signal()
        first, total = Signal(len(table)), Signal(len(descriptors))
        m.d.sync += [
            starts_dma.eq(self.chosen[classes.index(DmaStart)]),
            first.eq(table),
            total.eq(descriptors),
        ]

        # Stage 2: where the descriptors of a DmaStart end.
        illegal_2, reserved_2, bad_2 = Signal(), Signal(), Signal(len(rules))
        m.d.sync += [illegal_2.eq(illegal), reserved_2.eq(reserved.any()), bad_2.eq(bad)]
        (of_table,) = (i for i, (bit, _) in enumerate(rules) if bit == _TABLE_BIT)
        with m.If(starts_dma & (first + total > 1 << len(table))):
            m.d.sync += bad_2[of_table].eq(1)

        # Stage 3: the first of them.
        with m.If(illegal_2):
            m.d.sync += self.key.eq(_key(ErrorCode.ILLEGAL_OPCODE, 0))
        with m.Elif(reserved_2):
            m.d.sync += self.key.eq(_key(ErrorCode.RESERVED_BITS, 0))
        for i, (bit, _) in enumerate(rules):
            with m.Elif(bad_2[i]):
                m.d.sync += self.key.eq(_key(ErrorCode.BAD_FIELD, bit))
        with m.Else():
            m.d.sync += self.key.eq(_NO_ERROR)
        return m


def _rules_layout(config):
    """What an :class:`Operand` declares, as hardware reads it."""
    return data.StructLayout(
        {
            "present": 1,
            "formats": 1 << _format_bits(),
            "spaces": len(Space),
            "limited": 1,
            "exact": 1,
            "alone": 1,
            "limit": max(config.cols, config.psum_bank_words, *_limits()).bit_length(),
            "one_bank": 1,
            "start_zero": 1,
            "same_partitions": 1,
        }
    )


def _limits():
    """Numbers of elements that operands declare as such."""
    operands = [operand for cls in INSTRUCTIONS.values() for _, operand, _ in cls.operands]
    found = {operand.limit for operand in operands} | {operand.exactly for operand in operands}
    return sorted(limit for limit in found if isinstance(limit, int))


def _format_bits():
    return max(fmt.code for fmt in FORMATS).bit_length()


def _rules_of(cls, index, config):
    """The rules of operand ``index`` of ``cls`` as a constant of :func:`_rules_layout`."""
    if index >= len(cls.operands):
        return None
    _, operand, _ = cls.operands[index]
    limits = {None: 0, "cols": config.cols, "bank": config.psum_bank_words}
    limit = limits.get(operand.limit, operand.limit)
    return {
        "present": 1,
        "formats": sum(1 << fmt.code for fmt in operand.formats),
        "spaces": sum(1 << space for space in operand.spaces),
        "limited": operand.limit is not None,
        "exact": operand.exactly is not None,
        # Not compared with the first operand.
        "alone": operand.exactly is not None or cls.operands[0][1].exactly is not None,
        "limit": limit if operand.exactly is None else operand.exactly,
        "one_bank": operand.one_bank,
        "start_zero": operand.start_zero,
        # In the tensor engine the partitions of a result are columns, those of a source are rows.
        "same_partitions": index > 0 and Engine.PE not in cls.engines,
    }


def _reduced_of(cls, index, word):
    """The field of ``word`` that operand ``index`` of ``cls`` names as ``reduced``, or ``None``."""
    name = cls.operands[index][1].reduced
    found = [word[bit : bit + item.width] for n, item, bit in cls.scalars if n == name]
    return found[0] if found else None


class _Operand(wiring.Component):
    """Checks of one access pattern per cycle, in five stages.

    Members
    -------
    pattern, rules, reduced, base, first : inputs
        The pattern's bits, what its operand declares, how many of its innermost dimensions do not
        count in comparisons, its first bit in the word, and whether it is the first of its
        instruction (to which the others are compared).
    key : output
        Order number of its first error; five cycles after the inputs.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "pattern": In(AccessPattern.layout()),
                "rules": In(_rules_layout(config)),
                "reduced": In(3),
                "base": In(_FIELD_BITS),
                "first": In(1),
                "key": Out(len(Const(_NO_ERROR))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        top_bytes = max(config.sbuf_bytes, config.psum_bytes)

        def follow(name, value, stages):
            """``value`` after 1, 2, ... ``stages`` registers."""
            out = []
            for i in range(stages):
                register = Signal(value.shape(), name=f"{name}_{i + 2}", reset_less=True)
                m.d.sync += register.eq(value)
                out.append(register)
                value = register
            return out

        # Stage 1: the pattern as it is.
        ap = Signal(AccessPattern.layout())
        rules = Signal(_rules_layout(config))
        reduced = Signal(3)
        base = Signal(_FIELD_BITS)
        first = Signal()
        m.d.sync += [
            ap.eq(self.pattern), rules.eq(self.rules), reduced.eq(self.reduced),
            base.eq(self.base), first.eq(self.first),
        ]  # fmt: skip
        counts = [ap[f"count{i}"] for i in range(4)]
        steps = [ap[f"step{i}"] for i in range(4)]

        # Stage 2: reach of each dimension; the simple fields.
        reach = [Signal(signed(32), name=f"reach{i}") for i in range(4)]
        low_count, high_count = Signal(32), Signal(32)
        empty = Signal()
        for i in range(4):
            m.d.sync += reach[i].eq(steps[i] * (counts[i] - 1)[:16])
        counted = [Mux(reduced > i, 1, count) for i, count in enumerate(counts)]
        m.d.sync += [
            low_count.eq(counted[0] * counted[1]),
            high_count.eq(counted[2] * counted[3]),
            empty.eq(Cat(ap.num_partitions == 0, *(count == 0 for count in counts)).any()),
        ]

        size_log2 = Signal(2)
        in_psum = Signal()
        with m.Switch(ap.dtype):
            for log2 in (1, 2):
                with m.Case(*(fmt.code for fmt in FORMATS if fmt.bytes == 1 << log2)):
                    m.d.sync += size_log2.eq(log2)
            with m.Default():
                m.d.sync += size_log2.eq(0)
        m.d.sync += in_psum.eq(ap.space == Space.PSUM)
        words = Cat(ap.dtype == fmt.code for fmt in FORMATS if fmt.bytes == 4).any()
        known = ~ap.dtype[_format_bits() :].any() & rules.formats.bit_select(
            ap.dtype[: _format_bits()], 1
        )
        bad_dtype, bad_space = Signal(), Signal()
        m.d.sync += [
            # PSUM holds words of four bytes.
            bad_dtype.eq(~known | (ap.space == Space.PSUM) & ~words),
            bad_space.eq(~Cat((ap.space == space) & rules.spaces[space] for space in Space).any()),
        ]
        start, count = ap.start_partition, ap.num_partitions
        bad_partition = Signal()
        m.d.sync += bad_partition.eq(
            count.any()
            & (
                (start + count > config.partitions)
                | (start & (config.quadrant - 1)).any()
                | (count > config.quadrant) & (start & (2 * config.quadrant - 1)).any()
                | (count > 2 * config.quadrant) & start.any()
                | rules.start_zero & start.any()
            )
        )
        offset, num_partitions = Signal(32), Signal(16)
        m.d.sync += [offset.eq(ap.offset), num_partitions.eq(count)]

        # Stage 3: lowest and highest element, in elements; number of elements.
        low, high = Signal(signed(35)), Signal(signed(35))
        m.d.sync += [
            low.eq(sum(Mux(r < 0, r, 0) for r in reach)),
            high.eq(sum(Mux(r < 0, 0, r) for r in reach)),
        ]
        elements = Signal(64)
        m.d.sync += elements.eq(low_count * high_count)
        partitions_3 = follow("partitions", num_partitions, 1)[-1]
        offset_3 = follow("offset", offset, 1)[-1]
        size_3 = follow("size", size_log2, 1)[-1]
        rules_2, rules_3, rules_4 = follow("rules", rules.as_value(), 3)
        rules_3, rules_4 = (data.View(rules.shape(), r) for r in (rules_3, rules_4))
        first_3 = follow("first", first, 2)[-1]
        del rules_2

        # Stage 4: lowest and highest byte; comparison with the first operand.
        low_byte, high_byte = Signal(signed(40)), Signal(signed(40))
        misaligned = Signal()
        m.d.sync += [
            low_byte.eq(offset_3 + (low << size_3)),
            high_byte.eq(offset_3 + (high << size_3) + ((1 << size_3) - 1)),
            misaligned.eq((offset_3 & ((1 << size_3) - 1)).any()),
        ]
        first_elements, first_partitions = Signal(64), Signal(16)
        with m.If(first_3):
            m.d.sync += [first_elements.eq(elements), first_partitions.eq(partitions_3)]
        over, other_elements, other_partitions = Signal(), Signal(), Signal()
        m.d.sync += [
            over.eq(
                rules_3.limited & (elements > rules_3.limit)
                | rules_3.exact & (elements != rules_3.limit)
            ),
            other_elements.eq(~first_3 & ~rules_3.alone & (elements != first_elements)),
            other_partitions.eq(rules_3.same_partitions & (partitions_3 != first_partitions)),
        ]
        empty_4 = follow("empty", empty, 2)[-1]
        psum_4 = follow("psum", in_psum, 2)[-1]
        simple = Signal(3)
        m.d.comb += simple.eq(Cat(bad_dtype, bad_space, bad_partition))
        simple_4 = follow("simple", simple, 2)[-1]
        base_4 = follow("base", base, 3)[-1]

        # Stage 5: the first error.
        bank_log2 = config.psum_bank_bytes.bit_length() - 1
        space_bytes = Signal(range(top_bytes + 1))
        m.d.comb += space_bytes.eq(Mux(psum_4, config.psum_bytes, config.sbuf_bytes))
        outside = ~empty_4 & (
            (low_byte < 0)
            | (high_byte >= space_bytes)
            | misaligned
            | rules_4.one_bank & psum_4 & ((low_byte ^ high_byte) >> bank_log2).any()
        )
        dst, count0 = BODY_BIT, _PATTERN["count0"]

        def at(code, member):
            """Order number of an error in ``member`` of this operand."""
            return _key(code, 0) + base_4 + _PATTERN[member]

        with m.If(~rules_4.present):
            m.d.sync += self.key.eq(_NO_ERROR)
        with m.Elif(simple_4[0]):
            m.d.sync += self.key.eq(at(ErrorCode.BAD_FIELD, "dtype"))
        with m.Elif(simple_4[1]):
            m.d.sync += self.key.eq(at(ErrorCode.BAD_FIELD, "space"))
        with m.Elif(simple_4[2]):
            m.d.sync += self.key.eq(at(ErrorCode.BAD_PARTITION, "start_partition"))
        with m.Elif(outside):
            m.d.sync += self.key.eq(at(ErrorCode.OUT_OF_RANGE, "offset"))
        with m.Elif(over):
            m.d.sync += self.key.eq(at(ErrorCode.SIZE_MISMATCH, "count0"))
        with m.Elif(other_elements):
            m.d.sync += self.key.eq(_key(ErrorCode.SIZE_MISMATCH, dst + count0, rank=1))
        with m.Elif(other_partitions):
            m.d.sync += self.key.eq(
                _key(ErrorCode.SIZE_MISMATCH, dst + _PATTERN["num_partitions"], rank=2)
            )
        with m.Else():
            m.d.sync += self.key.eq(_NO_ERROR)
        return m


class Checker(wiring.Component):
    """Check instruction words.

    The first error is the one with the lowest code; among equal codes the one whose field comes
    first in the word. The order is that of :class:`~..arch.isa.ErrorCode`:

    ==============  ================================================================================
    code            ``field``
    ==============  ================================================================================
    ILLEGAL_OPCODE  0: unknown, not for this queue, or engine field of another queue
    RESERVED_BITS   0
    BAD_FIELD       the field. A semaphore number is checked only if its mode is not NONE, a pointer
                    only if its flag is set; an operand in PSUM must have a format of four bytes
                    (field: dtype); of two sources one may lie in PSUM (field: space of the second)
    BAD_PARTITION   ``start_partition``. Nothing is checked if there are no partitions
    OUT_OF_RANGE    ``offset``. Nothing is checked if there are no elements or no partitions
    SIZE_MISMATCH   over the limit, or not as many as it must be: ``count0`` of that operand; then
                    elements that differ from those of the first operand: ``count0`` of the first,
                    for any of the others (what a reduction reduces is left out, and operands whose
                    number is given); then partitions that differ (not in the tensor engine):
                    ``num_partitions`` of the first
    ==============  ================================================================================

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(stream.Signature(CheckRequest, always_ready=True))`
        Words, at least :data:`FRAME_CYCLES` apart.
    o : :py:`Out(stream.Signature(Verdict, always_ready=True))`
        Verdicts in the same order.

    Timing
    ------
    One word every :data:`FRAME_CYCLES` cycles (one access pattern per cycle); the verdict comes
    ``FRAME_CYCLES + 6`` cycles after the word.

    Cost
    ----
    Ten 16 x 16 multipliers: four for the reach of the dimensions, six for the number of elements
    that are compared; one of 8 x 16 for the number of descriptors. A comparison of 30 bits for each
    pointer of each instruction.
    """

    LATENCY_CYCLES = FRAME_CYCLES + 6

    i: stream.Interface
    o: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(CheckRequest, always_ready=True)),
                "o": Out(stream.Signature(Verdict, always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        classes = list(INSTRUCTIONS.values())
        m.submodules.fixed = fixed = _Fixed(config=config)
        m.submodules.operand = operand = _Operand(config=config)

        # The word stays for one phase per operand.
        word = Signal(WORD_BITS)
        queue = Signal(QUEUE_BITS)
        phase = Signal(range(FRAME_CYCLES))
        active = Signal()
        with m.If(self.i.valid):
            m.d.sync += [
                word.eq(self.i.payload.word),
                queue.eq(self.i.payload.queue),
                phase.eq(0),
                active.eq(1),
            ]
        with m.Elif(phase == FRAME_CYCLES - 1):
            m.d.sync += active.eq(0)
        with m.Else():
            m.d.sync += phase.eq(phase + 1)
        first = Signal()
        last = Signal()
        m.d.comb += [
            first.eq(active & (phase == 0)),
            last.eq(active & (phase == FRAME_CYCLES - 1)),
        ]

        chosen = Signal(len(classes))
        opcode_bit, opcode_width = _HEADER["opcode"]
        opcode = word[opcode_bit : opcode_bit + opcode_width]
        m.d.comb += [
            chosen.eq(Cat(opcode == cls.opcode for cls in classes)),
            fixed.word.eq(word),
            fixed.queue.eq(queue),
            fixed.chosen.eq(chosen),
            operand.first.eq(first),
        ]
        with m.Switch(phase):
            for k in range(MAX_OPERANDS):
                bit = BODY_BIT + k * AP_BITS
                with m.Case(k):
                    m.d.comb += [
                        operand.pattern.eq(word[bit : bit + AP_BITS]),
                        operand.base.eq(bit),
                    ]
                    for i, cls in enumerate(classes):
                        rules = _rules_of(cls, k, config)
                        if rules is not None:
                            with m.If(chosen[i]):
                                m.d.comb += operand.rules.eq(Const(rules, _rules_layout(config)))
                                if (inner := _reduced_of(cls, k, word)) is not None:
                                    m.d.comb += operand.reduced.eq(inner + 1)

        def after(name, value, cycles):
            for i in range(cycles):
                register = Signal(value.shape(), name=f"{name}_{i + 1}")
                m.d.sync += register.eq(value)
                value = register
            return value

        # Stage 6: the smallest order number of the fixed part and of all operands.
        first_5 = after("first", first, 5)
        last_5 = after("last", last, 5)
        queue_5 = after("queue", queue, 5)
        fixed_5 = after("fixed", fixed.key, 2)
        best = Signal(unsigned(len(fixed.key)))
        so_far = Signal.like(best)
        now = Signal.like(best)
        m.d.comb += [
            so_far.eq(Mux(first_5, fixed_5, best)),
            now.eq(Mux(operand.key < so_far, operand.key, so_far)),
        ]
        m.d.sync += [
            best.eq(now),
            self.o.valid.eq(last_5),
            self.o.payload.queue.eq(queue_5),
            self.o.payload.code.eq(Mux(now == _NO_ERROR, ErrorCode.NONE, now[2 + _FIELD_BITS :])),
            self.o.payload.field.eq(Mux(now == _NO_ERROR, 0, now[:_FIELD_BITS])),
        ]
        return m


assert MAX_OPERANDS <= 4, "the checker must take an instruction every four cycles"
