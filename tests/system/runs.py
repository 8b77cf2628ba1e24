"""Random programs on machines: equal contents to begin with, and everything that is left."""

import hashlib

import numpy as np
from programs import DATA, HBM_BYTES, contents

__all__ = ["compare", "digests", "fill"]


def fill(machine, core, image, rng):
    """Give both, or the core alone, the program and the same contents of all memories."""
    config = core.config
    core.hbm[: len(image.raw)] = np.frombuffer(image.raw, np.uint8)
    core.hbm[DATA:] = contents(rng, HBM_BYTES - DATA)
    core.sbuf[:] = contents(rng, core.sbuf.size).reshape(core.sbuf.shape)
    core.psum[:] = contents(rng, core.psum.size).reshape(core.psum.shape)
    assert core.sbuf.shape == (config.partitions, config.sbuf_bytes)
    if machine is not None:
        machine.hbm_write(0, core.hbm.tobytes())
        machine.sbuf_write(core.sbuf)
        machine.psum_write(core.psum)


def _memories(machine):
    return {
        "SBUF": machine.sbuf_read(),
        "PSUM": machine.psum_read(),
        "HBM": np.frombuffer(machine.hbm_read(0, HBM_BYTES), np.uint8),
    }


def compare(machine, core, image, what):
    """Say where the memories differ first, and what the program was."""
    for name, seen in _memories(machine).items():
        expected = getattr(core, name.lower())
        if not np.array_equal(seen, expected):
            where = np.argwhere(seen != expected)
            first = tuple(int(i) for i in where[0])
            program = "\n".join(map(str, [*image.instructions, *image.descriptors]))
            raise AssertionError(
                f"{what}: {len(where)} bytes of {name} differ, the first at "
                f"{list(map(hex, first))}: {seen[first]:#04x}, not {expected[first]:#04x}\n"
                f"{program}"
            )


def digests(machine):
    """A hash of each memory, by name."""
    return {
        name: hashlib.sha256(seen.tobytes()).hexdigest()[:16]
        for name, seen in _memories(machine).items()
    }
