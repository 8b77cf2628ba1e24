"""The manual page, generated from the contract: instructions, codes, registers, events.

``python -m makalu.rtl.arch.manual`` writes ``isa.md`` beside this file; a test fails when it
is stale.
"""

import inspect
from pathlib import Path

from . import events, formats, isa, registers
from .config import SMALL, TINY, TRN

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).with_name("isa.md")


def _table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _members(cls):
    """Members with the string literals that follow them in the source."""
    source = inspect.getsource(cls).splitlines()
    rows = []
    for member in cls:
        meaning = ""
        for i, line in enumerate(source):
            if line.strip().startswith(f"{member.name} ="):
                after = source[i + 1].strip() if i + 1 < len(source) else ""
                meaning = after.strip('"') if after.startswith('"""') else ""
        rows.append((int(member), f"`{member.name}`", meaning))
    return rows


def _enum(cls):
    """A table of the members."""
    return _table(("code", "name", "meaning"), _members(cls))


def _bits(first, width):
    return f"{first}..{first + width - 1}" if width > 1 else str(first)


def _operations():
    """Of :class:`isa.AluOp`: codes, meanings, and what a reduction begins with."""
    begins = {int(op): f"`{op.identity:#010x}`" for op in isa.ReduceOp}
    rows = [[*row, begins.get(row[0], "")] for row in _members(isa.AluOp)]
    return _table(("code", "name", "meaning", "a reduction begins with"), rows)


