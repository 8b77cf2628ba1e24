"""What the GpSimd engine's instructions mean, in Python's integers, on the bytes of SBUF.

For :mod:`test_gpsimd` and for ``benches/bench_gpsimd.py``; written apart from the golden model.
"""

import itertools
import operator

import numpy as np
from makalu.rtl.arch.formats import CANONICAL_NAN, FP32, INT32, UINT32
from makalu.rtl.arch.isa import (
    AccessPattern,
    AffineSelect,
    AluOp,
    Compare,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    Rng,
)

try:
    from . import vector_model
except ImportError:  # beside a bench of cocotb there is no package
    import vector_model

MASK = 0xFFFFFFFF
COMPARISONS = {
    "EQUAL": operator.eq, "NOT_EQUAL": operator.ne, "GREATER_EQUAL": operator.ge,
    "GREATER": operator.gt, "LESS_EQUAL": operator.le, "LESS": operator.lt,
}  # fmt: skip


def signed(value, bits=32):
    """The integer whose two's complement is ``value``."""
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def operate(op, a, b, is_signed):
    """One operation on two integers of 0 to 2**32 - 1; int32 if ``is_signed``."""
    name = AluOp(op).name
    x, y = (signed(v) if is_signed else v for v in (a, b))
    if name in COMPARISONS:
        return int(COMPARISONS[name](x, y))
    table = {
        "BYPASS": lambda: x,
        "ADD": lambda: x + y,
        "SUBTRACT": lambda: x - y,
        "MULTIPLY": lambda: x * y,
        "MAX": lambda: max(x, y),
        "MIN": lambda: min(x, y),
        "ABS_MAX": lambda: max(abs(x), abs(y)),
        "ABS_MIN": lambda: min(abs(x), abs(y)),
        "LOGICAL_AND": lambda: int(x != 0 and y != 0),
        "LOGICAL_OR": lambda: int(x != 0 or y != 0),
        "LOGICAL_XOR": lambda: int((x != 0) != (y != 0)),
        "BITWISE_AND": lambda: a & b,
        "BITWISE_OR": lambda: a | b,
        "BITWISE_XOR": lambda: a ^ b,
        "BITWISE_NOT": lambda: ~a,
        "LEFT_SHIFT": lambda: x << min(b, 32),
        "RIGHT_SHIFT": lambda: x >> min(b, 32),
    }
    return table[name]() & MASK


def places(instruction):
    """The affine function as int32, ``[partition][element]``."""
    i = instruction
    steps = [signed(getattr(i, f"step{k}")) for k in range(4)]
    counts = [count for _, count in i.dst.dims]
    rows = []
    for p in range(i.dst.num_partitions):
        row = []
        for outer_first in itertools.product(*(range(n) for n in reversed(counts))):
            index = outer_first[::-1]
            value = signed(i.offset) + signed(i.channel_multiplier) * p
            value += sum(step * k for step, k in zip(steps, index, strict=False))
            row.append(signed(value))
        rows.append(row)
    return rows


def random_word(place, seed):
    """The hash of a place, in Python's integers."""
    x = (place ^ (seed << 13 | seed >> 19)) & MASK
    x = ((x ^ x >> 17) * 0xED5AD4BB ^ (seed ^ seed >> 17) * 0xED5AD4BB) & MASK
    x = (x ^ x >> 11) * 0xAC4C1B51 & MASK
    x = (x ^ x >> 15) * 0x31848BAB & MASK
    return x ^ x >> 14


def random_rows(i, sbuf):
    """Codes of random elements, ``[partition][element]``."""
    pairs = zip(places(i), _scalar(i, "seed", sbuf, i.dst), strict=True)
    words = [[random_word(place, seed) for place in row] for row, seed in pairs]
    if i.dst.dtype is not FP32:
        return words
    return [[int(np.float32((w >> 8) / 2**24).view(np.uint32)) for w in row] for row in words]


def extended(code, fmt):
    """A code of an integer format as 32 bits, extended by its sign if it has one."""
    return signed(code, fmt.bits) & MASK if fmt.signed else code


def _integers(memory, ap):
    codes = vector_model.gather(memory, ap).tolist()
    return [[extended(code, ap.dtype) for code in row] for row in codes]


def _scalar(i, name, sbuf, ap):
    value = getattr(i, name)
    if not getattr(i, f"{name}_pointer"):
        return [value] * ap.num_partitions
    rows = sbuf[ap.start_partition : ap.start_partition + ap.num_partitions]
    return [int.from_bytes(row[value : value + 4].tobytes(), "little") for row in rows]


def _select(i, sbuf):
    kept = vector_model.cast(vector_model.gather(sbuf, i.src), i.src.dtype, i.dst.dtype, i.saturate)
    value = np.array([i.value], np.uint32)
    if np.isnan(value.view(np.float32))[0]:
        value = value & np.uint32(1 << 31) | np.uint32(CANONICAL_NAN)
    other = vector_model.through_binary32(value, FP32, i.dst.dtype, i.saturate)
    compare = COMPARISONS[Compare(i.compare).name]
    holds = [[compare(place, 0) for place in row] for row in places(i)]
    return np.where(np.array(holds, bool), kept, other)


def execute(instruction, sbuf, psum):
    """Carry out an instruction on ``sbuf``, uint8 ``[partitions, bytes]``."""
    i, dst = instruction, instruction.dst
    ours = Iota | AffineSelect | IntegerTensorTensor | IntegerTensorScalar | Rng
    if not isinstance(i, ours):
        vector_model.execute(i, sbuf, psum)
        return
    operands = [ap for ap in i.values.values() if isinstance(ap, AccessPattern)]
    if not all(ap.elements and ap.num_partitions for ap in operands):
        return
    if isinstance(i, AffineSelect):
        vector_model.scatter(sbuf, dst, _select(i, sbuf))
        return
    if isinstance(i, Iota):
        rows = places(i)
        if dst.dtype not in (INT32, UINT32):
            codes = np.array(rows, np.int32).view(np.uint32)
            vector_model.scatter(sbuf, dst, vector_model.cast(codes, INT32, dst.dtype, i.saturate))
            return
    elif isinstance(i, Rng):
        rows = random_rows(i, sbuf)
    elif isinstance(i, IntegerTensorTensor):
        sources = (_integers(sbuf, ap) for ap in (i.src0, i.src1))
        rows = [
            [operate(i.op, a, b, i.src0.dtype.signed) for a, b in zip(*pair, strict=True)]
            for pair in zip(*sources, strict=True)
        ]
    else:
        rows = _integers(sbuf, i.src)
        for k in range(2):
            op, reverse = getattr(i, f"op{k}"), getattr(i, f"reverse{k}")
            rows = [
                [operate(op, *((b, a) if reverse else (a, b)), i.src.dtype.signed) for a in row]
                for row, b in zip(rows, _scalar(i, f"scalar{k}", sbuf, i.src), strict=True)
            ]
    mask = (1 << dst.dtype.bits) - 1
    codes = np.array([[value & mask for value in row] for row in rows], np.uint64)
    vector_model.scatter(sbuf, dst, codes.astype(vector_model.unsigned(dst.dtype)))
