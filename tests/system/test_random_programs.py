"""Random legal programs: every byte of every memory as the golden model has it."""

from dataclasses import replace

import numpy as np
import pytest
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.formats import BF16, FP32
from makalu.rtl.arch.isa import (
    INSTRUCTIONS,
    AccessPattern,
    Activation,
    AluOp,
    Compare,
    Function,
    IntegerTensorScalar,
    LoadStationary,
    MatmulMoving,
    ReduceOp,
    Rng,
    ScalarTensorTensor,
    Space,
    TensorReduce,
    TensorScalar,
    TensorTensorScan,
    decode,
)
from makalu.sim.golden import GoldenCore
from programs import HBM_BYTES, Image, random_program
from runs import compare, fill

pytestmark = [pytest.mark.xdist_group("tiny_devices")]

BATCHES, PROGRAMS = 12, 30


@pytest.mark.verilator
@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_byte_is_that_of_the_model(tiny, seed, batch):
    runner = tiny._runner
    core = GoldenCore(TINY, HBM_BYTES)
    for number in range(PROGRAMS):
        rng = np.random.default_rng([seed, batch, number])
        image = random_program(rng, TINY, int(rng.integers(3, 40)))
        core.shuffle = None if number % 2 else number
        fill(runner.machine, core, image, rng)
        counters = runner.run(image.queues)
        expected = core.run(image.queues)
        what = f"--seed {seed}, batch {batch}, program {number}"
        compare(runner.machine, core, image, what)
        for name, value in expected.items():
            assert counters[name] == value, f"{what}: counter {name}"


@pytest.mark.verilator
def test_empty_loads_and_matmuls_leave_the_weights_where_they_are(tiny, seed):
    none = AccessPattern(BF16, 0, 0, 0, ((1, 4),))

    def load(offset, **changes):
        return LoadStationary(src=replace(AccessPattern(BF16, 0, 4, offset, ((1, 4),)), **changes))

    def matmul(bank, *, rows=4, columns=4, n=8):
        return MatmulMoving(
            dst=AccessPattern(FP32, 0, columns, 64 * bank, ((1, n),), Space.PSUM),
            src=AccessPattern(BF16, 0, rows, 32, ((1, n),)),
        )

    image = Image(
        [
            load(0),
            matmul(0),
            LoadStationary(src=none),
            load(0, dims=((1, 0),)),
            matmul(1),  # with the weights of bank 0
            load(16),
            LoadStationary(src=none),
            matmul(2, rows=0),
            matmul(2, columns=0),
            matmul(2, n=0),
            matmul(3),  # with the new ones
        ],
        [],
    ).link()
    rng = np.random.default_rng(seed)
    core = GoldenCore(TINY, HBM_BYTES)
    fill(tiny._runner.machine, core, image, rng)
    numbers = BF16.encode(rng.standard_normal((4, 24))).view(np.uint8)
    core.sbuf[:, : numbers.shape[1]] = numbers
    tiny._runner.machine.sbuf_write(core.sbuf)
    untouched = core.psum[:, 128:192].copy()
    tiny._runner.run(image.queues)
    core.run(image.queues)
    compare(tiny._runner.machine, core, image, "empty tiles")
    banks = core.psum.reshape(4, TINY.psum_banks, -1)[:, :, :32]
    assert np.array_equal(banks[:, 0], banks[:, 1])
    assert not np.array_equal(banks[:, 0], banks[:, 3])
    assert np.array_equal(core.psum[:, 128:192], untouched)


def test_the_generator_makes_empty_tiles(seed):
    found = set()
    for number in range(60):
        image = random_program(np.random.default_rng([seed, 98, number]), TINY, 30)
        for instruction in image.instructions:
            for name, _, _ in instruction.operands:
                ap = instruction.values[name]
                if not ap.elements or not ap.num_partitions:
                    what = "elements" if not ap.elements else "partitions"
                    found.add((instruction.mnemonic, name, what))
    assert found >= {
        (mnemonic, name, what)
        for mnemonic, name in (
            ("loadstationary", "src"), ("matmulmoving", "src"), ("matmulmoving", "dst"),
        )
        for what in ("elements", "partitions")
    }  # fmt: skip


