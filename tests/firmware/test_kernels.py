"""The kernels of ``firmware/kernels`` on the golden model, against numpy in float64.

An error is the largest difference from the reference, relative to the largest number of it. What a
kernel may err is :data:`ALLOWED`: the kernels compute in float32, so with BF16 it is the rounding
of inputs between two instructions and of outputs, at most 2**-9 each, a few times.
"""

import makalu
import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels import attention as heads
from makalu.firmware.kernels import mlp as layers
from makalu.firmware.kernels import normalization as norms
from makalu.firmware.kernels import training, vision
from makalu.nki import KernelError, TensorSpec
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.arch.formats import BF16, format_of
from makalu.rtl.arch.isa import AluOp, Function, ReduceOp
from makalu.sim.activation import evaluate
from makalu.sim.arithmetic import fma32
from makalu.sim.elementwise import operate, reduce_rows
from makalu.sim.golden import GoldenCore, cast_in, cast_out

ALLOWED = {np.float32: 2e-6, ml_dtypes.bfloat16: 8e-3}
both_formats = pytest.mark.parametrize("dtype", ALLOWED, ids=["fp32", "bf16"])


@pytest.fixture(scope="module", params=[TINY, SMALL], ids=lambda c: c.name)
def dev(request):
    with makalu.open(request.param, "golden", hbm=1 << 22) as device:
        yield device


@pytest.fixture
def some(dtype):
    """Normally distributed numbers of a shape in the format of the test."""
    rng = np.random.default_rng(1)
    return lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(dtype)


def check(got, want, dtype):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for found, wanted in zip(got, want, strict=True):
        assert found.shape == wanted.shape
        error = np.abs(found.astype(np.float64) - wanted).max()
        assert error <= ALLOWED[dtype] * np.abs(wanted).max()


# Shapes are functions of the number of partitions: a tile, more and less than tiles, one element.
ROWS = {
    "a tile": lambda p: (p, 8),
    "ragged": lambda p: (2 * p + 1, 13),
    "one column": lambda p: (3, 1),
}


@both_formats
@pytest.mark.parametrize("shape", ROWS)
def test_softmax(dev, some, dtype, shape):
    x = some(*ROWS[shape](dev.config.partitions), scale=5)
    got = dev.run(norms.softmax, x)
    check(got, norms.softmax_reference(x), dtype)
    # To the bit
    bits, one, minus_zero = cast_in(x, format_of(dtype)), np.float32(1), np.float32(-0.0)
    lowered = reduce_rows(ReduceOp.MAX, bits)[:, None] ^ np.uint32(1 << 31)
    powers = evaluate(Function.EXP, fma32(bits.view(np.float32), one, lowered.view(np.float32)))
    powers = powers.view(np.uint32)
    total = reduce_rows(ReduceOp.ADD, powers)[:, None].view(np.float32)
    total = evaluate(Function.RECIPROCAL, fma32(total, one, minus_zero)).view(np.uint32)
    want = cast_out(operate(AluOp.MULTIPLY, powers, total), format_of(dtype), False)
    assert got.tobytes() == want.tobytes()


@both_formats
@pytest.mark.parametrize("shape", ROWS)
def test_rmsnorm(dev, some, dtype, shape):
    rows, columns = ROWS[shape](dev.config.partitions)
    x, weight = some(rows, columns), some(columns)
    check(dev.run(norms.rmsnorm, x, weight), norms.rmsnorm_reference(x, weight), dtype)


@both_formats
@pytest.mark.parametrize("shape", ROWS)
def test_layernorm(dev, some, dtype, shape):
    rows, columns = ROWS[shape](dev.config.partitions)
    x, weight, bias = some(rows, columns) + dtype(2), some(columns), some(columns)
    got = dev.run(norms.layernorm, x, weight, bias)
    check(got, norms.layernorm_reference(x, weight, bias), dtype)


# Queries, keys, depth, width
HEADS = {
    "a tile": lambda p: (p, p, p, p),
    "ragged": lambda p: (2 * p + 1, 2 * p + 1, p + 2, 5),
    "more keys than a block": lambda p: (p + 3, 9 * p + 2, 3, p),
    "one query": lambda p: (1, 2 * p, 4, 4),
}


@both_formats
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("shape", HEADS)
def test_attention(dev, some, dtype, shape, causal):
    queries, keys, depth, width = HEADS[shape](dev.config.partitions)
    q, k, v = some(queries, depth, scale=2), some(keys, depth), some(keys, width)
    got = dev.run(heads.attention, q, k, v, causal=causal)
    check(got, heads.attention_reference(q, k, v, causal), dtype)