def page():
    """The page as Markdown."""
    out = [
        "# Instruction set, registers and events",
        "",
        "Generated from `rtl/arch` by `python -m makalu.rtl.arch.manual`. Do not edit.",
        "",
        "## Machines",
        "",
        _table(
            ("name", "array", "SBUF/partition", "PSUM/partition", "DMA engines", "fingerprint"),
            [
                (
                    f"`{c.name}`",
                    f"{c.rows} x {c.cols}",
                    f"{c.sbuf_bytes} B",
                    f"{c.psum_banks} x {c.psum_bank_bytes} B",
                    c.dma_engines,
                    f"{c.fingerprint:#010x}",
                )
                for c in (TINY, SMALL, TRN)
            ],
        ),
        "",
        "## Number formats",
        "",
        _table(
            ("code", "name", "bytes", "exponent, significand bits", "largest", "overflow"),
            [
                (
                    f.code,
                    f"`{f.name}`",
                    f.bytes,
                    f"{f.exp}, {f.man}" if f.is_float else "integer",
                    f"{f.max:g}" if f.is_float else f.max,
                    ("NaN" if f.finite else "infinity") if f.is_float else "saturates",
                )
                for f in formats.FORMATS
            ],
        ),
        "",
        "## Instruction word",
        "",
        f"{isa.WORD_BYTES} bytes, little-endian. Bits that no field claims must be zero.",
        "",
        _table(
            ("header field", "bits"),
            [
                (f"`{name}`", f"{bit}..{bit + width - 1}")
                for name, bit, width in isa.HEADER
                if not name.startswith("_")
            ],
        ),
        "",
        f"An access pattern ({isa.AP_BITS} bits); steps are signed and in elements:",
        "",
        _table(
            ("field", "bits"),
            [
                (f"`{name}`", f"{bit}..{bit + width - 1}")
                for name, bit, width in isa.AccessPattern.LAYOUT
                if not name.startswith("_")
            ],
        ),
        "",
        "## Instructions",
        "",
        (
            "A count of zero, or no partitions, in any operand makes an instruction a no-op: it "
            "completes and makes its update. At most one source of an instruction may lie in PSUM."
        ),
        "",
        (
            "A pointer is the byte offset in SBUF, a multiple of 4, of one number of 32 bits in "
            "each partition of the first source, or of dst where there is none. Without its flag "
            "the field is the number itself."
        ),
        "",
    ]
    for opcode, cls in sorted(isa.INSTRUCTIONS.items()):
        out += [
            f"### `{cls.mnemonic}` ({opcode:#04x})",
            "",
            "Engines: " + ", ".join(e.name for e in cls.engines) + ".",
            "",
            inspect.cleandoc(cls.__doc__),
            "",
        ]
        rows = []
        for name, operand, bit in cls.operands:
            access = "Written" if operand.writes else "Read"
            where = "/".join(s.name for s in operand.spaces)
            kinds = ", ".join(f.name for f in operand.formats)
            if operand.formats == formats.FORMATS:
                kinds = "any format"
            meaning = f"{operand.meaning} {access}. {where}; {kinds}."
            if operand.reduced:
                meaning += f" Its `{operand.reduced} + 1` innermost dimensions are reduced."
            if operand.exactly is not None:
                meaning += f" Exactly {operand.exactly} elements."
            rows.append((f"`{name}`", f"{bit}..{bit + isa.AP_BITS - 1}", meaning))
        for name, item, bit in cls.scalars:
            meaning = item.meaning + (f" ({item.unit})" if item.unit else "")
            if item.values is not None:
                meaning += f" A code of `{item.values.__name__}`."
            if item.pointer is not None:
                meaning += f" A pointer if `{item.pointer}` is 1."
            rows.append((f"`{name}`", _bits(bit, item.width), meaning))
        if rows:
            out += [_table(("field", "bits", "meaning"), rows), ""]
    out += [
        "## DMA descriptor",
        "",
        inspect.cleandoc(isa.Descriptor.__doc__),
        "",
        _table(
            ("field", "bits"),
            [
                (f"`{name}`", f"{bit}..{bit + width - 1}")
                for name, bit, width in isa.DESCRIPTOR_LAYOUT
                if not name.startswith("_")
            ],
        ),
        "",
        "## Codes",
        "",
    ]
    for enum in (isa.Engine, isa.WaitMode, isa.UpdateMode, isa.Half, isa.Space):
        out += [f"### {enum.__name__}", "", _enum(enum), ""]
    out += ["### AluOp", "", inspect.cleandoc(isa.AluOp.__doc__), "", _operations(), ""]
    out += [
        "### ReduceOp",
        "",
        "Those operations of `AluOp` that reduce; the table says with what they begin.",
        "",
        "### Function",
        "",
        inspect.cleandoc(isa.Function.__doc__),
        "",
        _enum(isa.Function),
        "",
        "### ErrorCode",
        "",
        _enum(isa.ErrorCode),
        "",
    ]
    out += [
        "### Error registers",
        "",
        (
            "`field` is a first bit in the instruction word or descriptor; `pc` is an address "
            "modulo 2**40. Of several errors one is reported: in a queue the first, between "
            "queues and engines whichever comes first in time."
        ),
        "",
        _table(
            ("code", "`source`", "`field`", "`pc`", "`address`"),
            [
                (f"`{code.name}`", report.source, report.field, report.pc, report.address)
                for code, report in isa.ERROR_REPORTS.items()
            ],
        ),
        "",
        "## Registers",
        "",
        _table(
            ("address", "name", "access", "meaning", "fields"),
            [
                (
                    f"{r.address:#05x}",
                    f"`{r.name}`",
                    r.access,
                    r.meaning,
                    ", ".join(f"{n} [{b + w - 1}:{b}]" for n, b, w in r.fields),
                )
                for r in registers.REGISTERS
            ],
        ),
        "",
        (
            f"Semaphore `s`: `{registers.SEMAPHORE_BASE:#x} + 4 * s`; counter `i` (two words): "
            f"`{registers.COUNTER_BASE:#x} + 8 * i`."
        ),
        "",
        "## Counters",
        "",
        _table(
            ("i", "name", "unit", "counts"),
            [(i, f"`{e.full_name}`", e.unit, e.meaning) for i, e in enumerate(events.COUNTERS)],
        ),
        "",
    ]
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
