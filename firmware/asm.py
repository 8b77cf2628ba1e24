"""Assembler and disassembler: text and instructions, derived from the contract.

The text is what an :class:`~..rtl.arch.isa.Instruction` prints, one per line::

    PE   matmulmoving dst=psum.float32[0:16]+0x0[1,128] src=sbuf.bfloat16[0:16]+0x80[1,128] \
half=WHOLE accumulate=0x1 $S[5]>=2? $S[1]+=1  ; a comment

Operands are ``name=space.format[first:last]+offset`` and ``[step,count]`` pairs, innermost first;
fields are ``name=value`` with a number or a name, or ``name=sbuf+offset`` if they point to numbers
(which sets their flag); ``$S[n]>=v?`` and ``$S[n]==v?`` are waits,
``$S[n]+=v`` and ``$S[n]=v`` the update.
"""

import re

from ..rtl.arch import formats
from ..rtl.arch.isa import (
    INSTRUCTIONS,
    WORD_BYTES,
    AccessPattern,
    Engine,
    IsaError,
    Space,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
    decode,
)

__all__ = ["AsmError", "assemble", "assemble_line", "disassemble"]


class AsmError(ValueError):
    """Text that is not an instruction; the message has the line number."""


_MNEMONICS = {cls.mnemonic: cls for cls in INSTRUCTIONS.values()}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<wait>\$S\[(?P<ws>\d+)\](?P<wm>>=|==)(?P<wv>\w+)\?)
  | (?P<update>\$S\[(?P<us>\d+)\](?P<um>\+=|=)(?P<uv>\w+)(?!\?))
  | (?P<operand>(?P<on>\w+)=(?P<space>[a-z]+)\.(?P<format>\w+)\[(?P<first>\d+):(?P<last>\d+)\]
      \+(?P<offset>\w+)(?P<dims>(?:\s*\[-?\d+,\d+\])*))
  | (?P<pointer>(?P<pn>\w+)=(?P<ps>[a-z]+)\+(?P<pv>\w+))
  | (?P<field>(?P<fn>\w+)=(?P<fv>-?\w+))
    )(?=\s|$)""",
    re.VERBOSE,
)
_DIM = re.compile(r"\[(-?\d+),(\d+)\]")


def _number(text):
    try:
        return int(text, 0)
    except ValueError:
        raise AsmError(f"{text!r} is not a number") from None


def _operand(match):
    try:
        space = Space[match["space"].upper()]
    except KeyError:
        raise AsmError(f"{match['space']!r} is not a memory; use sbuf or psum") from None
    try:
        fmt = formats.format_of(match["format"])
    except TypeError as error:
        raise AsmError(str(error)) from None
    first, last = int(match["first"]), int(match["last"])
    if last < first:
        raise AsmError(f"partitions {first}:{last} end before they start")
    dims = tuple((int(step), int(count)) for step, count in _DIM.findall(match["dims"]))
    if len(dims) > 4:
        raise AsmError(f"an operand has at most 4 dimensions, not {len(dims)}")
    return AccessPattern(
        fmt, first, last - first, _number(match["offset"]), dims or ((0, 1),), space
    )


def _point(cls, name, item, match, values):
    """Make a field point to SBUF."""
    if match["ps"] != "sbuf":
        raise AsmError(f"{cls.mnemonic}.{name}: numbers lie in sbuf, not in {match['ps']!r}")
    if item.pointer is None:
        raise AsmError(f"{cls.mnemonic}.{name} is a number, it cannot point to SBUF")
    if item.pointer in values:
        raise AsmError(f"{cls.mnemonic}.{item.pointer} is given twice")
    values[name], values[item.pointer] = _number(match["pv"]), 1


def assemble_line(text):
    """The instruction of one line, or ``None`` for a blank line or a comment."""
    text = text.split(";", 1)[0].strip()
    if not text:
        return None
    words = text.split(None, 2)
    try:
        engine = Engine[words[0].upper()]
    except KeyError:
        names = ", ".join(e.name for e in Engine)
        raise AsmError(f"{words[0]!r} is not an engine; use {names}") from None
    if len(words) < 2 or words[1] not in _MNEMONICS:
        got = repr(words[1]) if len(words) > 1 else "nothing"
        raise AsmError(f"expected an instruction ({', '.join(_MNEMONICS)}), got {got}")
    cls = _MNEMONICS[words[1]]
    kinds = {name: item for name, item, _ in cls.scalars}
    operands = {name for name, _, _ in cls.operands}
    rest = words[2] if len(words) > 2 else ""
    values, waits, update, at = {}, [], None, 0
    while rest[at:].strip():
        match = _TOKEN.match(rest, at)
        if match is None:
            raise AsmError(f"{cls.mnemonic}: cannot read {rest[at:].strip()!r}")
        at = match.end()
        if match["wait"]:
            mode = WaitMode.GE if match["wm"] == ">=" else WaitMode.EQ
            waits.append(Wait(int(match["ws"]), mode, _number(match["wv"])))
            continue
        if match["update"]:
            if update is not None:
                raise AsmError(f"{cls.mnemonic}: an instruction has one update")
            mode = UpdateMode.ADD if match["um"] == "+=" else UpdateMode.SET
            update = Update(int(match["us"]), mode, _number(match["uv"]))
            continue
        name = match["on"] or match["pn"] or match["fn"]
        if name in values:
            raise AsmError(f"{cls.mnemonic}.{name} is given twice")
        if match["operand"]:
            if name not in operands:
                raise AsmError(f"{cls.mnemonic} has no operand {name!r}")
            values[name] = _operand(match)
        else:
            item = kinds.get(name)
            if item is None:
                what = "is an operand" if name in operands else "is no field"
                raise AsmError(f"{cls.mnemonic}: {name!r} {what} of it")
            if match["pointer"]:
                _point(cls, name, item, match, values)
            elif item.values is not None and match["fv"] in item.values.__members__:
                values[name] = int(item.values[match["fv"]])
            else:
                values[name] = _number(match["fv"])
    missing = sorted(operands - set(values))
    if missing:
        raise AsmError(f"{cls.mnemonic} needs operand {', '.join(missing)}")
    try:
        instruction = cls(engine=engine, waits=waits, update=update, **values)
        instruction.encode()
    except IsaError as error:
        raise AsmError(str(error)) from None
    return instruction


def assemble(text):
    """The instructions of a text, in order.

    Raises
    ------
    :exc:`AsmError`
        With the number of the line.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            instruction = assemble_line(line)
        except AsmError as error:
            raise AsmError(f"line {number}: {error}") from None
        if instruction is not None:
            found.append(instruction)
    return found


def disassemble(words):
    """Text of instruction words: ``bytes`` of a queue, or rows of 128 bytes."""
    data = bytes(words) if isinstance(words, bytes | bytearray | memoryview) else words.tobytes()
    if len(data) % WORD_BYTES:
        raise AsmError(f"{len(data)} bytes are not a multiple of {WORD_BYTES}")
    lines = [str(decode(data[i : i + WORD_BYTES])) for i in range(0, len(data), WORD_BYTES)]
    return "".join(f"{line}\n" for line in lines)
