"""What the engines compute with two elements, in numpy: :class:`~..rtl.arch.isa.AluOp`.

Elements are bits of 32: binary32 numbers, or plain bits for the bitwise operations.
"""

import numpy as np

from ..rtl.arch.formats import CANONICAL_NAN
from ..rtl.arch.isa import BITWISE_OPS, AluOp, ReduceOp

__all__ = ["compare_with_zero", "operate", "operate_integers", "reduce_rows"]

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
_INTEGER = {
    AluOp.ADD: np.add,
    AluOp.SUBTRACT: np.subtract,
    AluOp.MULTIPLY: np.multiply,
    AluOp.MAX: np.maximum,
    AluOp.MIN: np.minimum,
    AluOp.ABS_MAX: lambda a, b: np.maximum(np.abs(a), np.abs(b)),
    AluOp.ABS_MIN: lambda a, b: np.minimum(np.abs(a), np.abs(b)),
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


def operate_integers(op, a, b, *, signed):
    """``a op b`` modulo 2**32, as :class:`~..rtl.arch.isa.IntegerTensorTensor` says.

    Parameters
    ----------
    op : :class:`AluOp`
    a, b : uint32 arrays that broadcast
    signed : :class:`bool`
        They are int32.

    Returns
    -------
    uint32 array
    """
    op = AluOp(op)
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    x, y = (v.astype(np.int32 if signed else np.uint32).astype(np.int64) for v in (a, b))
    if op == AluOp.BYPASS:
        return a.copy()
    if op in _PREDICATES:
        return _PREDICATES[op](x, y).astype(np.uint32)
    if op == AluOp.RIGHT_SHIFT:
        return (x >> np.minimum(b, 63)).astype(np.uint32)
    if op in BITWISE_OPS:
        return _BITWISE[op](a, b).astype(np.uint32)
    return _INTEGER[op](x, y).astype(np.uint32)


def compare_with_zero(compare, values):
    """Whether the int32 ``values`` compare true with 0: a :class:`~..rtl.arch.isa.Compare`."""
    return _PREDICATES[AluOp(compare)](values, np.int32(0))


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
