"""The matmul kernel: programs that give numpy's result under any interleaving."""

import ml_dtypes
import numpy as np
import pytest

from makalu.firmware.kernels.matmul import Blocking, matmul, matmul_reference, plan_blocking
from makalu.rtl.arch.config import SMALL, TINY, TRN

DTYPES = {
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32,
    "fp8_e4m3": ml_dtypes.float8_e4m3, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def integers(rng, shape, dtype):
    return rng.integers(-4, 5, shape).astype(np.float32).astype(dtype)


SHAPES = [
    (1, 1, 1), (4, 4, 16), (8, 8, 16), (3, 5, 7), (5, 9, 18), (16, 4, 16), (33, 17, 40),
    (4, 40, 33), (64, 4, 4), (1, 64, 1), (2, 3, 100), (100, 3, 2), (40, 30, 20), (32, 64, 48),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_gives_the_product_whatever_the_interleaving(machine, shape, dtype):
    m, k, n = shape
    rng = np.random.default_rng(m * 1000 + k * 100 + n)
    a, b = integers(rng, (m, k), DTYPES[dtype]), integers(rng, (k, n), DTYPES[dtype])
    program = matmul.compile(TINY, a, b)
    out = machine(TINY, seed=7 * m + n).run(program, {"a": a, "b": b})["c"]
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))
