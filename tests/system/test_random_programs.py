"""Random legal programs: every byte of every memory as the golden model has it."""

import numpy as np
import pytest
from makalu.host.devices.registers import RegisterRunner
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.isa import decode
from makalu.sim.golden import GoldenCore
from programs import DATA, HBM_BYTES, contents, random_program

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
