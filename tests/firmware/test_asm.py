"""Assembler and disassembler: text round trips, errors name the line and what was expected."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makalu.firmware.asm import AsmError, assemble, assemble_line, disassemble
from makalu.firmware.kernels.matmul import matmul_program
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import (
    INSTRUCTIONS,
    AccessPattern,
    Engine,
    Space,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)

patterns = st.builds(
    AccessPattern,
    st.sampled_from(formats.FORMATS),
    st.integers(0, 60000),
    st.integers(0, 5000),
    st.integers(0, (1 << 32) - 1),
    st.lists(
        st.tuples(st.integers(-(1 << 15), (1 << 15) - 1), st.integers(0, 65535)),
        min_size=1, max_size=4,
    ).map(tuple),
    st.sampled_from(Space),
)  # fmt: skip
words = st.integers(0, (1 << 32) - 1)


@st.composite
def instructions(draw):
    cls = draw(st.sampled_from(list(INSTRUCTIONS.values())))
    values = {name: draw(patterns) for name, _, _ in cls.operands}
    for name, item, _ in cls.scalars:
        legal = (
            st.sampled_from(list(item.values)) if item.values else st.integers(0, 2**item.width - 1)
        )
        values[name] = int(draw(legal))
    waits = draw(
        st.lists(
            st.builds(
                Wait, st.integers(0, 255), st.sampled_from([WaitMode.GE, WaitMode.EQ]), words
            ),
            max_size=2,
        )
    )
    update = draw(
        st.none()
        | st.builds(
            Update, st.integers(0, 255), st.sampled_from([UpdateMode.ADD, UpdateMode.SET]), words
        )
    )
    return cls(engine=draw(st.sampled_from(cls.engines)), waits=waits, update=update, **values)


@settings(max_examples=200, deadline=None)
@given(instructions())
def test_any_instruction_round_trips(instruction):
    assert assemble_line(str(instruction)) == instruction
    word = instruction.encode()
    assert assemble(disassemble(word))[0].encode() == word


def test_scalars_in_sbuf_are_addresses():
    tile = "sbuf.float32[0:4]+0x0[1,8]"
    flags = "reverse0=0x0 reverse1=0x1 scalar0=sbuf+0x40 scalar1=0x40000000 saturate=0x0"
    text = f"DVE  tensorscalar dst={tile} src={tile} op0=ADD op1=SUBTRACT {flags}"
    instruction = assemble_line(text)
    assert str(instruction) == text
    assert (instruction.scalar0, instruction.scalar0_pointer) == (0x40, 1)
    assert (instruction.scalar1, instruction.scalar1_pointer) == (0x40000000, 0)
    spelled = text.replace("scalar0=sbuf+0x40", "scalar0_pointer=1 scalar0=64")
    assert assemble_line(spelled) == instruction


def test_a_program_round_trips():
    program = matmul_program(TINY, (9, 10), (10, 20), "fp32")
    for engine in Engine:
        raw = program.queues[engine].tobytes()
        assert b"".join(i.encode() for i in assemble(disassemble(raw))) == raw
    listing = program.disassemble()
    assert "input a [9, 10] float32" in listing
    assert "matmul.py:" in listing
    everything = b"".join(i.encode() for i in assemble(listing))
    assert everything == np.concatenate([program.queues[e] for e in Engine]).tobytes()


def test_blank_lines_and_comments():
    assert assemble("\n ; nothing\nPE eventsemaphore $S[1]>=2? ; wait\n")[0].waits[0].value == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("XX eventsemaphore", "'XX' is not an engine; use PE, ACT, DVE, POOL, SP"),
        ("PE", "expected an instruction"),
        ("PE nonsense", "got 'nonsense'"),
        ("PE loadstationary half=WHOLE", "needs operand src"),
        ("DVE memset dst=sbuf.float32[0:4]+0x0[1,4] value=0x100000000", "32 bits"),
        ("DVE memset dst=dram.float32[0:4]+0x0[1,4]", "not a memory"),
        ("DVE memset dst=sbuf.float7[0:4]+0x0[1,4]", "float7"),
        ("DVE memset dst=sbuf.float32[4:0]+0x0[1,4]", "end before they start"),
        ("DVE memset dst=sbuf.float32[0:4]+0x0[1,4] dst=sbuf.float32[0:4]+0x0[1,4]", "twice"),
        ("DVE memset src=sbuf.float32[0:4]+0x0[1,4]", "no operand 'src'"),
        ("DVE memset dst=sbuf.float32[0:4]+0x0[1,4] colour=1", "'colour' is no field"),
        ("DVE memset dst=5", "'dst' is an operand"),
        ("DVE memset dst=sbuf.float32[0:4]+0x0[1,4] value=many", "'many' is not a number"),
        ("DVE loadstationary src=sbuf.float32[0:4]+0x0[1,4]", "runs on PE"),
        ("DVE memset dst=sbuf.float32[0:4]+0x0[1,4] value=sbuf+0x40", "cannot point to SBUF"),
        ("DVE tensorscalar scalar0=psum+0x40", "numbers lie in sbuf, not in 'psum'"),
        ("DVE tensorscalar scalar0=sbuf+far", "'far' is not a number"),
        ("DVE tensorscalar scalar0=sbuf+4 scalar0=5", "scalar0 is given twice"),
        ("DVE tensorscalar scalar0_pointer=1 scalar0=sbuf+4", "scalar0_pointer is given twice"),
        ("DVE tensorscalar src=sbuf+4", "'src' is an operand"),
        ("DVE tensorscalar op0=PLUS", "'PLUS' is not a number"),
        ("PE eventsemaphore what is this", "cannot read 'what is this'"),
        ("PE eventsemaphore $S[1]>=1? $S[2]>=1? $S[3]>=1?", "two waits, not 3"),
        ("PE eventsemaphore $S[1]+=1 $S[2]+=1", "one update"),
    ],
)
def test_errors_name_line_and_cause(text, expected):
    with pytest.raises(AsmError) as caught:
        assemble(f"; first line\n{text}\n")
    assert str(caught.value).startswith("line 2: ")
    assert expected in str(caught.value)


def test_partial_words_are_refused():
    with pytest.raises(AsmError, match="multiple of 128"):
        disassemble(b"\0" * 100)
