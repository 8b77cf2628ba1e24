"""Random legal programs: every byte of every memory as the golden model has it."""

from dataclasses import replace

import numpy as np
import pytest
from makalu.host.devices.registers import RegisterRunner
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.formats import BF16, FP32
from makalu.rtl.arch.isa import AccessPattern, LoadStationary, MatmulMoving, Space, decode
from makalu.sim.golden import GoldenCore
from programs import DATA, HBM_BYTES, Image, contents, random_program

pytestmark = [pytest.mark.xdist_group("tiny_devices")]

BATCHES, PROGRAMS = 12, 30


def fill(machine, core, image, rng):
    """Give both the program and the same contents of all memories."""
    config = core.config
    core.hbm[: len(image.raw)] = np.frombuffer(image.raw, np.uint8)
    core.hbm[DATA:] = contents(rng, HBM_BYTES - DATA)
    core.sbuf[:] = contents(rng, core.sbuf.size).reshape(core.sbuf.shape)
    core.psum[:] = contents(rng, core.psum.size).reshape(core.psum.shape)
    assert core.sbuf.shape == (config.partitions, config.sbuf_bytes)
    machine.hbm_write(0, core.hbm.tobytes())
    machine.sbuf_write(core.sbuf)
    machine.psum_write(core.psum)


def compare(machine, core, image, what):
    """Say where the memories differ first, and what the program was."""
    found = {
        "SBUF": (machine.sbuf_read(), core.sbuf),
        "PSUM": (machine.psum_read(), core.psum),
        "HBM": (np.frombuffer(machine.hbm_read(0, HBM_BYTES), np.uint8), core.hbm),
    }
    for name, (seen, expected) in found.items():
        if not np.array_equal(seen, expected):
            where = np.argwhere(seen != expected)
            first = tuple(int(i) for i in where[0])
            program = "\n".join(map(str, [*image.instructions, *image.descriptors]))
            pytest.fail(
                f"{what}: {len(where)} bytes of {name} differ, the first at "
                f"{list(map(hex, first))}: {seen[first]:#04x}, not {expected[first]:#04x}\n"
                f"{program}"
            )


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
    for number in range(60):
        image = random_program(np.random.default_rng([seed, 99, number]), TINY, 30)
        for at in range(0, 128 * len(image.instructions), 128):
            instruction = decode(image.raw[at : at + 128])
            mnemonics.add(instruction.mnemonic)
            for name, _, _ in instruction.operands:
                formats.add((instruction.mnemonic, name, instruction.values[name].dtype.name))
        for descriptor in image.descriptors:
            windows.add((descriptor.src.address >> 40, descriptor.dst.address >> 40))
    assert len(mnemonics) == 6
    assert windows == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(formats) == 8 + 8 + 1 + 14 + 14 + 14


@pytest.fixture(scope="module")
def native():
    """TINY as C, with a short watchdog."""
    from makalu.sim.backends.native import NativeMachine

    with NativeMachine(TINY, HbmConfig(size_bytes=HBM_BYTES)) as machine:
        yield RegisterRunner(machine)


@pytest.mark.verilator
@pytest.mark.parametrize("batch", range(4))
def test_native_and_verilator_agree_in_every_byte_and_cycle(tiny, native, seed, batch):
    core = GoldenCore(TINY, HBM_BYTES)
    for number in range(PROGRAMS):
        rng = np.random.default_rng([seed, 1000 + batch, number])
        image = random_program(rng, TINY, int(rng.integers(3, 40)))
        counters = []
        for runner in (native, tiny._runner):
            fill(runner.machine, core, image, np.random.default_rng([seed, batch, number]))
            counters.append(runner.run(image.queues))
        what = f"--seed {seed}, batch {batch}, program {number}"
        assert counters[0] == counters[1], what
        core.run(image.queues)
        for runner in (native, tiny._runner):
            compare(runner.machine, core, image, f"{runner.machine.name}, {what}")


@pytest.mark.slow
@pytest.mark.verilator
def test_both_simulations_count_the_same_cycles(tiny, seed):
    from makalu.sim.backends.pysim import PysimMachine

    core = GoldenCore(TINY, HBM_BYTES)
    with PysimMachine(TINY, HbmConfig(size_bytes=HBM_BYTES)) as machine:
        slow = RegisterRunner(machine)
        for number in range(2):
            rng = np.random.default_rng([seed, 77, number])
            image = random_program(rng, TINY, 4)
            counters = []
            for runner in (slow, tiny._runner):
                runner.reset()
                fill(runner.machine, core, image, np.random.default_rng([seed, number]))
                counters.append(runner.run(image.queues))
            assert counters[0] == counters[1]
            core.run(image.queues)
            for runner in (slow, tiny._runner):
                compare(runner.machine, core, image, f"{runner.name}, program {number}")
