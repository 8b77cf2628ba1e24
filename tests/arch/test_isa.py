"""The instruction set: round trips, frozen words, errors that teach."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makalu.rtl.arch import formats, isa
from makalu.rtl.arch.isa import (
    INSTRUCTIONS,
    AccessPattern,
    Descriptor,
    DescriptorSide,
    Engine,
    IsaError,
    Space,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
    decode,
)

UINT = {n: st.integers(0, (1 << n) - 1) for n in range(1, 65)}


def _shortest(dims):
    """``dims`` as decoding gives them: without dimensions at the end that do nothing."""
    while len(dims) > 1 and dims[-1] == (0, 1):
        dims = dims[:-1]
    return tuple(dims)


def patterns(operand):
    return st.builds(
        AccessPattern,
        dtype=st.sampled_from(operand.formats),
        start_partition=UINT[16],
        num_partitions=UINT[16],
        offset=UINT[32],
        dims=st.lists(
            st.tuples(st.integers(-(1 << 15), (1 << 15) - 1), UINT[16]), min_size=4, max_size=4
        ).map(_shortest),
        space=st.sampled_from(operand.spaces),
    )


@st.composite
def instructions(draw, cls):
    values = {name: draw(patterns(operand)) for name, operand, _ in cls.operands}
    for name, field, _ in cls.scalars:
        values[name] = draw(
            st.sampled_from(list(field.values)) if field.values else UINT[field.width]
        )
    waits = st.builds(Wait, UINT[8], st.sampled_from([WaitMode.GE, WaitMode.EQ]), UINT[32])
    return cls(
        engine=draw(st.sampled_from(cls.engines)),
        waits=draw(st.lists(waits, max_size=2)),
        update=draw(st.builds(Update, UINT[8], st.sampled_from(UpdateMode), UINT[32])),
        **values,
    )


@pytest.mark.parametrize("cls", INSTRUCTIONS.values(), ids=lambda c: c.mnemonic)
def test_every_instruction_round_trips(cls):
    @given(instructions(cls))
    def check(instruction):
        again = decode(instruction.encode())
        assert again == instruction
        assert type(again) is cls
        assert again.engine == instruction.engine
        assert str(again) == str(instruction.replace())

    check()


@pytest.mark.parametrize("cls", INSTRUCTIONS.values(), ids=lambda c: c.mnemonic)
def test_hardware_layout_reads_the_encoded_fields(cls):
    from amaranth.hdl import Const

    @given(instructions(cls))
    def check(instruction):
        word = int.from_bytes(instruction.encode(), "little")
        layout = cls.layout()
        for name, _, _ in cls.operands:
            bit = layout[name].offset
            part = AccessPattern.layout()
            pattern = getattr(instruction, name)
            for field in ("offset", "num_partitions"):
                at = bit + part[field].offset
                assert word >> at & (1 << part[field].width) - 1 == getattr(pattern, field)
        for name, field, _ in cls.scalars:
            assert word >> layout[name].offset & (1 << field.width) - 1 == getattr(
                instruction, name
            )
        assert layout.size == len(Const(0, isa.WORD_BITS))

    check()


def test_words_are_frozen():
    """Changing one of these is an ABI change: bump the program file's version with it."""
    event = isa.EventSemaphore(
        engine=Engine.SP,
        waits=(Wait(1, WaitMode.GE, 2), Wait(3, WaitMode.EQ, 4)),
        update=Update(5, UpdateMode.SET, 6),
    ).encode()
    assert event[:22].hex() == "01040000010102000000030204000000050206000000"
    assert event[22:].hex() == "00" * 106
    load = isa.LoadStationary(src=AccessPattern(formats.BF16, 0, 16, 0x20, ((1, 16),))).encode()
    assert load[0:2].hex() == "1000"
    assert load[32:60].hex() == (
        "0300"
        "0000"
        "1000"
        "0000"
        "20000000"  # dtype, space, start, partitions, reserved, offset
        "0100"
        "1000"
        "0000"
        "0100"
        "0000"
        "0100"
        "0000"
        "0100"  # four (step, count)
    )
    assert load[60:].hex() == "00" * 68
    matmul = isa.MatmulMoving(
        dst=AccessPattern(formats.FP32, 0, 16, 0x200, ((1, 128),), Space.PSUM),
        src=AccessPattern(formats.BF16, 0, 16, 0x40, ((1, 128),)),
        accumulate=1,
    ).encode()
    assert matmul[0:2].hex() == "1100"
    assert matmul[32:36].hex() == "01010000"
    assert matmul[40:44].hex() == "00020000"
    assert matmul[60:64].hex() == "03000000"
    assert matmul[88] == 0b100  # half, then accumulate
    copy = isa.TensorCopy(
        dst=AccessPattern(formats.FP16, 4, 4, 2, ((-1, 8),)),
        src=AccessPattern(formats.FP32, 0, 4, 0, ((1, 8),), Space.PSUM),
        saturate=1,
    ).encode()
    assert copy[0:2].hex() == "2002"
    assert copy[44:48].hex() == "ffff0800"
    assert copy[88] == 1
    fill = isa.Memset(dst=AccessPattern(formats.INT8, 0, 1, 0, ((1, 1),)), value=0x80).encode()
    assert fill[0:2].hex() == "2102"
    assert fill[60:64].hex() == "80000000"
    sbuf, psum = (AccessPattern(formats.FP32, 0, 4, 0, ((1, 8),), space) for space in Space)
    both = isa.TensorTensor(dst=sbuf, src0=sbuf, src1=psum, op=isa.AluOp.LESS, saturate=1).encode()
    assert both[0:2].hex() == "2202"
    assert both[88:92].hex() == "01010000"
    assert both[116:].hex() == "2d" + "00" * 11  # op, saturate
    scalars = {"scalar0": 0x3F800000, "scalar1": 0x40, "scalar1_pointer": 1}
    scalar = isa.TensorScalar(
        dst=sbuf, src=sbuf, op0=isa.AluOp.ADD, op1=isa.AluOp.RIGHT_SHIFT, reverse0=1, **scalars
    ).encode()
    assert scalar[0:2].hex() == "2302"
    word = 1 | 22 << 5 | 1 << 10 | 1 << 13 | 0x3F800000 << 14 | 0x40 << 46
    assert scalar[88:] == word.to_bytes(40, "little")
    three = isa.ScalarTensorTensor(
        dst=sbuf, src0=sbuf, src1=sbuf, op0=isa.AluOp.MULTIPLY, op1=isa.AluOp.MAX, reverse1=1,
        scalar0=0x80, scalar0_pointer=1, saturate=1,
    ).encode()  # fmt: skip
    assert three[0:2].hex() == "2402"
    word = 3 | 4 << 5 | 1 << 11 | 1 << 12 | 0x80 << 13 | 1 << 45
    assert three[116:] == word.to_bytes(12, "little")
    reduce = isa.TensorReduce(dst=sbuf, src=sbuf, op=isa.ReduceOp.MAX, inner=2, negate=1).encode()
    assert reduce[0:2].hex() == "2502"
    assert reduce[88:].hex() == "c400" + "00" * 38
    activation = isa.Activation(
        dst=sbuf, src=psum, function=isa.Function.GELU, bias=0x20, bias_pointer=1,
        scale=0x3F800000, alpha=0x80000000,
    ).encode()  # fmt: skip
    assert activation[0:2].hex() == "2801"
    word = 15 | 1 << 7 | 0x3F800000 << 8 | 0x20 << 40 | 0x80000000 << 72
    assert activation[88:] == word.to_bytes(40, "little")
    function = {"offset": 0xFFFFFFFE, "channel_multiplier": 3, "step0": 1, "step3": 0x80000000}
    iota = isa.Iota(dst=sbuf, saturate=1, **function).encode()
    assert iota[0:2].hex() == "3803"
    places = "feffffff0300000001000000000000000000000000000080"
    assert iota[60:].hex() == places + "01" + "00" * 43
    select = isa.AffineSelect(
        dst=sbuf, src=sbuf, compare=isa.Compare.LESS, value=0x3F800000, saturate=1, **function
    ).encode()
    assert select[0:2].hex() == "3903"
    assert select[88:112].hex() == places
    assert select[112:] == (13 | 0x3F800000 << 5 | 1 << 37).to_bytes(16, "little")
    whole = AccessPattern(formats.INT16, 0, 4, 0, ((1, 8),))
    both = isa.IntegerTensorTensor(dst=whole, src0=whole, src1=whole, op=isa.AluOp.LESS).encode()
    assert both[0:2].hex() == "3a03"
    assert both[116:].hex() == "0d" + "00" * 11
    scalar = isa.IntegerTensorScalar(
        dst=whole, src=whole, op0=isa.AluOp.ADD, op1=isa.AluOp.RIGHT_SHIFT, reverse0=1, **scalars
    ).encode()
    assert scalar[0:2].hex() == "3b03"
    word = 1 | 22 << 5 | 1 << 10 | 1 << 13 | 0x3F800000 << 14 | 0x40 << 46
    assert scalar[88:] == word.to_bytes(40, "little")
    random = isa.Rng(dst=whole, seed=0x40, seed_pointer=1, **function).encode()
    assert random[0:2].hex() == "3c03"
    assert random[60:84].hex() == places
    assert random[84:] == (1 | 0x40 << 1).to_bytes(44, "little")
    dma = isa.DmaStart(table=0x1280, first=1, engines_used=2, queue=3, count=4).encode()
    assert dma[0:2].hex() == "3004"
    assert dma[32:42].hex() == "80120000000102430000"


