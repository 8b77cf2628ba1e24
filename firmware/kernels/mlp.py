"""Two layers of a network with an activation between them."""

import math

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import ceil, load_row_for_all, load_rows, load_transposed, spans

__all__ = ["mlp", "mlp_reference"]


@nki.jit
def mlp(x, w1, b1, w2, b2, function=nl.gelu):
    """``function(x @ w1 + b1) @ w2 + b2``.

    The hidden layer is computed transposed: then its bias is a number for each partition, which the
    scalar engine adds, and the second product needs no transpose. Weights stay in SBUF.

    Parameters
    ----------
    x : HBM tensor ``[rows, inputs]``
    w1 : HBM tensor ``[inputs, hidden]``
    b1 : HBM tensor ``[hidden]``
    w2 : HBM tensor ``[hidden, outputs]``
    b2 : HBM tensor ``[outputs]``
    function : function of ``nki.language``

    Returns
    -------
    HBM tensor ``[rows, outputs]`` of the format of x
    """
    (rows, inputs), (hidden, outputs) = x.shape, w2.shape
    most = nl.tile_size.pmax
    out = nl.ndarray((rows, outputs), x.dtype, buffer=nl.shared_hbm)
    w1_tile, w2_tile = load_rows(w1), load_rows(w2)
    b1_tile = nl.ndarray((min(hidden, most), ceil(hidden, most)), nl.float32, buffer=nl.sbuf)
    for i, (h0, h1) in enumerate(spans(hidden, most)):
        nisa.dma_copy(b1_tile[: h1 - h0, i : i + 1], b1.reshape(hidden, 1)[h0:h1])
    b2_tile = load_row_for_all(b2, min(rows, most))
    for r0, r1 in spans(rows, most):
        m = r1 - r0
        x_tile = load_transposed(x[r0:r1])
        h_tile = nl.ndarray((min(hidden, most), ceil(hidden, most), m), x.dtype, buffer=nl.sbuf)
        for i, (h0, h1) in enumerate(spans(hidden, most)):
            sums = nl.ndarray((h1 - h0, m), nl.float32, buffer=nl.psum)
            for j, (k0, k1) in enumerate(spans(inputs, most)):
                nisa.nc_matmul(sums, w1_tile[: k1 - k0, j, h0:h1], x_tile[: k1 - k0, j])
            bias = b1_tile[: h1 - h0, i : i + 1]
            nisa.activation(h_tile[: h1 - h0, i], function, sums, bias=bias)
        result = nl.ndarray((m, outputs), x.dtype, buffer=nl.sbuf)
        for n0, n1 in spans(outputs, nl.tile_size.gemm_moving_fmax):
            sums = nl.ndarray((m, n1 - n0), nl.float32, buffer=nl.psum)
            for i, (h0, h1) in enumerate(spans(hidden, most)):
                nisa.nc_matmul(sums, h_tile[: h1 - h0, i], w2_tile[: h1 - h0, i, n0:n1])
            nisa.tensor_tensor(result[:, n0:n1], sums, b2_tile[:m, n0:n1], nl.add)
        nl.store(out[r0:r1], result)
    return out


def mlp_reference(x, w1, b1, w2, b2):
    """The two layers in float64, with GELU between them."""
    x, w1, b1, w2, b2 = (np.asarray(v, np.float64) for v in (x, w1, b1, w2, b2))
    hidden = x @ w1 + b1
    hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    return hidden @ w2 + b2
