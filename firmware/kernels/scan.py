"""Running sums, and the recurrence of a selective state space model."""

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import spans

__all__ = ["cumsum", "cumsum_reference", "selective_scan", "selective_scan_reference"]

COLUMNS = 2048
"""Most elements of a row in SBUF at a time."""


@nki.jit
def cumsum(x):
    """Running sums along the rows: ``out[i, j] = x[i, 0] + ... + x[i, j]``, in float32.

    Parameters
    ----------
    x : HBM tensor ``[rows, columns]``

    Returns
    -------
    HBM tensor like x
    """
    rows, columns = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for r0, r1 in spans(rows, nl.tile_size.pmax):
        carried = 0.0
        for c0, c1 in spans(columns, COLUMNS):
            shape = (r1 - r0, c1 - c0)
            tile = nl.load(x[r0:r1, c0:c1])
            sums = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
            ones = nl.ndarray((r1 - r0, 1), nl.float32, buffer=nl.sbuf)
            nisa.memset(ones, 1)
            nisa.tensor_tensor_scan(
                sums, ones.broadcast_to(shape), tile, carried, nl.multiply, nl.add
            )
            carried = sums[:, c1 - c0 - 1 : c1 - c0]
            nl.store(out[r0:r1, c0:c1], sums)
    return out


def cumsum_reference(x):
    """Running sums in float64."""
    return np.cumsum(np.asarray(x, np.float64), axis=1)


@nki.jit
def selective_scan(delta, u, a, b, c):
    """The recurrence of a selective state space model (Mamba), one sequence.

    For every channel ``d`` and state ``n``, along the sequence: ``h = exp(delta * a) * h + delta *
    u * b``; the output is the sum over the states of ``c * h``.

    Parameters
    ----------
    delta, u : HBM tensors ``[channels, length]`` float32
    a : HBM tensor ``[channels, states]`` float32
    b, c : HBM tensors ``[states, length]`` float32

    Returns
    -------
    HBM tensor ``[channels, length]`` float32
    """
    (channels, length), states = delta.shape, a.shape[1]
    out = nl.ndarray((channels, length), nl.float32, buffer=nl.shared_hbm)
    for d0, d1 in spans(channels, nl.tile_size.pmax):
        rows, shape = d1 - d0, (d1 - d0, length)
        delta_tile, u_tile, a_tile = nl.load(delta[d0:d1]), nl.load(u[d0:d1]), nl.load(a[d0:d1])
        fed = nl.multiply(delta_tile, u_tile)
        total = nl.zeros(shape, nl.float32, buffer=nl.sbuf)
        for n in nl.affine_range(states):
            b_row = nl.load(b[n : n + 1].broadcast_to((rows, length)))
            c_row = nl.load(c[n : n + 1].broadcast_to((rows, length)))
            decay = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
            nisa.activation(decay, nl.exp, delta_tile, scale=a_tile[:, n : n + 1])
            state = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor_scan(state, decay, nl.multiply(fed, b_row), 0.0, nl.multiply, nl.add)
            nisa.tensor_tensor(state, state, c_row, nl.multiply)
            nisa.tensor_tensor(total, total, state, nl.add)
        nl.store(out[d0:d1], total)
    return out


def selective_scan_reference(delta, u, a, b, c):
    """The recurrence in float64."""
    delta, u, a, b, c = (np.asarray(x, np.float64) for x in (delta, u, a, b, c))
    state, out = np.zeros(a.shape), np.empty(delta.shape)
    for t in range(delta.shape[1]):
        step = delta[:, t, None]
        state = np.exp(step * a) * state + step * u[:, t, None] * b[:, t]
        out[:, t] = state @ c[:, t]
    return out
