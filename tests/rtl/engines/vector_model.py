"""What the vector engine's instructions mean, in numpy, on the bytes of SBUF and PSUM.

For :mod:`test_vector` and for ``benches/bench_vector.py``; written apart from the golden model.
"""

import operator

import numpy as np
from makalu.rtl.arch.formats import CANONICAL_NAN, FP32
from makalu.rtl.arch.isa import (
    AccessPattern,
    AluOp,
    CopyPredicated,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    ReduceOp,
    ScalarTensorTensor,
    Space,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
)

_COMPARE = {
    "EQUAL": operator.eq, "NOT_EQUAL": operator.ne, "GREATER_EQUAL": operator.ge,
    "GREATER": operator.gt, "LESS_EQUAL": operator.le, "LESS": operator.lt,
}  # fmt: skip
_LOGIC = {
    "LOGICAL_AND": lambda a, b: a and b,
    "LOGICAL_OR": lambda a, b: a or b,
    "LOGICAL_XOR": lambda a, b: a != b,
}
_BITS = {
    "BITWISE_AND": operator.and_, "BITWISE_OR": operator.or_, "BITWISE_XOR": operator.xor,
    "BITWISE_NOT": lambda a, b: ~a & 0xFFFFFFFF,
    "LEFT_SHIFT": lambda a, b: a << min(b, 32) & 0xFFFFFFFF,
    "RIGHT_SHIFT": lambda a, b: a >> min(b, 32),
}  # fmt: skip
_SUMS = {"ADD": operator.add, "SUBTRACT": operator.sub, "MULTIPLY": operator.mul}


def operate(op, a, b):
    """One operation on two integers that are bits of binary32 numbers, or bits."""
    name = AluOp(op).name
    if name == "BYPASS":
        return a
    if name in _BITS:
        return _BITS[name](a, b)
    x, y = (np.uint32(v).view(np.float32) for v in (a, b))
    nan = bool(np.isnan(x) or np.isnan(y))
    if name in _COMPARE:
        return 0x3F800000 if _COMPARE[name](x, y) else 0
    if name in _LOGIC:
        return 0x3F800000 if _LOGIC[name](bool(x != 0), bool(y != 0)) else 0
    if name in _SUMS:
        with np.errstate(all="ignore"):
            result = _SUMS[name](x, y)
        return CANONICAL_NAN if np.isnan(result) else int(result.view(np.uint32))
    if nan:
        return CANONICAL_NAN
    if name.startswith("ABS"):
        a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    # Integers that are ordered as the numbers are.
    key = sorted((a, b), key=lambda v: -(v & 0x7FFFFFFF) - 1 if v >> 31 else v)
    return key[-1] if name.endswith("MAX") else key[0]


def unsigned(fmt):
    return np.dtype(f"u{fmt.bytes}")


def cast(codes, src, dst, saturate):
    """Codes of ``src`` in ``dst``, as a copy casts them."""
    return codes if src is dst else through_binary32(codes, src, dst, saturate)


def through_binary32(codes, src, dst, saturate):
    """The same where equal formats are cast as well: to binary32 infinities may be clamped."""
    with np.errstate(all="ignore"):
        values = src.decode(codes.view(src.dtype)).astype(np.float32)
        out = dst.encode(values.astype(np.float64), saturate=bool(saturate))
        out = np.ascontiguousarray(out).view(unsigned(dst)).copy()
    if dst.is_float:
        nan = np.isnan(values)
        quiet = dst.encode(np.array([np.nan])).view(unsigned(dst))[0]
        sign = 1 << (dst.bits - 1)
        out[nan] = np.where(
            np.signbit(values[nan]), quiet | sign, quiet & ~unsigned(dst).type(sign)
        )
    return out


def gather(memory, ap):
    """Codes ``[partitions, elements]`` that ``ap`` names."""
    rows = memory[ap.start_partition : ap.start_partition + ap.num_partitions]
    at = ap.element_offsets()[:, None] + np.arange(ap.dtype.bytes)
    return np.ascontiguousarray(rows[:, at]).view(unsigned(ap.dtype))[..., 0]


def scatter(memory, ap, codes, wanted=None):
    """Write in order: of elements that overlap the last one stays. ``wanted``: only these."""
    for i, at in enumerate(ap.element_offsets()):
        column = np.ascontiguousarray(codes[:, i, None]).view(np.uint8)
        for p, element in enumerate(column):
            if wanted is None or wanted[p, i]:
                memory[ap.start_partition + p, at : at + ap.dtype.bytes] = element


def execute(instruction, sbuf, psum):
    """Carry out an instruction on ``sbuf``, uint8 ``[partitions, bytes]``."""
    dst = instruction.dst
    operands = [ap for ap in instruction.values.values() if isinstance(ap, AccessPattern)]
    if not all(ap.elements and ap.num_partitions for ap in operands):
        return
    wanted = None
    if isinstance(
        instruction,
        TensorTensor
        | TensorScalar
        | ScalarTensorTensor
        | TensorReduce
        | TensorTensorScan
        | Max8
        | FindIndex8
        | MatchReplace8,
    ):
        codes = _compute(instruction, sbuf, psum)
    elif isinstance(instruction, Memset):
        code = instruction.value & (1 << dst.dtype.bits) - 1
        codes = np.full((dst.num_partitions, dst.elements), code, unsigned(dst.dtype))
    else:
        src = instruction.src
        memory = psum if src.space == Space.PSUM else sbuf
        codes = cast(gather(memory, src), src.dtype, dst.dtype, instruction.saturate)
    if isinstance(instruction, CopyPredicated):
        predicate = instruction.predicate
        found = gather(psum if predicate.space == Space.PSUM else sbuf, predicate)
        wanted = (found != 0) != bool(instruction.reverse)
    scatter(sbuf, dst, codes, wanted)