def test_the_generator_reaches_every_instruction_and_format(seed):
    mnemonics, formats, windows = set(), set(), set()
    ops, pointers, in_place, rows = set(), set(), set(), set()
    for number in range(200):
        image = random_program(np.random.default_rng([seed, 99, number]), TINY, 30)
        for at in range(0, 128 * len(image.instructions), 128):
            instruction = decode(image.raw[at : at + 128])
            mnemonics.add(instruction.mnemonic)
            for name, _, _ in instruction.operands:
                formats.add((instruction.mnemonic, name, instruction.values[name].dtype.name))
            for name, item, _ in instruction.scalars:
                if item.values in (AluOp, Compare, Function, ReduceOp):
                    ops.add((instruction.mnemonic, name, instruction.values[name]))
            flags = [v for n, v in instruction.values.items() if n.endswith("_pointer")]
            if flags:
                pointers.add((type(instruction), *flags))
            operands = [instruction.values[name] for name, _, _ in instruction.operands]
            if len(operands) > 1 and operands[0] in operands[1:]:
                in_place.add(instruction.mnemonic)
            if isinstance(instruction, TensorReduce):
                rows.add(instruction.inner)
        for descriptor in image.descriptors:
            windows.add((descriptor.src.address >> 40, descriptor.dst.address >> 40))
    assert len(mnemonics) == len(INSTRUCTIONS)
    assert windows == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(formats) == 8 + 8 + 1 + 14 * (2 + 1 + 3 + 2 + 3 + 2 + 2 + 1 + 2 + 3 + 2) + 6 * (
        3 + 2 + 1
    ) + (14 * (2 + 2 + 3) + 2) + (6 + 1)
    chosen = (AluOp, Compare, Function, ReduceOp)
    assert ops >= {(cls.mnemonic, name, int(op)) for cls in INSTRUCTIONS.values()
                   for name, item, _ in cls.scalars if item.values in chosen
                   for op in item.values}  # fmt: skip
    assert pointers == {
        (TensorScalar, 0, 0), (TensorScalar, 0, 1), (TensorScalar, 1, 0), (TensorScalar, 1, 1),
        (ScalarTensorTensor, 0), (ScalarTensorTensor, 1), (TensorTensorScan, 0),
        (TensorTensorScan, 1),
        (Activation, 0, 0), (Activation, 0, 1), (Activation, 1, 0), (Activation, 1, 1),
        *((IntegerTensorScalar, i, j) for i in range(2) for j in range(2)), (Rng, 0), (Rng, 1),
    }  # fmt: skip
    assert in_place == {
        "tensortensor", "tensorscalar", "scalartensortensor", "activation", "affineselect",
        "integertensortensor", "integertensorscalar", "tensortensorscan", "copypredicated",
        "matchreplace8",
    }  # fmt: skip
    assert rows == {0, 1, 2, 3}


def test_any_order_that_the_semaphores_allow_gives_the_same_bytes(seed):
    for number in range(60):
        rng = np.random.default_rng([seed, 97, number])
        image = random_program(rng, TINY, 25)
        core, found = GoldenCore(TINY, HBM_BYTES), []
        for shuffle in (None, 0, 1, 2):
            core.reset()
            core.shuffle = shuffle
            fill(None, core, image, np.random.default_rng([seed, number]))
            core.run(image.queues)
            found.append([memory.copy() for memory in (core.sbuf, core.psum, core.hbm)])
        for other in found[1:]:
            for seen, expected in zip(other, found[0], strict=True):
                assert np.array_equal(seen, expected), f"program {number} of seed {seed}"