def test_codes_are_frozen():
    names = "BYPASS ADD SUBTRACT MULTIPLY MAX MIN ABS_MAX ABS_MIN EQUAL NOT_EQUAL GREATER_EQUAL "
    names += "GREATER LESS_EQUAL LESS LOGICAL_AND LOGICAL_OR LOGICAL_XOR BITWISE_AND BITWISE_OR "
    names += "BITWISE_XOR BITWISE_NOT LEFT_SHIFT RIGHT_SHIFT"
    assert [op.name for op in isa.AluOp] == names.split()
    assert list(isa.AluOp) == list(range(23))
    assert [int(op) for op in isa.ReduceOp] == [1, 4, 5, 6, 7, 14, 15, 16, 17, 18, 19]
    assert [int(f) for f in isa.Function] == [*range(6), *range(8, 28)]


def test_descriptor_round_trips_and_is_frozen():
    d = Descriptor(
        1,
        DescriptorSide(0x1000, ((2, 8), (-64, 3))),
        DescriptorSide(0x100_0000_0000, ((0x800, 4), (2, 6))),
    )
    raw = d.encode()
    assert Descriptor.decode(raw) == d
    assert raw[0:2].hex() == "d101"
    assert raw[8:24].hex() == "00100000000000000000000000010000"
    assert raw[24:32].hex() == "02000000c0ffffff"
    assert raw[40:48].hex() == "0800030001000100"


