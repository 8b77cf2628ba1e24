"""What the whole core must reach, measured on the hardware with its own counters."""

import json
from pathlib import Path

import numpy as np
import pytest
from chains import STRIPS, TILES, chain
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL
from makalu.rtl.arch.registers import counter_address
from makalu.sim.backends.base import BUSY, STATUS
from makalu.sim.golden import GoldenCore

pytestmark = [
    pytest.mark.verilator,
    pytest.mark.slow,
    pytest.mark.xdist_group("small_device"),
]

COLUMNS = SMALL.psum_bank_words
LOOK_CYCLES = 40
FIGURES = Path(__file__).parents[1] / "bench" / "figures.json"


def counter(machine, name):
    return machine.reg_read(counter_address(name))


def measure(device, starts):
    """Run; cycles from the first column in the array to the last sum in PSUM, by looking often.

    The first is taken from the look before it was seen, the last from the look after the tensor
    engine's last busy cycle, so the window is never too short.
    """
    runner, machine = device._runner, device._runner.machine
    looks, run = [], machine.run

    def look_often(max_cycles=None, progress=None):
        del max_cycles, progress
        while True:
            looks.append(
                [counter(machine, name) for name in ("core_cycles", "pe_columns", "pe_busy")]
            )
            run(max_cycles=LOOK_CYCLES)
            if not machine.reg_read(STATUS) & BUSY:
                return

    machine.run = look_often
    try:
        counters = runner.run(starts)
    finally:
        machine.run = run
    busy = counters["pe_busy"]
    first = max(cycles for cycles, columns, _ in looks if columns == 0)
    last = min(
        [cycles for cycles, _, seen in looks if seen == busy], default=counters["core_cycles"]
    )
    return counters, last - first


@pytest.mark.parametrize(("k_tiles", "wanted"), [(2, 0.98), (1, 0.95)])
def test_the_array_is_busy_with_operands_in_sbuf(small, rng, k_tiles, wanted):
    image, starts, moving_at, out_at = chain(SMALL, k_tiles)
    rows = SMALL.rows
    a = rng.integers(-1, 2, (TILES // STRIPS * rows, k_tiles * rows))
    b = rng.integers(-1, 2, (k_tiles * rows, STRIPS * COLUMNS))
    core = GoldenCore(SMALL, 1 << 20)
    core.hbm[: len(image)] = np.frombuffer(image, np.uint8)
    # [k, tile, m] and [k, strip, n] per partition, tiles of one output next to each other.
    left = a.reshape(-1, rows, k_tiles, rows).transpose(3, 0, 2, 1)
    right = b.reshape(k_tiles, rows, STRIPS, COLUMNS).transpose(1, 2, 0, 3)
    for at, part in ((0, left), (moving_at, right)):
        raw = np.ascontiguousarray(part.astype(np.float16)).reshape(rows, -1).view(np.uint8)
        core.sbuf[:, at : at + raw.shape[1]] = raw
    machine = small._runner.machine
    machine.hbm_write(0, image)
    machine.sbuf_write(core.sbuf)
    counters, window = measure(small, starts)
    core.run(starts)
    assert np.array_equal(machine.sbuf_read(), core.sbuf)
    assert np.array_equal(machine.psum_read(), core.psum)
    found = core.sbuf[:, out_at:][:, : TILES * COLUMNS].view(np.int8)
    found = found.reshape(rows, TILES // STRIPS, STRIPS, COLUMNS).transpose(1, 0, 2, 3)
    assert np.array_equal(found.reshape(a.shape[0], b.shape[1]), a @ b)
    assert counters["pe_columns"] == TILES * k_tiles * COLUMNS
    utilisation = counters["pe_columns"] / window
    print(f"{utilisation:.2%} of {window} cycles; whole run {counters['core_cycles']} cycles")
    assert utilisation >= wanted
    case = {"machine": "SMALL", "k_tiles": k_tiles, "utilization": round(utilisation, 4)}
    assert case in json.loads(FIGURES.read_text())["in_sbuf"]


def product(small, rng, m, k, n):
    a, b = (formats.BF16.encode(rng.standard_normal(s)) for s in ((m, k), (k, n)))
    while small._matmuls:  # what lies in HBM may have been overwritten
        small._matmuls.popitem()[1].unload()
    c = small.matmul(a, b)
    assert c.tobytes() == matmul_reference(a, b, SMALL.rows).tobytes()
    report = small.last_run
    print(f"{m} x {k} x {n}: {report.cycles} cycles, {report.pe_utilization:.2%}")
    return report


def published(m, k, n):
    """Cycles that the front page states."""
    products = json.loads(FIGURES.read_text())["products"]
    keys = ("machine", "m", "k", "n")
    return next(p["cycles"] for p in products if [p[key] for key in keys] == ["SMALL", m, k, n])


def test_a_product_from_hbm_uses_the_array(small, rng):
    report = product(small, rng, 256, 256, 256)
    assert report.pe_utilization >= 0.90
    assert report.cycles == published(256, 256, 256)


def test_a_large_product_from_hbm_uses_the_array(small, rng):
    report = product(small, rng, 512, 512, 512)
    assert report.pe_utilization >= 0.95
    assert report.cycles == published(512, 512, 512)


@pytest.mark.parametrize("mkn", [(1, 1000, 1), (1, 1000, 5), (3, 1000, 1), (1, 1, 1000)])
def test_thin_products_are_right(small, rng, mkn):
    product(small, rng, *mkn)


def test_what_ran_before_does_not_change_a_cycle(small, rng):
    """Two DMA engines compete for HBM and for the groups of SBUF."""
    a, b = (rng.standard_normal((48, 80)).astype(formats.BF16.dtype) for _ in range(2))
    small.matmul(a, b.T)  # compiled and placed
    small.matmul(a, b.T)
    expected = small.last_run.counters
    for m, k, n in ((1, 1, 1), (17, 5, 33), (3, 90, 16), (40, 16, 7)):
        small.matmul(*(rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n))))
        small.matmul(a, b.T)
        assert small.last_run.counters == expected, (m, k, n)
