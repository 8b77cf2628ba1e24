"""``makalu bench shapes``: bounds, windows on the hardware, reasons, and rows that are kept."""

import json

import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.firmware.kernels.resident import matmul_in_sbuf, resident_bytes
from makalu.firmware.nki import TensorSpec
from makalu.host import devices, shapes
from makalu.host.cli import app
from makalu.host.device import open_device
from makalu.host.errors import DeviceError, MakaluError, UsageError
from makalu.rtl.arch.config import TINY, TRN
from makalu.rtl.arch.formats import BF16, FP32
from makalu.rtl.arch.isa import Engine, ErrorCode
from typer.testing import CliRunner

SMALL_SHAPES = [(16, 16, 16), (33, 50, 300), (1, 64, 64), (16, 1, 16), (70, 33, 129), (13, 8, 8)]


def call(*arguments):
    return CliRunner().invoke(app, ["bench", "shapes", *arguments])


@pytest.fixture(scope="module")
def tiny():
    reason = devices.missing("native", TINY)
    if reason is not None:
        pytest.skip(reason)
    with open_device("TINY", "native") as device:
        yield device


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mkn", "cycles"),
    [
        ((64,) * 3, 446), ((128,) * 3, 510), ((256,) * 3, 1406), ((512,) * 3, 8574),
        ((1024,) * 3, 65918), ((128, 768, 768), 4990), ((128, 3072, 768), 18814),
        ((1, 512, 512), 2303),
    ],
    ids=str,
)  # fmt: skip
def test_the_textbook_bound_is_what_is_published_for_such_arrays(mkn, cycles):
    assert shapes.textbook(*mkn, 128) == cycles


def test_the_bound_counts_loads_waves_and_the_way_through_the_array():
    way = 2 * 16 + 4 + 11
    assert shapes.bound(16, 16, 128, 16) == min(4 + 128 + way, 4 + 7 * 16 + 16 + way)
    assert shapes.bound(32, 32, 64, 16) == 4 + 3 * 64 + 64 + way
    assert shapes.bound(1, 64, 64, 16) == 4 + 15 * 4 + 1 + way  # b stationary: loads are all
    assert shapes.bound(64, 64, 1, 16) == shapes.bound(1, 64, 64, 16)


@pytest.mark.parametrize("rows", [4, 16, 128])
def test_peers_have_measured_shapes_of_the_table(rows):
    for peer in shapes.PEERS:
        assert set(peer.cycles.get(rows, {})) <= set(shapes.SHAPES)
        assert peer.source
        for (m, k, n), cycles in peer.cycles.get(rows, {}).items():
            assert cycles >= m * k * n / rows**2, (peer.name, m, k, n)
    assert set(shapes.REDMULE) <= set(shapes.SHAPES)


def test_shapes_are_chosen_by_size():
    assert len(shapes.chosen_shapes("TRN")) == len(shapes.SHAPES)
    assert (2048, 2048, 2048) not in shapes.chosen_shapes("SMALL")
    assert shapes.chosen_shapes("TINY") == [(64, 64, 64), (13, 64, 64)]
    assert shapes.chosen_shapes("TRN", largest=128)[:2] == [(64, 64, 64), (128, 128, 128)]
    assert shapes.chosen_shapes("TRN", [(1, 2, 3)]) == [(1, 2, 3)]
    with pytest.raises(UsageError, match="no shape has all edges up to 3"):
        shapes.chosen_shapes("TRN", largest=3)


# The kernel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mkn", SMALL_SHAPES, ids=str)
@pytest.mark.parametrize("out", [FP32, BF16], ids=str)
def test_the_kernel_in_sbuf_multiplies(dev, rng, mkn, out):
    m, k, n = mkn
    a, b = (BF16.encode(rng.standard_normal(s)) for s in ((m, k), (k, n)))
    c = dev.run(matmul_in_sbuf, a, b, out_dtype=out)
    reference = matmul_reference(a, b, dev.config.rows)
    assert c.tobytes() == (reference if out is FP32 else BF16.encode(reference)).tobytes()