def test_descriptor_sides_must_agree():
    with pytest.raises(IsaError, match="source has 8 elements, destination 9"):
        Descriptor(0, DescriptorSide(0, ((1, 8),)), DescriptorSide(0, ((1, 9),))).encode()


def test_errors_name_field_value_and_limit():
    pattern = AccessPattern(formats.BF16, 0, 4, 0, ((1 << 15, 2),))
    with pytest.raises(
        IsaError, match=r"loadstationary.src.step0 = 32768 does not fit in 16 signed"
    ):
        isa.LoadStationary(src=pattern).encode()
    with pytest.raises(IsaError, match="memset runs on DVE, not on PE"):
        isa.Memset(engine=Engine.PE, dst=pattern, value=0)
    with pytest.raises(IsaError, match="memset has no field valu"):
        isa.Memset(dst=pattern, valu=0)
    with pytest.raises(IsaError, match="two waits, not 3"):
        isa.EventSemaphore(engine=Engine.SP, waits=(Wait(),) * 3)


@pytest.mark.parametrize("cls", INSTRUCTIONS.values(), ids=lambda c: c.mnemonic)
def test_every_reserved_bit_is_refused(cls):
    values = {
        name: AccessPattern(operand.formats[0], 0, 1, 0, ((1, 1),), operand.spaces[0])
        for name, operand, _ in cls.operands
    }
    word = int.from_bytes(cls(**values).encode(), "little")
    mask = cls.used_mask()
    for bit in range(isa.WORD_BITS):
        if not mask >> bit & 1:
            with pytest.raises(IsaError, match="reserved"):
                decode((word | 1 << bit).to_bytes(isa.WORD_BYTES, "little"))


@given(st.binary(min_size=128, max_size=128))
def test_random_words_decode_or_raise_isa_error(word):
    try:
        assert decode(word).encode() == word
    except IsaError:
        pass


def test_element_offsets_walk_innermost_first():
    pattern = AccessPattern(formats.FP16, 0, 1, 10, ((-1, 3), (8, 2)))
    assert pattern.element_offsets().tolist() == [10, 8, 6, 26, 24, 22]


def test_every_error_says_what_its_registers_hold():
    assert list(isa.ERROR_REPORTS) == list(isa.ErrorCode)


def test_manual_page_is_fresh():
    from makalu.rtl.arch import manual

    assert manual.PAGE.read_text() == manual.page(), "run python -m makalu.rtl.arch.manual"
