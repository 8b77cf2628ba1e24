"""The whole core as C that loops over lanes: the full machine, and SMALL's published cycles."""

import json
from pathlib import Path

import makalu
import numpy as np
import pytest
from chains import STRIPS, TILES, chain
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.host.demo import run_demo
from makalu.host.devices import missing
from makalu.host.shapes import in_sbuf
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TRN, named_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing("native", TRN) is not None, reason=str(missing("native", TRN))),
]

HBM_BYTES = 64 << 20
README = Path(__file__).parents[2] / "README.md"
FIGURES = Path(__file__).parents[1] / "bench" / "figures.json"


@pytest.fixture(scope="module")
def trn():
    with makalu.open("TRN", backend="native") as dev:
        yield dev


@pytest.fixture(scope="module")
def golden():
    with makalu.open("TRN", backend="golden") as dev:
        yield dev


def operands(rng, m, k, n, fmt):
    return (fmt.encode(rng.standard_normal(shape)) for shape in ((m, k), (k, n)))


@pytest.mark.parametrize(
    ("m", "k", "n", "fmt"),
    [
        (128, 128, 128, formats.BF16),
        (130, 300, 70, formats.BF16),
        (5, 129, 513, formats.FP16),
        (100, 60, 33, formats.FP8_E4M3),
        (64, 140, 40, formats.FP32),
    ],
)
def test_products_equal_the_golden_model(trn, golden, rng, m, k, n, fmt):
    a, b = operands(rng, m, k, n, fmt)
    c = trn.matmul(a, b)
    assert c.tobytes() == golden.matmul(a, b).tobytes()
    if fmt is formats.BF16:
        assert c.tobytes() == matmul_reference(a, b, TRN.rows).tobytes()
    assert trn.last_run.cycles > 0


def test_one_thread_and_two_do_the_same(trn, rng):
    simulation = trn._runner.machine._simulation
    a, b = operands(rng, 200, 256, 300, formats.BF16)
    trn.matmul(a, b)  # compiled and placed
    found = []
    for number in (1, 2, 1, 2):
        assert simulation.use_threads(number) == number
        c = trn.matmul(a, b)
        found.append((c.tobytes(), trn.last_run.counters))
    assert all(item == found[0] for item in found)


def test_the_array_is_busy_with_operands_in_sbuf(trn, rng):
    """64 tiles of two K tiles: stationary and moving operands lie in SBUF."""
    image, starts, moving_at, out_at = chain(TRN, 2)
    machine, rows = trn._runner.machine, TRN.rows
    columns = TRN.psum_bank_words
    a = rng.integers(-1, 2, (TILES // STRIPS * rows, 2 * rows))
    b = rng.integers(-1, 2, (2 * rows, STRIPS * columns))
    sbuf = machine.sbuf_read()
    left = a.reshape(-1, rows, 2, rows).transpose(3, 0, 2, 1)
    right = b.reshape(2, rows, STRIPS, columns).transpose(1, 2, 0, 3)
    for at, part in ((0, left), (moving_at, right)):
        raw = np.ascontiguousarray(part.astype(np.float16)).reshape(rows, -1).view(np.uint8)
        sbuf[:, at : at + raw.shape[1]] = raw
    machine.hbm_write(0, image)
    machine.sbuf_write(sbuf)
    counters = trn._runner.run(starts)
    found = machine.sbuf_read()[:, out_at:][:, : TILES * columns].view(np.int8)
    found = found.reshape(rows, TILES // STRIPS, STRIPS, columns).transpose(1, 0, 2, 3)
    assert np.abs(a @ b).max() < 127
    assert np.array_equal(found.reshape(a.shape[0], b.shape[1]), a @ b)
    assert counters["pe_columns"] == TILES * 2 * columns
    assert counters["pe_columns"] / counters["core_cycles"] >= 0.98


def published():
    """What the front page states: machine, where the operands lie, M, K, N, cycles."""
    figures = json.loads(FIGURES.read_text())
    assert figures["backend"] == "native"
    return [
        (case["machine"], kind, case["m"], case["k"], case["n"], case["cycles"])
        for kind in ("products", "resident")
        for case in figures[kind]
    ]


@pytest.mark.parametrize(("machine", "kind", "m", "k", "n", "cycles"), published())
def test_the_published_cycles(rng, machine, kind, m, k, n, cycles):
    """2048 x 2048 x 2048 takes two minutes, half of them the golden model's."""
    with (
        makalu.open(machine, backend="native", hbm=HBM_BYTES) as dev,
        makalu.open(machine, backend="golden", hbm=HBM_BYTES) as golden,
    ):
        a, b = operands(rng, m, k, n, formats.BF16)
        if kind == "products":
            c, seen = dev.matmul(a, b), dev.last_run.cycles
            print(dev.last_run)
        else:
            found, c = in_sbuf(dev, a, b)
            seen = found["cycles"]
        assert c.tobytes() == golden.matmul(a, b).tobytes()
        assert seen == cycles


def test_the_demonstration_does_what_the_front_page_shows():
    report = run_demo("TRN", "native").report
    shown = README.read_text()
    assert f"cycles          {report.cycles:,}\n" in shown
    assert f"PE utilization  {report.pe_utilization:.1%}\n" in shown
    moved = f"{report.hbm_bytes_read:,} B read, {report.hbm_bytes_written:,} B written"
    assert f"HBM             {moved}\n" in shown


def test_the_goals_are_met():
    """As shares of what the array could do."""
    cycles = {(machine, kind, m): seen for machine, kind, m, _, _, seen in published()}
    for case, share in (
        (("TRN", "products", 2048), 0.95),
        (("SMALL", "products", 256), 0.90),
        (("SMALL", "products", 512), 0.95),
    ):
        machine, _, edge = case
        rows = named_config(machine).rows
        assert edge**3 / rows**2 / cycles[case] >= share, case
    bound = 512**3 // TRN.rows**2 + 3 * TRN.rows - 2
    assert bound == 8574
    assert cycles["TRN", "resident", 512] <= 1.05 * bound
