"""A chain of products whose operands lie in SBUF."""

from makalu.rtl.arch import formats
from makalu.rtl.arch.isa import (
    WORD_BYTES,
    AccessPattern,
    Engine,
    LoadStationary,
    MatmulMoving,
    Space,
    TensorCopy,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)

TILES = 64
STRIPS = 8
"""Moving tiles; there are as many stationary ones, and every pair is one output tile."""

MATMULS, COPIES = 1, 2  # semaphores


def chain(config, k_tiles):
    """64 output tiles, each a whole PSUM bank, copied to SBUF as they finish.

    SBUF, per partition: stationary tiles, moving tiles (binary16), results (int8, exact: the
    operands are -1, 0 and 1).
    """
    columns = config.psum_bank_words
    rows, queues = config.rows, {Engine.PE: [], Engine.DVE: []}
    moving_at = TILES // STRIPS * k_tiles * rows * 2
    out_at = moving_at + STRIPS * k_tiles * columns * 2
    assert out_at + TILES * columns <= config.sbuf_bytes
    for tile in range(TILES):
        left, right = divmod(tile, STRIPS)
        bank = tile % config.psum_banks * config.psum_bank_bytes
        sums = AccessPattern(formats.FP32, 0, rows, bank, ((1, columns),), Space.PSUM)
        for k in range(k_tiles):
            at = (left * k_tiles + k) * rows * 2
            stationary = AccessPattern(formats.FP16, 0, rows, at, ((1, rows),))
            at = moving_at + (right * k_tiles + k) * columns * 2
            moving = AccessPattern(formats.FP16, 0, rows, at, ((1, columns),))
            waits, update = [], Update()
            if k == 0 and tile >= config.psum_banks:
                waits = [Wait(COPIES, WaitMode.GE, tile - config.psum_banks + 1)]
            if k == k_tiles - 1:
                update = Update(MATMULS, UpdateMode.ADD, 1)
            queues[Engine.PE] += [
                LoadStationary(src=stationary),
                MatmulMoving(dst=sums, src=moving, accumulate=k > 0, waits=waits, update=update),
            ]
        out = AccessPattern(formats.INT8, 0, rows, out_at + tile * columns, ((1, columns),))
        queues[Engine.DVE].append(
            TensorCopy(
                dst=out,
                src=sums,
                waits=[Wait(MATMULS, WaitMode.GE, tile + 1)],
                update=Update(COPIES, UpdateMode.ADD, 1),
            )
        )
    image, starts = b"", {}
    for engine, words in queues.items():
        starts[engine] = len(image), len(words)
        image += b"".join(word.encode() for word in words)
    assert len(image) % WORD_BYTES == 0
    return image, starts, moving_at, out_at