def _eight_greatest(row):
    """The eight greatest of binary32 codes as numbers are ordered, NaN by its sign beyond all."""

    def rank(code):
        magnitude = code & 0x7FFFFFFF
        return -magnitude - 1 if code >> 31 else magnitude

    return (sorted(row, key=rank, reverse=True) + [0xFFFFFFFF] * 8)[:8]


def _first_places(row, values):
    """Index of the first element with the bits of each value, taken once; -1 without."""
    row, places = list(row), []
    for value in values:
        places.append(row.index(value) if value in row else -1)
        if places[-1] >= 0:
            row[places[-1]] = None
    return places


def _compute(instruction, sbuf, psum):
    """Codes of the result of an operation."""
    i = instruction
    ops = [getattr(i, name) for name in ("op", "op0", "op1") if name in i.values]
    bitwise = any(AluOp(op).name in _BITS for op in ops)

    def operand(ap):
        memory = psum if ap.space == Space.PSUM else sbuf
        codes = gather(memory, ap)
        if not bitwise:
            with np.errstate(all="ignore"):
                values = ap.dtype.decode(codes.view(ap.dtype.dtype)).astype(np.float32)
            bits = np.ascontiguousarray(values).view(np.uint32)
            sign = bits & np.uint32(1 << 31)
            codes = np.where(np.isnan(values), sign | np.uint32(CANONICAL_NAN), bits)
        return codes.astype(np.uint32).tolist()

    def scalar(name, ap):
        value = getattr(i, name)
        if not getattr(i, f"{name}_pointer"):
            return [value] * ap.num_partitions
        rows = sbuf[ap.start_partition : ap.start_partition + ap.num_partitions]
        return np.ascontiguousarray(rows[:, value : value + 4]).view(np.uint32)[:, 0].tolist()

    def apply(op, a, b, reverse=0):
        return operate(op, b, a) if reverse else operate(op, a, b)

    def elementwise(op, rows, others, reverse=0):
        return [
            [apply(op, a, b, reverse) for a, b in zip(row, other, strict=True)]
            for row, other in zip(rows, others, strict=True)
        ]

    def spread(values, ap):
        return [[value] * ap.elements for value in values]

    if isinstance(i, FindIndex8):
        found = [_first_places(*pair) for pair in zip(operand(i.src), operand(i.vals), strict=True)]
        return np.array(found, np.int64).astype(unsigned(i.dst.dtype))
    if isinstance(i, Max8):
        rows = [_eight_greatest(row) for row in operand(i.src)]
    elif isinstance(i, MatchReplace8):
        rows = operand(i.src)
        for row, values in zip(rows, operand(i.vals), strict=True):
            for place in _first_places(list(row), values):
                if place >= 0:
                    row[place] = i.value
    elif isinstance(i, TensorTensor):
        rows = elementwise(i.op, operand(i.src0), operand(i.src1))
    elif isinstance(i, TensorScalar):
        rows = operand(i.src)
        rows = elementwise(i.op0, rows, spread(scalar("scalar0", i.src), i.src), i.reverse0)
        rows = elementwise(i.op1, rows, spread(scalar("scalar1", i.src), i.src), i.reverse1)
    elif isinstance(i, ScalarTensorTensor):
        rows = operand(i.src0)
        rows = elementwise(i.op0, rows, spread(scalar("scalar0", i.src0), i.src0), i.reverse0)
        rows = elementwise(i.op1, rows, operand(i.src1), i.reverse1)
    elif isinstance(i, TensorTensorScan):
        rows = []
        pairs = zip(operand(i.src0), operand(i.src1), scalar("initial", i.src0), strict=True)
        for first, second, last in pairs:
            row = []
            for a, b in zip(first, second, strict=True):
                last = apply(i.op1, apply(i.op0, a, last, i.reverse0), b, i.reverse1)
                row.append(last)
            rows.append(row)
    else:
        length = int(np.prod([count for _, count in i.src.dims[: i.inner + 1]]))
        rows = []
        for elements in operand(i.src):
            out = []
            for at in range(0, len(elements), max(length, 1)):
                partial = [ReduceOp(i.op).identity] * 2
                for k, element in enumerate(elements[at : at + length]):
                    partial[k % 2] = operate(i.op, partial[k % 2], element)
                result = partial[0] if length == 1 else operate(i.op, *partial)
                out.append(result ^ i.negate << 31)
            rows.append(out)
    bits = np.array(rows, np.uint32).reshape(i.dst.num_partitions, -1)
    if bitwise:
        return bits.astype(unsigned(i.dst.dtype))
    quiet = np.isnan(bits.view(np.float32))
    bits = np.where(quiet, bits & np.uint32(1 << 31) | np.uint32(CANONICAL_NAN), bits)
    return through_binary32(bits, FP32, i.dst.dtype, i.saturate)