def test_causal_attention_needs_a_key_for_each_query():
    spec = [TensorSpec((n, 4), "bf16") for n in (5, 4, 4)]
    with pytest.raises(KernelError, match="a key for each query"):
        heads.attention.compile(TINY, *spec, causal=True)


@both_formats
def test_rotary(dev, some, dtype):
    rows = dev.config.partitions + 3
    x, angles = some(rows, 10), some(rows, 5).astype(np.float64)
    c, s = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    got = dev.run(heads.rotary, x, c, s)
    check(got, heads.rotary_reference(x, c, s), dtype)
    # To the bit: every product rounds to float32, the sum rounds to float32 and to the format.
    left, right, c, s = (
        cast_in(part, BF16) if dtype is not np.float32 else part.view(np.uint32)
        for part in (*(np.ascontiguousarray(h) for h in np.split(x, 2, axis=1)), c, s)
    )
    lc, ls, rc, rs = (
        operate(AluOp.MULTIPLY, u, v) for u, v in ((left, c), (left, s), (right, c), (right, s))
    )
    want = operate(AluOp.SUBTRACT, lc, rs), operate(AluOp.ADD, rc, ls)
    want = np.concatenate(want, axis=1)
    if dtype is not np.float32:
        want = cast_out(want, BF16, False)
    assert got.tobytes() == want.tobytes()


# Rows, inputs, hidden, outputs
LAYERS = {
    "a tile": lambda p: (p, p, p, p),
    "ragged": lambda p: (2 * p + 1, p + 3, 2 * p + 1, 5 * p + 1),
}


@both_formats
@pytest.mark.parametrize("shape", LAYERS)
def test_mlp(dev, some, dtype, shape):
    rows, inputs, hidden, outputs = LAYERS[shape](dev.config.partitions)
    arguments = (
        some(rows, inputs), some(inputs, hidden, scale=inputs**-0.5), some(hidden),
        some(hidden, outputs, scale=hidden**-0.5), some(outputs),
    )  # fmt: skip
    check(dev.run(layers.mlp, *arguments), layers.mlp_reference(*arguments), dtype)


# Images, channels, height, width; filters, kernel; stride, padding
IMAGES = {
    "a tile": lambda p: ((1, p, 5, 5), (p, 3, 3), 1, 0),
    "ragged": lambda p: ((2, p + 1, 6, 5), (p + 2, 3, 2), 2, 1),
    "one pixel": lambda p: ((1, 1, 4, 4), (1, 1, 1), 1, 0),
}


@both_formats
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", IMAGES)
def test_conv2d(dev, some, dtype, shape, with_bias):
    images, (filters, *kernel), stride, padding = IMAGES[shape](dev.config.partitions)
    x, weight = some(*images), some(filters, images[1], *kernel)
    bias = some(filters) if with_bias else None
    got = dev.run(vision.conv2d, x, weight, bias, stride=stride, padding=padding)
    check(got, vision.conv2d_reference(x, weight, bias, stride, padding), dtype)


# Shape, kernel, stride
POOLS = {
    "windows side by side": lambda p: ((p + 1, 6, 6), 2, None),
    "overlapping": lambda p: ((2, p, 7, 5), 3, 1),
    "with a gap": lambda p: ((3, 5, 7), 2, 3),
}


@both_formats
@pytest.mark.parametrize("shape", POOLS)
def test_pooling(dev, some, dtype, shape):
    size, kernel, stride = POOLS[shape](dev.config.partitions)
    x = some(*size)
    got = dev.run(vision.max_pool2d, x, kernel, stride)
    np.testing.assert_array_equal(got, vision.pool2d_reference(x, np.max, kernel, stride))
    got = dev.run(vision.average_pool2d, x, kernel, stride)
    check(got, vision.pool2d_reference(x, np.mean, kernel, stride), dtype)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(KernelError, match="a window of 3 does not fit into 2 elements"):
        vision.max_pool2d.compile(TINY, TensorSpec((1, 4, 2), "fp32"), 3)
    with pytest.raises(KernelError, match="do not have the channels of"):
        vision.conv2d.compile(
            TINY, TensorSpec((1, 2, 4, 4), "fp32"), TensorSpec((1, 3, 2, 2), "fp32")
        )
    with pytest.raises(KernelError, match="a row of 18 results does not fit 16"):
        vision.conv2d.compile(
            TINY, TensorSpec((1, 1, 1, 18), "fp32"), TensorSpec((1, 1, 1, 1), "fp32")
        )


