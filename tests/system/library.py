"""Calls of the kernel library as a user makes them: operands, references, what they may err."""

from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
from makalu.firmware.kernels import attention as heads
from makalu.firmware.kernels import mlp as layers
from makalu.firmware.kernels import normalization as norms
from makalu.firmware.kernels import scan, selection, training, vision

__all__ = ["Call", "calls"]

ALLOWED = {"float32": 3e-6, "bfloat16": 1e-2}
"""Greatest difference from float64, relative to the greatest number of the reference."""


@dataclass(frozen=True)
class Call:
    """A kernel, what makes its operands, and what they should give.

    Parameters
    ----------
    name : :class:`str`
        Kernel and operands, for people and for the recorded figures.
    kernel : :class:`~makalu.firmware.nki.Kernel`
    operands : callable
        ``operands(rng)`` returns the arguments.
    reference : callable
        The same in float64 of numpy.
    allowed : :class:`float`
    """

    name: str
    kernel: object
    operands: object
    reference: object
    allowed: float

    def __str__(self):
        return self.name

    def error(self, got, args):
        """Greatest difference from the reference, relative to its greatest number."""
        want = self.reference(*args)
        pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True)
        return max(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max() for a, b in pairs)


def calls(machine):
    """The calls for ``"SMALL"`` or ``"TRN"``."""
    large = machine == "TRN"

    def normal(rng, *shape, dtype=np.float32, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(dtype)

    def call(kernel, title, operands, reference, dtype=np.float32, **options):
        name = np.dtype(dtype).name
        return Call(
            f"{kernel.__name__}, {title}, {name}",
            partial_kernel(kernel, options),
            partial(operands, dtype=dtype),
            partial(reference, **options),
            ALLOWED[name],
        )

    rows, columns = (128, 512) if large else (16, 64)
    for dtype in (np.float32, ml_dtypes.bfloat16):

        def matrix(rng, dtype):
            return (normal(rng, rows, columns, dtype=dtype, scale=3),)

        yield call(norms.softmax, f"{rows} x {columns}", matrix, norms.softmax_reference, dtype)

    def normed(rng, dtype):
        return normal(rng, rows, columns, dtype=dtype), normal(rng, columns, dtype=dtype)

    yield call(norms.rmsnorm, f"{rows} x {columns}", normed, norms.rmsnorm_reference)
    yield call(
        norms.layernorm, f"{rows} x {columns}",
        lambda rng, dtype: (*normed(rng, dtype), normal(rng, columns, dtype=dtype)),
        norms.layernorm_reference,
    )  # fmt: skip

    length, depth = (512, 64) if large else (40, 8)

    def heads_of(rng, dtype):
        return tuple(normal(rng, length, depth, dtype=dtype) for _ in range(3))

    for dtype in (np.float32, ml_dtypes.bfloat16):
        for causal in (False, True):
            title = f"sequence {length}, head {depth}" + ", causal" * causal
            yield call(
                heads.attention, title, heads_of, heads.attention_reference, dtype, causal=causal
            )

    def angles(rng, dtype):
        turned = normal(rng, length, depth // 2).astype(np.float64)
        x = normal(rng, length, depth, dtype=dtype)
        return x, np.cos(turned).astype(dtype), np.sin(turned).astype(dtype)

    yield call(heads.rotary, f"{length} x {depth}", angles, heads.rotary_reference)

    inputs, hidden = (256, 512) if large else (24, 40)

    def layer(rng, dtype):
        return (
            normal(rng, rows, inputs, dtype=dtype),
            normal(rng, inputs, hidden, dtype=dtype, scale=inputs**-0.5),
            normal(rng, hidden, dtype=dtype),
            normal(rng, hidden, inputs, dtype=dtype, scale=hidden**-0.5),
            normal(rng, inputs, dtype=dtype),
        )

    title = f"{rows} x {inputs} x {hidden} x {inputs}"
    yield call(layers.mlp, title, layer, layers.mlp_reference, ml_dtypes.bfloat16)

    channels, size = (64, 16) if large else (12, 8)

    def image(rng, dtype):
        return (
            normal(rng, 1, channels, size, size, dtype=dtype),
            normal(rng, channels, channels, 3, 3, dtype=dtype),
        )

    title = f"{channels} x {size} x {size}"
    yield call(vision.conv2d, f"{title}, 3 x 3", image, vision.conv2d_reference, ml_dtypes.bfloat16)
    pooled = lambda rng, dtype: (normal(rng, channels, size, size, dtype=dtype),)  # noqa: E731
    for kernel, reduce in ((vision.max_pool2d, np.max), (vision.average_pool2d, np.mean)):
        yield call(kernel, title, pooled, partial(_pooled, reduce))

    yield call(
        scan.cumsum, f"{rows} x {columns}",
        lambda rng, dtype: (normal(rng, rows, columns, dtype=dtype),), scan.cumsum_reference,
    )  # fmt: skip
    for k in (8, 64 if large else 16):
        yield call(
            selection.topk, f"{rows} x {columns}, k = {k}",
            lambda rng, dtype: (normal(rng, rows, columns, dtype=dtype),),
            selection.topk_reference, k=k,
        )  # fmt: skip
    states = 16 if large else 4

    def sequence(rng, dtype):
        return (
            np.abs(normal(rng, rows, columns, dtype=dtype, scale=0.1)),
            normal(rng, rows, columns, dtype=dtype),
            -np.abs(normal(rng, rows, states, dtype=dtype)),
            *(normal(rng, states, columns, dtype=dtype) for _ in range(2)),
        )

    yield call(
        scan.selective_scan, f"{rows} x {columns}, state {states}", sequence,
        scan.selective_scan_reference,
    )  # fmt: skip

    def scored(rng, dtype):
        labels = rng.integers(0, columns, rows).astype(np.int32)
        return normal(rng, rows, columns, dtype=dtype, scale=3), labels

    yield call(
        training.cross_entropy, f"{rows} x {columns}", scored, training.cross_entropy_reference
    )

    def step(rng, dtype, count):
        found = [normal(rng, rows, columns, dtype=dtype) for _ in range(count)]
        return (*found[:3], *(np.abs(f) for f in found[3:]))

    yield call(
        training.sgd_step, f"{rows} x {columns}", partial(step, count=3), training.sgd_reference
    )
    yield call(
        training.adam_step, f"{rows} x {columns}",
        lambda rng, dtype: (*step(rng, dtype, 4), training.adam_corrections(3)),
        training.adam_reference,
    )  # fmt: skip


def partial_kernel(kernel, options):
    """The kernel with options, for ``Device.run``."""
    return lambda dev, *args: dev.run(kernel, *args, **options)


def _pooled(reduce, x):
    return vision.pool2d_reference(x, reduce)
