"""Softmax, RMS norm and layer norm over the last axis; each kernel beside its numpy reference.

Rows go on partitions, as many at a time as the machine has, and lie in SBUF as a whole. What is
between loads and stores is float32; inputs and outputs may have any floating-point format.
"""

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import load_row_for_all, spans

__all__ = [
    "layernorm", "layernorm_reference", "rmsnorm", "rmsnorm_reference", "softmax",
    "softmax_reference",
]  # fmt: skip


@nki.jit
def softmax(x):
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along the last axis.

    Parameters
    ----------
    x : HBM tensor ``[rows, columns]``

    Returns
    -------
    HBM tensor like x
    """
    rows, columns = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for first, last in spans(rows, nl.tile_size.pmax):
        tile = nl.load(x[first:last])
        lowered = nl.ndarray((last - first, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(lowered, nl.maximum, tile, axis=1, negate=True)
        powers = nl.ndarray((last - first, columns), nl.float32, buffer=nl.sbuf)
        nisa.activation(powers, nl.exp, tile, bias=lowered)
        total = nl.ndarray((last - first, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(total, nl.add, powers, axis=1)
        nisa.reciprocal(total, total)
        result = nl.ndarray((last - first, columns), x.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(result, powers, nl.multiply, total)
        nl.store(out[first:last], result)
    return out


def softmax_reference(x):
    """Softmax along the last axis in float64."""
    x = np.asarray(x, np.float64)
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@nki.jit
def rmsnorm(x, weight, epsilon=1e-6):
    """``x / sqrt(mean(x * x) + epsilon) * weight`` along the last axis.

    Parameters
    ----------
    x : HBM tensor ``[rows, columns]``
    weight : HBM tensor ``[columns]``
    epsilon : number

    Returns
    -------
    HBM tensor like x
    """
    rows, columns = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    most = min(rows, nl.tile_size.pmax)
    weights = load_row_for_all(weight, most)
    for first, last in spans(rows, most):
        n = last - first
        tile = nl.load(x[first:last])
        squares = nl.ndarray((n, columns), nl.float32, buffer=nl.sbuf)
        nisa.activation(squares, nl.square, tile)
        scale = nl.ndarray((n, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(scale, nl.add, squares, axis=1)
        nisa.tensor_scalar(scale, scale, nl.multiply, 1 / columns, op1=nl.add, operand1=epsilon)
        nisa.activation(scale, nl.rsqrt, scale)
        result = nl.ndarray((n, columns), x.dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(result, tile, nl.multiply, scale, nl.multiply, weights[:n])
        nl.store(out[first:last], result)
    return out


def rmsnorm_reference(x, weight, epsilon=1e-6):
    """RMS norm along the last axis in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


@nki.jit
def layernorm(x, weight, bias, epsilon=1e-5):
    """``(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias`` along the last axis.

    Parameters
    ----------
    x : HBM tensor ``[rows, columns]``
    weight, bias : HBM tensors ``[columns]``
    epsilon : number

    Returns
    -------
    HBM tensor like x
    """
    rows, columns = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    most = min(rows, nl.tile_size.pmax)
    weights, biases = load_row_for_all(weight, most), load_row_for_all(bias, most)
    for first, last in spans(rows, most):
        n = last - first
        tile = nl.load(x[first:last])
        lowered = nl.ndarray((n, 1), nl.float32, buffer=nl.sbuf)  # the mean, negated
        nisa.tensor_reduce(lowered, nl.add, tile, axis=1, negate=True)
        nisa.tensor_scalar(lowered, lowered, nl.multiply, 1 / columns)
        squares = nl.ndarray((n, columns), nl.float32, buffer=nl.sbuf)
        nisa.activation(squares, nl.square, tile, bias=lowered)
        scale = nl.ndarray((n, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(scale, nl.add, squares, axis=1)
        nisa.tensor_scalar(scale, scale, nl.multiply, 1 / columns, op1=nl.add, operand1=epsilon)
        nisa.activation(scale, nl.rsqrt, scale)
        nisa.tensor_scalar(
            squares, tile, nl.add, lowered, op1=nl.multiply, operand1=scale
        )  # fmt: skip
        nisa.tensor_tensor(squares, squares, weights[:n], nl.multiply)
        result = nl.ndarray((n, columns), x.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(result, squares, biases[:n], nl.add)
        nl.store(out[first:last], result)
    return out


def layernorm_reference(x, weight, bias, epsilon=1e-5):
    """Layer norm along the last axis in float64."""
    x, weight, bias = (np.asarray(v, np.float64) for v in (x, weight, bias))
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + epsilon)
    return centred / deviation * weight + bias
