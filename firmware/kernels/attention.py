"""Attention of one head, block by block, and rotary embedding.

``softmax(q @ k.T * scale) @ v`` without ever holding a whole row of scores: every block of keys
brings its own maximum, and what was summed so far is scaled down when the maximum grows.
"""

import math

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import ceil, load_rows, load_transposed, spans

__all__ = ["attention", "attention_reference", "rotary", "rotary_reference"]

HIDDEN = -1e30
"""Score of keys that a query must not see: their powers are zero."""
KEY_TILES = 4
"""Most tiles of keys in a block."""


@nki.jit
def attention(q, k, v, causal=False, scale=None):
    """``softmax(q @ k.T * scale) @ v``.

    Parameters
    ----------
    q : HBM tensor ``[queries, depth]``
    k : HBM tensor ``[keys, depth]``
    v : HBM tensor ``[keys, width]``
        All of one floating-point format; width at most ``nl.tile_size.psum_fmax``.
    causal : :class:`bool`
        A query sees the keys up to its own: the last query all, the one before all but one, ...
    scale : number or ``None``
        ``None`` is ``1 / sqrt(depth)``.

    Returns
    -------
    HBM tensor ``[queries, width]`` of their format
    """
    (queries, depth), (keys, width) = q.shape, v.shape
    if causal and keys < queries:
        raise nki.KernelError(f"causal attention needs a key for each query, not {k} for {q}")
    scale = 1 / math.sqrt(depth) if scale is None else scale
    rows = nl.tile_size.pmax
    block = rows * min(KEY_TILES, nl.tile_size.psum_fmax // rows, ceil(keys, rows))
    out = nl.ndarray((queries, width), q.dtype, buffer=nl.shared_hbm)
    for q0, q1 in spans(queries, rows):
        m = q1 - q0
        q_tile = load_transposed(q[q0:q1])
        last_key = keys - queries + q1 if causal else keys  # and one more
        state = None
        for k0, k1 in spans(min(keys, last_key), block):
            # Key j of the block is seen by query i if i - j + lead >= 0.
            lead = keys - queries + q0 - k0 if causal else k1 - k0
            state = _attend(q_tile, m, k, v, k0, k1, scale, lead, state)
        assert state is not None, "there is a key"
        _, total, sums = state
        nisa.reciprocal(total, total)
        result = nl.ndarray((m, width), q.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(result, sums, nl.multiply, total)
        nl.store(out[q0:q1], result)
    return out


def _attend(q_tile, m, k, v, k0, k1, scale, lead, state):
    """Take one block of keys in; return the state after it.

    The state is, for each query, its maximum so far (negated), the sum of the powers, and the sum
    of the values weighted by them.
    """
    rows, width = nl.tile_size.pmax, v.shape[1]
    n, depth = k1 - k0, k.shape[1]
    k_tile, v_tile = load_transposed(k[k0:k1]), load_rows(v[k0:k1])
    scores = nl.ndarray((m, n), nl.float32, buffer=nl.psum)
    for i, (d0, d1) in enumerate(spans(depth, rows)):
        nisa.nc_matmul(scores, q_tile[: d1 - d0, i], k_tile[: d1 - d0, i])
    scaled = nl.ndarray((m, n), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(scaled, scores, nl.multiply, scale)
    if lead < n - 1:
        nisa.affine_select(scaled, [[-1, n]], lead, 1, scaled, HIDDEN, nl.greater_equal)

    lowered = nl.ndarray((m, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(lowered, nl.maximum, scaled, axis=1, negate=True)
    if state is not None:
        nisa.tensor_tensor(lowered, lowered, state[0], nl.minimum)
    powers = nl.ndarray((m, n), v.dtype, buffer=nl.sbuf)
    nisa.activation(powers, nl.exp, scaled, bias=lowered)
    total = nl.ndarray((m, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(total, nl.add, powers, axis=1)

    products = nl.ndarray((m, width), nl.float32, buffer=nl.psum)
    for i, (first, last) in enumerate(spans(n, rows)):
        turned = nl.ndarray((last - first, m), v.dtype, buffer=nl.sbuf)
        nisa.nc_transpose(turned, powers[:, first:last])
        nisa.nc_matmul(products, turned, v_tile[: last - first, i])
    sums = nl.ndarray((m, width), nl.float32, buffer=nl.sbuf)
    if state is None:
        nisa.tensor_copy(sums, products)
        return lowered, total, sums
    shrink = nl.ndarray((m, 1), nl.float32, buffer=nl.sbuf)
    nisa.activation(shrink, nl.exp, state[0], scale=-1.0, bias=lowered)
    nisa.scalar_tensor_tensor(total, state[1], nl.multiply, shrink, nl.add, total)
    nisa.scalar_tensor_tensor(sums, state[2], nl.multiply, shrink, nl.add, products)
    return lowered, total, sums


def attention_reference(q, k, v, causal=False, scale=None):
    """Attention of one head in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = q @ k.T * (1 / math.sqrt(q.shape[1]) if scale is None else scale)
    if causal:
        own = np.arange(len(q))[:, None] + len(k) - len(q)
        scores = np.where(np.arange(len(k)) <= own, scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True) @ v


@nki.jit
def rotary(x, cosines, sines):
    """Rotate pairs ``(x[i, j], x[i, j + half])`` by angle ``[i, j]``, for all positions ``i``.

    Parameters
    ----------
    x : HBM tensor ``[positions, 2 * half]``
    cosines, sines : HBM tensors ``[positions, half]``

    Returns
    -------
    HBM tensor like x
    """
    positions, half = cosines.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for first, last in spans(positions, nl.tile_size.pmax):
        n = last - first
        tile, c, s = (nl.load(t[first:last]) for t in (x, cosines, sines))
        left, right = tile[:, :half], tile[:, half:]
        result = nl.ndarray((n, 2 * half), x.dtype, buffer=nl.sbuf)
        for target, a, b, op in (
            (result[:, :half], left, right, nl.subtract),
            (result[:, half:], right, left, nl.add),
        ):
            kept = nl.ndarray((n, half), nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(kept, a, c, nl.multiply)
            crossed = nl.ndarray((n, half), nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(crossed, b, s, nl.multiply)
            nisa.tensor_tensor(target, kept, crossed, op)
        nl.store(out[first:last], result)
    return out


def rotary_reference(x, cosines, sines):
    """Rotary embedding in float64."""
    x, c, s = (np.asarray(v, np.float64) for v in (x, cosines, sines))
    left, right = np.split(x, 2, axis=1)
    return np.concatenate([left * c - right * s, right * c + left * s], axis=1)
