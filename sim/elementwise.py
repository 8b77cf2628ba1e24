"""What the vector engine computes with two elements, in numpy: :class:`~..rtl.arch.isa.AluOp`.

Elements are bits of 32: binary32 numbers, or plain bits for the bitwise operations.
"""

import numpy as np

from ..rtl.arch.formats import CANONICAL_NAN
from ..rtl.arch.isa import BITWISE_OPS, AluOp, ReduceOp

__all__ = ["operate", "reduce_rows"]

_ONE = np.uint32(0x3F800000)


def _greater(a, b):
    """``a > b`` in the order of numbers in which -0 comes before +0. No NaN."""
    return (a > b) | ((a == b) & np.signbit(b) & ~np.signbit(a))


def _larger(a, b):
    return np.where(_greater(a, b), a, b)


def _smaller(a, b):
    return np.where(_greater(a, b), b, a)


_ARITHMETIC = {
    AluOp.ADD: np.add,
    AluOp.SUBTRACT: np.subtract,
    AluOp.MULTIPLY: np.multiply,
    AluOp.MAX: _larger,
    AluOp.MIN: _smaller,
    AluOp.ABS_MAX: lambda a, b: _larger(np.abs(a), np.abs(b)),
    AluOp.ABS_MIN: lambda a, b: _smaller(np.abs(a), np.abs(b)),
}
_PREDICATES = {
    AluOp.EQUAL: np.equal,
    AluOp.NOT_EQUAL: np.not_equal,
    AluOp.GREATER_EQUAL: np.greater_equal,
    AluOp.GREATER: np.greater,
    AluOp.LESS_EQUAL: np.less_equal,
    AluOp.LESS: np.less,
    AluOp.LOGICAL_AND: np.logical_and,
    AluOp.LOGICAL_OR: np.logical_or,
    AluOp.LOGICAL_XOR: np.logical_xor,
}
_BITWISE = {
    AluOp.BITWISE_AND: np.bitwise_and,
    AluOp.BITWISE_OR: np.bitwise_or,
    AluOp.BITWISE_XOR: np.bitwise_xor,
    AluOp.BITWISE_NOT: lambda a, b: ~a,
    AluOp.LEFT_SHIFT: lambda a, b: np.where(b < 32, a << (b & 31), 0),
    AluOp.RIGHT_SHIFT: lambda a, b: np.where(b < 32, a >> (b & 31), 0),
}


def operate(op, a, b):
    """``a op b`` element by element.

    Parameters
    ----------
    op : :class:`AluOp`
    a, b : uint32 arrays that broadcast
        Bits of binary32 numbers, or bits.

    Returns
    -------
    uint32 array
    """
    op = AluOp(op)
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    if op == AluOp.BYPASS:
        return a.copy()
    if op in BITWISE_OPS:
        return _BITWISE[op](a, b).astype(np.uint32)
    x = np.ascontiguousarray(a).view(np.float32)
    y = np.ascontiguousarray(b).view(np.float32)
    with np.errstate(all="ignore"):
        if op in _PREDICATES:
            return np.where(_PREDICATES[op](x, y), _ONE, np.uint32(0))
        result = np.ascontiguousarray(_ARITHMETIC[op](x, y))
        if op not in (AluOp.ADD, AluOp.SUBTRACT, AluOp.MULTIPLY):
            result = np.where(np.isnan(x) | np.isnan(y), np.float32(np.nan), result)
    bits = result.view(np.uint32)
    return np.where(np.isnan(result), np.uint32(CANONICAL_NAN), bits)


def reduce_rows(op, rows):
    """Reduce the last axis: ``even op odd``, as :class:`~..rtl.arch.isa.TensorReduce` says.

    Parameters
    ----------
    op : :class:`ReduceOp`
    rows : uint32 array ``[..., elements]``
        At least one element.

    Returns
    -------
    uint32 array ``[...]``
    """
    identity = np.full(rows.shape[:-1], ReduceOp(op).identity, np.uint32)
    partial = [identity, identity]
    for i in range(rows.shape[-1]):
        partial[i % 2] = operate(op, partial[i % 2], rows[..., i])
    return partial[0] if rows.shape[-1] == 1 else operate(op, *partial)