@both_formats
@pytest.mark.parametrize(
    "shape", [lambda p: (p, 10), lambda p: (2 * p + 1, 37), lambda p: (1, 2)],
    ids=["a tile", "ragged", "one row"],
)  # fmt: skip
def test_cross_entropy(dev, some, dtype, shape):
    rows, classes = shape(dev.config.partitions)
    logits = some(rows, classes, scale=3)
    labels = np.random.default_rng(2).integers(0, classes, rows).astype(np.int32)
    got = dev.run(training.cross_entropy, logits, labels)
    check(got, training.cross_entropy_reference(logits, labels), np.float32)


PARAMETERS = {
    "a tile": lambda p: (p, 3), "three axes": lambda p: (7, 11, 3), "one": lambda p: (1,),
    "ragged": lambda p: (p * 25 + 3,),
}  # fmt: skip


@both_formats
@pytest.mark.parametrize("shape", PARAMETERS)
def test_sgd(dev, some, dtype, shape):
    size = PARAMETERS[shape](dev.config.partitions)
    arguments = [some(*size) for _ in range(3)]
    got = dev.run(training.sgd_step, *arguments, rate=0.05, momentum=0.8)
    check(got, training.sgd_reference(*arguments, rate=0.05, momentum=0.8), dtype)
    if dtype is np.float32:  # to the bit
        w, g, v = arguments
        v = np.float32(0.8) * v + g
        assert got[1].tobytes() == v.tobytes()
        assert got[0].tobytes() == (np.float32(-0.05) * v + w).tobytes()


@both_formats
@pytest.mark.parametrize("shape", PARAMETERS)
def test_adam(dev, some, dtype, shape):
    size = PARAMETERS[shape](dev.config.partitions)
    arguments = (*(some(*size) for _ in range(3)), np.abs(some(*size)))
    corrections = training.adam_corrections(3)
    got = dev.run(training.adam_step, *arguments, corrections)
    check(got, training.adam_reference(*arguments, corrections), dtype)


# Order --------------------------------------------------------------------------------------------


def shuffled(config, program, inputs, seed):
    """Outputs of a program on a golden core whose queues take turns at random."""
    core, at, addresses = GoldenCore(config, 1 << 21, shuffle=seed, fill=0xFF), 256, {}
    for info in program.tensors:
        addresses[info.name] = at
        at += -(-info.nbytes // 64) * 64
    base = -(-at // 128) * 128
    image, queues = program.link(base, addresses)
    core.hbm[base : base + len(image)] = np.frombuffer(image, np.uint8)
    for name in program.inputs:
        raw = np.ascontiguousarray(inputs[name]).view(np.uint8).reshape(-1)
        core.hbm[addresses[name] : addresses[name] + len(raw)] = raw
    core.run(queues)
    return [
        core.hbm[addresses[name] : addresses[name] + program.tensor(name).nbytes].tobytes()
        for name in program.outputs
    ]


def test_convolution_under_random_interleavings(machine):
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (2, 5, 6, 5)).astype(np.float32)
    weight = rng.integers(-3, 4, (6, 5, 3, 2)).astype(np.float32)
    bias = rng.integers(-3, 4, 6).astype(np.float32)
    program = vision.conv2d.compile(TINY, x, weight, bias, stride=2, padding=1)
    want = vision.conv2d_reference(x, weight, bias, stride=2, padding=1)
    for seed in range(3):
        got = machine(TINY, seed).run(program, {"x": x, "weight": weight, "bias": bias})["out"]
        np.testing.assert_array_equal(got, want)


def test_attention_does_not_depend_on_the_order_of_queues():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 6)).astype(ml_dtypes.bfloat16) for n in (9, 21, 21))
    inputs = {"q": q, "k": k, "v": v}
    program = heads.attention.compile(TINY, q, k, v, causal=True)
    want = shuffled(TINY, program, inputs, None)
    for seed in range(8):
        assert shuffled(TINY, program, inputs, seed) == want


def test_kernels_compile_for_the_full_machine():
    def spec(*shape, dtype="bf16"):
        return TensorSpec(shape, dtype)

    program = heads.attention.compile(
        TRN, spec(512, 128), spec(512, 128), spec(512, 128), causal=True
    )
    assert program.stats["macs"] >= 2 * 128 * 512 * 512 / 2
    assert set(program.stats["instructions"]) == {"PE", "DVE", "ACT", "POOL", "SP"}
    norms.softmax.compile(TRN, spec(256, 4096))
    norms.layernorm.compile(TRN, spec(200, 1024), spec(1024), spec(1024))
    layers.mlp.compile(TRN, spec(128, 512), spec(512, 512), spec(512), spec(512, 512), spec(512))
    vision.conv2d.compile(TRN, spec(1, 128, 32, 32), spec(128, 128, 3, 3), padding=1)
    training.adam_step.compile(TRN, *[spec(1000, 300)] * 4, spec(2, dtype="fp32"))