def test_what_it_takes_of_sbuf_is_enough(rng):
    """Where the estimate says that it fits, it compiles."""
    fits = 0
    for _ in range(120):
        m, k, n = (int(x) for x in rng.integers(1, 50, 3))
        out = (FP32, BF16)[rng.integers(2)]
        if resident_bytes(m, k, n, BF16, out, TINY.rows) > TINY.sbuf_bytes:
            continue
        fits += 1
        a, b = np.zeros((m, k), BF16.dtype), np.zeros((k, n), BF16.dtype)
        matmul_in_sbuf.compile(TINY, a, b, out)
    assert fits > 10


def test_the_largest_shape_of_the_table_fills_sbuf_of_the_full_machine():
    assert resident_bytes(2048, 2048, 2048, BF16, BF16, TRN.rows) == TRN.sbuf_bytes
    spec = TensorSpec((2048, 2048), BF16)
    matmul_in_sbuf.compile(TRN, spec, spec, BF16)


# On the hardware ----------------------------------------------------------------------------------


def test_a_row_has_both_measurements(tiny):
    row = shapes.measure(tiny, (16, 16, 16))
    least = 16**3 / 16
    for name in ("in_sbuf", "from_hbm"):
        found = row[name]
        assert found["cycles"] > least
        assert found["pe_utilization"] == pytest.approx(least / found["cycles"])
        assert found["above"] == pytest.approx(found["cycles"] / row["bound"] - 1)
        assert found["columns"] >= least
    assert row["bound"] <= row["in_sbuf"]["cycles"] < row["from_hbm"]["cycles"]


def test_the_window_is_that_of_the_array(tiny):
    """One weight load and one matmul: every cycle of the window is known, but for the look."""
    m, k, n = 4, 4, 8
    found = shapes.measure(tiny, (m, k, n))["in_sbuf"]
    # Load 1, first column 5 after issue, 20 through the array, 8 columns; then the copy of 8:
    # N + 13 with its update, at most 10 to wake its queue.
    assert 1 + 5 + 20 + 8 + 8 < found["cycles"] <= 1 + 5 + 20 + 8 + 8 + 13 + 10 + 12
    assert found["columns"] == 8


def test_equal_shapes_take_equal_time(tiny):
    first = shapes.measure(tiny, (8, 12, 20))
    shapes.measure(tiny, (5, 3, 7))
    assert shapes.measure(tiny, (8, 12, 20)) == first


def test_what_does_not_fit_sbuf_says_so(tiny):
    row = shapes.measure(tiny, (64, 64, 64))
    assert "cycles" not in row["in_sbuf"]
    assert "of 2,048 bytes of SBUF" in row["in_sbuf"]["why_not"]
    assert row["from_hbm"]["cycles"] > 64**3 / 16
    first, *notes = shapes.lines_of(row, 4)
    assert first.split()[3:6] == ["-", "-", "-"]
    assert notes[0].strip().startswith("in SBUF: needs ")


def test_loads_that_are_still_under_way_are_noticed(tiny, monkeypatch):
    """Without its gate the kernel begins before the last rows of K are there."""
    from makalu.firmware.kernels import resident

    monkeypatch.setattr(resident, "_wait_for", lambda *operands: None)
    with pytest.raises(MakaluError, match="operands were still loading"):
        shapes.measure(tiny, (32, 7, 16))


def test_wrong_bits_are_noticed(tiny, monkeypatch):
    monkeypatch.setattr(
        shapes, "matmul_reference", lambda a, b, rows: -matmul_reference(a, b, rows)
    )
    with pytest.raises(MakaluError, match="4 x 4 x 4, in_sbuf: wrong bits"):
        shapes.measure(tiny, (4, 4, 4))


def test_a_core_that_stops_is_a_line_and_the_next_shape_runs(tiny, monkeypatch):
    def stopped(device, a, b):
        raise DeviceError(ErrorCode.WATCHDOG, engine=Engine.PE)

    with monkeypatch.context() as patch:
        patch.setattr(shapes, "_from_hbm", stopped)
        row = shapes.measure(tiny, (4, 4, 4))
    assert row["in_sbuf"]["cycles"] > 4
    assert row["from_hbm"]["failed"]
    assert f"from HBM: FAILED: {row['from_hbm']['failed']}" in "\n".join(shapes.lines_of(row, 4))
    assert shapes.measure(tiny, (4, 4, 4))["from_hbm"]["cycles"] > 4


