"""Functional coverage: which instruction read which kind of number, in which format, from where.

And which wrote which format where, and took its scalars as numbers and from SBUF.
"""

import contextlib
from collections import Counter

import numpy as np
from makalu.rtl.arch.isa import INSTRUCTIONS, Space
from makalu.sim import golden

__all__ = ["KINDS", "collecting", "possible", "report"]

KINDS = {
    True: ("zero", "negative zero", "subnormal", "normal", "largest", "infinity", "NaN"),
    False: ("zero", "least", "greatest", "between"),
}
"""Kinds of elements, of floating-point formats and of integers."""


def kinds_of(fmt):
    """The kinds that a format has."""
    without = set()
    if fmt.is_float:
        without |= {"infinity"} if fmt.finite else set()
    elif not fmt.signed:
        without |= {"least"}  # is zero
    return [kind for kind in KINDS[fmt.is_float] if kind not in without]


def classify(codes, fmt):
    """How many of the codes are of which kind."""
    values = fmt.decode(codes).astype(np.float64)
    if not fmt.is_float:
        masks = {
            "zero": values == 0, "least": values == fmt.min, "greatest": values == fmt.max,
        }  # fmt: skip
        if not fmt.signed:
            del masks["least"]
        masks["between"] = ~np.any(list(masks.values()), axis=0)
    else:
        size = np.abs(values)
        normal = np.isfinite(values) & (size > 0)
        least = 2.0 ** (1 - fmt.bias)
        largest = float(fmt.max)
        masks = {
            "zero": (size == 0) & ~np.signbit(values),
            "negative zero": (size == 0) & np.signbit(values),
            "subnormal": normal & (size < least),
            "normal": normal & (size >= least) & (size < largest),
            "largest": size == largest,
            "infinity": np.isinf(values),
            "NaN": np.isnan(values),
        }
    return {kind: int(mask.sum()) for kind, mask in masks.items()}


def possible():
    """Every point: ``(instruction, operand, format, memory, kind)`` of all operands and scalars."""
    for cls in INSTRUCTIONS.values():
        for name, operand, _ in cls.operands:
            for space in operand.spaces:
                for fmt in operand.formats:
                    if space == Space.SBUF or fmt.bytes == 4:
                        for kind in ["written"] if operand.writes else kinds_of(fmt):
                            yield cls.mnemonic, name, fmt.name, space.name, kind
        for name, item, _ in cls.scalars:
            if item.pointer:
                yield cls.mnemonic, name, "scalar", "SBUF", "per partition"
                yield cls.mnemonic, name, "scalar", "instruction", "number"


@contextlib.contextmanager
def collecting():
    """Count the points that the golden model's instructions meet meanwhile; gives a Counter."""
    seen = Counter()

    def watch(execute):
        def watched(core, instruction):
            for name, item, _ in instruction.scalars:
                if item.pointer:
                    place = ("instruction", "number"), ("SBUF", "per partition")
                    own = instruction.values[item.pointer]
                    seen[instruction.mnemonic, name, "scalar", *place[own]] += 1
            for name, operand, _ in instruction.operands:
                ap = instruction.values[name]
                if operand.writes:
                    point = instruction.mnemonic, name, ap.dtype.name, ap.space.name, "written"
                    seen[point] += ap.elements * ap.num_partitions
                    continue
                codes = core.memory(ap.space).read(ap)
                for kind, count in classify(codes, ap.dtype).items():
                    if count:
                        point = instruction.mnemonic, name, ap.dtype.name, ap.space.name, kind
                        seen[point] += count
            return execute(core, instruction)

        return watched

    before = dict(golden.EXECUTORS)
    golden.EXECUTORS.update({cls: watch(execute) for cls, execute in before.items()})
    try:
        yield seen
    finally:
        golden.EXECUTORS.update(before)


def report(seen):
    """Lines on what was met, by instruction, and the holes."""
    points = list(possible())
    lines = [f"functional coverage: {sum(p in seen for p in points)} of {len(points)} points"]
    for cls in INSTRUCTIONS.values():
        mine = [p for p in points if p[0] == cls.mnemonic]
        if mine:
            met = sum(p in seen for p in mine)
            elements = sum(seen.get(p, 0) for p in mine)
            lines.append(
                f"  {cls.mnemonic:20} {met:4} of {len(mine):4}, {elements:,} elements and scalars"
            )
    holes = [p for p in points if p not in seen]
    lines += [f"  never met: {' '.join(p)}" for p in holes]
    return lines, holes
