"""Loss and optimiser steps; each kernel beside its numpy reference."""

import numbers

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import ceil, spans

__all__ = [
    "adam_corrections", "adam_reference", "adam_step", "cross_entropy", "cross_entropy_reference",
    "dropout", "dropout_reference", "sgd_reference", "sgd_step",
]  # fmt: skip

PIECE = 512
"""Most elements of a parameter in a partition at a time."""
TILES = 16
"""Tiles of that many elements for which SBUF must have room."""


def _count(partitions, columns):
    """A tile with the number of each column, in every partition."""
    tile = nl.ndarray((partitions, columns), nl.float32, buffer=nl.sbuf)
    nisa.memset(tile[:, :1], 0)
    known = 1
    while known < columns:  # what is known, moved up
        n = min(known, columns - known)
        nisa.tensor_scalar(tile[:, known : known + n], tile[:, :n], nl.add, known)
        known += n
    return tile


@nki.jit
def cross_entropy(logits, labels):
    """``log(sum(exp(logits))) - logits[label]`` of each row.

    Parameters
    ----------
    logits : HBM tensor ``[rows, classes]``
        Finite numbers.
    labels : HBM tensor ``[rows]``
        Of an integer format, from 0 to ``classes - 1``.

    Returns
    -------
    HBM tensor ``[rows]`` float32
    """
    rows, classes = logits.shape
    out = nl.ndarray((rows,), nl.float32, buffer=nl.shared_hbm)
    most = min(rows, nl.tile_size.pmax)
    numbers = _count(most, classes)
    for first, last in spans(rows, most):
        n = last - first
        tile = nl.load(logits[first:last])
        label = nl.load(labels.reshape(rows, 1)[first:last], dtype=nl.float32)
        lowered = nl.ndarray((n, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(lowered, nl.maximum, tile, axis=1, negate=True)
        powers = nl.ndarray((n, classes), nl.float32, buffer=nl.sbuf)
        nisa.activation(powers, nl.exp, tile, bias=lowered)
        loss = nl.ndarray((n, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(loss, nl.add, powers, axis=1)
        nisa.activation(loss, nl.log, loss)
        chosen = nl.ndarray((n, classes), nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(chosen, numbers[:n], nl.equal, label, nl.multiply, tile)
        own = nl.ndarray((n, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(own, nl.add, chosen, axis=1)
        nisa.tensor_tensor(loss, loss, lowered, nl.subtract)
        nisa.tensor_tensor(loss, loss, own, nl.subtract)
        nl.store(out.reshape(rows, 1)[first:last], loss)
    return out


def cross_entropy_reference(logits, labels):
    """Cross entropy of each row in float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=1)
    total = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    return total - logits[np.arange(len(logits)), labels]


@nki.jit
def dropout(x, seed, rate=0.5):
    """``x / (1 - rate)`` with zeros for elements chosen with probability ``rate``.

    On one machine the same seed and shape give the same zeros: applied to the gradient of the
    result, the kernel gives the gradient of x. Another size of machine cuts x into other tiles.

    Parameters
    ----------
    x : HBM tensor
    seed : HBM tensor ``[1]`` uint32, or :class:`int`
        As a tensor it is an input, so that one program does for all steps of a training.
    rate : number from 0 to below 1

    Returns
    -------
    HBM tensor
        Of the shape and format of x.
    """
    if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
        raise nki.KernelError(f"dropout: rate = {rate!r} must be a number from 0 to below 1")
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.random_seed(nl.load(seed.reshape(1, 1)) if isinstance(seed, nki.NkiTensor) else seed)
    for piece, target in _pieces(x, out):
        tile = nl.load(piece)
        nisa.dropout(tile, tile, rate)
        nisa.tensor_scalar(tile, tile, nl.multiply, 1 / (1 - rate))
        nl.store(target, tile)
    return out


def dropout_reference(x, kept, rate=0.5):
    """The same in float64 for elements that are kept, a tensor of truth values."""
    return np.where(kept, np.asarray(x, np.float64) / (1 - rate), 0)


def _pieces(*tensors):
    """Views ``[partitions, elements]`` that together are all of tensors of one shape."""
    size, rows = tensors[0].size, nl.tile_size.pmax
    most = min(PIECE, nl.tile_size.total_available_sbuf_size // (TILES * nl.float32.bytes))
    flat = [t.reshape(size) for t in tensors]
    at = 0
    while at < size:
        columns = min(most, max(16, ceil(size - at, rows)), size - at)
        lines = min(rows, (size - at) // columns)
        stop = at + lines * columns
        yield [t[at:stop].reshape(lines, columns) for t in flat]
        at = stop


@nki.jit
def sgd_step(weight, gradient, velocity, rate=0.01, momentum=0.9):
    """One step of stochastic gradient descent with momentum.

    ``velocity' = momentum * velocity + gradient``, ``weight' = weight - rate * velocity'``.

    Parameters
    ----------
    weight, gradient, velocity : HBM tensors of one shape
    rate, momentum : numbers

    Returns
    -------
    weight', velocity' : HBM tensors
        Of the formats of weight and velocity.
    """
    new_weight = nl.ndarray(weight.shape, weight.dtype, buffer=nl.shared_hbm)
    new_velocity = nl.ndarray(velocity.shape, velocity.dtype, buffer=nl.shared_hbm)
    for w, g, v, w_out, v_out in _pieces(weight, gradient, velocity, new_weight, new_velocity):
        w_tile, g_tile, v_tile = (nl.load(t) for t in (w, g, v))
        speed = nl.ndarray(w.shape, nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(speed, v_tile, nl.multiply, momentum, nl.add, g_tile)
        nisa.scalar_tensor_tensor(w_tile, speed, nl.multiply, -rate, nl.add, w_tile)
        nl.store(w_out, w_tile)
        nl.store(v_out, speed)
    return new_weight, new_velocity


def sgd_reference(weight, gradient, velocity, rate=0.01, momentum=0.9):
    """The step in float64."""
    weight, gradient, velocity = (np.asarray(v, np.float64) for v in (weight, gradient, velocity))
    velocity = momentum * velocity + gradient
    return weight - rate * velocity, velocity


def adam_corrections(step, beta1=0.9, beta2=0.999):
    """What :func:`adam_step` takes for step number ``step``, from 1: float32 ``[2]``."""
    return np.array([1 / (1 - beta1**step), 1 / (1 - beta2**step)], np.float32)


@nki.jit
def adam_step(
    weight, gradient, first, second, corrections, rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
):
    """One step of Adam.

    ``first' = beta1 * first + (1 - beta1) * gradient``, likewise ``second'`` with its square,
    ``weight' = weight - rate * first' * c[0] / (sqrt(second' * c[1]) + epsilon)``. What changes
    from step to step is an input, so that one program does for all.

    Parameters
    ----------
    weight, gradient, first, second : HBM tensors of one shape
    corrections : HBM tensor ``[2]`` float32
        :func:`adam_corrections`.
    rate, beta1, beta2, epsilon : numbers

    Returns
    -------
    weight', first', second' : HBM tensors
        Of the formats of weight, first and second.
    """
    outputs = [
        nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm, name=f"new_{t.name}")
        for t in (weight, first, second)
    ]
    rows = nl.tile_size.pmax
    corrected = nl.load(corrections.reshape(1, 2).broadcast_to(rows, 2))
    for w, g, m, v, *targets in _pieces(weight, gradient, first, second, *outputs):
        n = w.shape[0]
        w_tile, g_tile, m_tile, v_tile = (nl.load(t) for t in (w, g, m, v))
        scaled = nl.ndarray(w.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(scaled, g_tile, nl.multiply, 1 - beta1)
        mean = nl.ndarray(w.shape, nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(mean, m_tile, nl.multiply, beta1, nl.add, scaled)
        nisa.scalar_tensor_tensor(
            scaled, g_tile, nl.multiply, 1 - beta2, nl.multiply, g_tile
        )  # fmt: skip
        square = nl.ndarray(w.shape, nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(square, v_tile, nl.multiply, beta2, nl.add, scaled)
        # The step is mean * c0 * rate / (sqrt(square * c1) + epsilon).
        nisa.activation(scaled, nl.sqrt, square, scale=corrected[:n, 1:2])
        nisa.tensor_scalar(scaled, scaled, nl.add, epsilon)
        nisa.reciprocal(scaled, scaled)
        nisa.scalar_tensor_tensor(
            scaled, scaled, nl.multiply, corrected[:n, 0:1], nl.multiply, mean
        )  # fmt: skip
        nisa.scalar_tensor_tensor(w_tile, scaled, nl.multiply, -rate, nl.add, w_tile)
        for target, tile in zip(targets, (w_tile, mean, square), strict=True):
            nl.store(target, tile)
    return tuple(outputs)


def adam_reference(
    weight, gradient, first, second, corrections, rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
):
    """The step in float64."""
    weight, gradient, first, second, corrections = (
        np.asarray(v, np.float64) for v in (weight, gradient, first, second, corrections)
    )
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    step = first * corrections[0] / (np.sqrt(second * corrections[1]) + epsilon)
    return weight - rate * step, first, second