# Reasons ------------------------------------------------------------------------------------------


def reasons(name="from_hbm", *, above=0.5, waits=(), cycles=1000, columns=500, mkn=(128,) * 3):
    row = {"shape": list(mkn), "bound": shapes.bound(*mkn, 16)}
    found = {"cycles": cycles, "columns": columns, "above": above, "waits": dict(waits),
             "hbm_bytes": 4800}  # fmt: skip
    return shapes._reasons(name, found, row, 16, 16)


def test_reasons_are_given_only_far_above_the_bound():
    assert reasons(above=0.049, waits={"dma_wait_read": 500}) == []
    assert reasons(above=0.051, waits={"dma_wait_read": 500})[0] == "DMA waits for HBM 50%"


def test_reasons_name_the_largest_first_and_nothing_small():
    found = reasons(waits={"queue_pe_wait_semaphore": 310, "pe_wait_weights": 19})
    assert found == ["PE queue waits for a semaphore 31%", "HBM moves data 30%"]


def test_in_sbuf_what_is_left_is_the_way_through_the_array():
    found = reasons("in_sbuf", waits={"pe_wait_weights": 100})
    assert found == ["fill, drain, copy of sums to SBUF 40%", "matmul waits for its weights 10%"]


def test_the_other_operand_being_stationary_is_a_reason():
    found = reasons("in_sbuf", mkn=(1, 64, 64), cycles=1000)
    assert any("a is stationary" in text for text in found)


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch, tiny):
    """Rows without running anything."""
    row = shapes.measure(tiny, (4, 4, 4))
    monkeypatch.setattr("makalu.host.cli._open", lambda *arguments: NotClosed(tiny))
    monkeypatch.setattr(shapes, "measure", lambda device, mkn: {**row, "shape": list(mkn)})


class NotClosed:
    def __init__(self, device):
        self.device = device

    def __enter__(self):
        return self.device

    def __exit__(self, *exception):
        pass


def test_the_table_has_rows_and_sources(fake):
    result = call("--config", "TINY", "4x4x4", "5x6x7")
    assert result.exit_code == 0, result.output
    assert "\n5x6x7 " in result.stdout
    assert "RedMulE RTL" in result.stdout
    assert "textbook: R + (F - 1) max(M, R) + M + (2 R - 2)" in result.stdout


def test_json_has_rows_and_sources(fake):
    values = json.loads(call("--config", "TINY", "--max", "64", "--json").stdout)
    assert [row["shape"] for row in values["rows"]] == [[64, 64, 64], [13, 64, 64]]
    assert values["sources"]["SCALE-Sim WS"].startswith("SCALE-Sim 3.0.0")
    assert (values["config"], values["backend"]) == ("TINY", "native")


def test_a_failure_is_exit_code_1(fake, monkeypatch):
    measure = shapes.measure
    monkeypatch.setattr(
        shapes, "measure", lambda *given: {**measure(*given), "from_hbm": {"failed": "stuck"}}
    )
    result = call("--config", "TINY", "4x4x4", "5x6x7")
    assert result.exit_code == 1
    assert result.stdout.count("from HBM: FAILED: stuck") == 2


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["text", "json"])
def test_an_interrupt_keeps_the_rows(fake, monkeypatch, option):
    measure, left = shapes.measure, [1]

    def interrupted(device, mkn):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return measure(device, mkn)

    monkeypatch.setattr(shapes, "measure", interrupted)
    result = call("--config", "TINY", *option)
    assert result.exit_code == 130
    if option:
        assert len(json.loads(result.stdout)["rows"]) == 1
    else:
        assert "\n64x64x64 " in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [("8x9",), ("--backend", "golden"), ("--backend", "auto"), ("--max", "1"), ("--max", "0")],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
