"""``makalu bench``: what is measured, what is made of it, what is said where a tool is missing."""

import io
import json
import sys
import xml.etree.ElementTree as ET

import pytest
from makalu.host import bench, devices
from makalu.host.bench import Case
from makalu.host.cli import app
from makalu.host.errors import ToolMissing, UsageError
from typer.testing import CliRunner

TINY_PRODUCT = (4, 4, 16)


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def row(config, backend, speed, *, elements=16, macs=8192, cycles=4719):
    """A measurement as the child tells it."""
    wall = cycles / speed
    return {
        "config": config, "backend": backend, "shape": [16, 16, 32], "cycles": cycles,
        "macs": macs, "runs": 3, "wall_s": wall, "cycles_per_second": speed,
        "mmacs_per_second": macs / wall / 1e6, "ns_per_mac": 1e9 * wall / macs,
        "ns_per_pe_cycle": 1e9 * wall / (cycles * elements), "build_s": 12.5, "from_cache": True,
        "peak_bytes": 50 << 20, "build_peak_bytes": None,
    }  # fmt: skip


ROWS = [
    row("TINY", "native", 400e3),
    row("TINY", "verilator", 100e3),
    row("TINY", "pysim", 100.0),
    row("SMALL", "native", 60e3, elements=256, macs=1 << 21, cycles=11743),
    {"config": "SMALL", "backend": "verilator", "shape": [1, 1, 1], "missing": "pip install it"},
    row("TRN", "native", 10e3, elements=1 << 14, macs=1 << 27, cycles=50454),
]


def test_every_machine_and_simulator_is_measured_once():
    found = [(case.config, case.backend) for case in bench.cases()]
    assert len(found) == len(set(found))
    assert {("TINY", "pysim"), ("SMALL", "verilator"), ("TRN", "native")} <= set(found)
    assert ("TRN", "verilator") not in found
    assert ("SMALL", "pysim") not in found
    assert [c.backend for c in bench.cases(["SMALL"])] == ["native", "verilator"]
    assert [c.config for c in bench.cases(backend="verilator")] == ["TINY", "SMALL"]
    assert bench.cases(["TRN"], "native", fresh=True)[0].fresh
    with pytest.raises(UsageError, match="nothing to measure for verilator on TRN"):
        bench.cases(["TRN"], "verilator")


def test_ratios_are_to_the_slowest():
    assert bench.ratios(ROWS)["TINY"] == {"native": 4000, "verilator": 1000, "pysim": 1}
    assert bench.ratios(ROWS)["SMALL"] == {"native": 1}


def test_growth_is_the_last_machine_over_the_first():
    found = bench.growth(ROWS)["native"]
    assert found["machines"] == ["TINY", "SMALL", "TRN"]
    per_mac = [1e9 * 4719 / 400e3 / 8192, 1e9 * 11743 / 60e3 / 2**21, 1e9 * 50454 / 10e3 / 2**27]
    assert found["ns_per_mac"] == pytest.approx(per_mac)
    assert found["mac_growth"] == pytest.approx(per_mac[2] / per_mac[0])
    assert found["pe_cycle_growth"] == pytest.approx((400e3 * 16) / (10e3 * 16384))


def test_what_is_printed_says_what_was_found():
    lines = [bench.line_of(found) for found in ROWS]
    assert "400,000" in lines[0]
    assert "from the cache" in lines[0]
    assert lines[4].endswith("not there: pip install it")
    text = "\n".join(bench.summary(ROWS))
    assert "TINY: native 4,000, verilator 1,000 times as fast as pysim" in text
    assert "SMALL" not in text.partition("native, from TINY to TRN")[0]
    built = bench.line_of({**ROWS[0], "from_cache": False, "build_peak_bytes": 300 << 20})
    assert "12.5 s, 300 MiB in the largest process" in built


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.8, "1,234,568"), (123.4, "123"), (12.34, "12.3"), (0.01234, "0.0123"), (0, "0")],
)
def test_numbers_have_three_digits(value, text):
    assert bench._three(value) == text


def test_a_missing_tool_is_a_line_and_no_failure(monkeypatch):
    monkeypatch.setattr(devices, "missing", lambda name, config: f"{name}: pip install something")
    found = bench.measure(Case("TINY", "native", TINY_PRODUCT))
    assert found["missing"] == "native: pip install something"
    result = call("--config", "TINY")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("not there: ") == 3


def needs(backend):
    from makalu.rtl.arch.config import TINY

    reason = devices.missing(backend, TINY)
    if reason is not None:
        pytest.skip(reason)


def test_a_measurement_has_all_figures():
    needs("native")
    found = bench.measure(Case("TINY", "native", TINY_PRODUCT, seconds=0))
    assert "failed" not in found, found
    assert found["macs"] == 256
    assert found["runs"] == 1
    assert found["cycles"] > 256 / 16
    assert found["cycles_per_second"] == pytest.approx(found["cycles"] / found["wall_s"])
    assert found["ns_per_pe_cycle"] == pytest.approx(1e9 * found["wall_s"] / found["cycles"] / 16)
    assert 10 << 20 < found["peak_bytes"] < 4 << 30


def test_memory_is_that_of_the_measurement_alone():
    """What this process holds does not count, nor what was measured before."""
    needs("native")
    case = Case("TINY", "native", TINY_PRODUCT, seconds=0)
    before = bench.measure(case)["peak_bytes"]
    held = bytearray(400 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert bench.measure(case)["peak_bytes"] < before + (100 << 20)


def test_a_measurement_that_fails_says_why():
    needs("native")
    found = bench.measure(Case("TINY", "native", (4, 1 << 24, 4)))
    assert "no room" in found["failed"] or "HbmOutOfMemory" in found["failed"], found
    assert "FAILED" in bench.line_of(found)


def test_wrong_bits_are_a_failure(monkeypatch, capsys):
    from makalu.firmware.kernels import matmul

    needs("native")
    right = matmul.matmul_reference
    monkeypatch.setattr(matmul, "matmul_reference", lambda a, b, rows: -right(a, b, rows))
    with pytest.raises(bench.MakaluError, match="wrong bits"):
        bench._measured(Case("TINY", "native", TINY_PRODUCT, seconds=0))


def test_a_child_uses_an_empty_cache_if_asked(monkeypatch):
    seen = []

    class Child:
        def __init__(self, command, *, env, **options):
            self.stdout = io.StringIO('build 0.5 compiling it\nfound {"cycles": 1}\n')
            seen.append((command, env.get("MAKALU_CACHE")))

        def wait(self):
            return 0

        poll = wait

    monkeypatch.setattr(bench.subprocess, "Popen", Child)
    monkeypatch.setattr(devices, "missing", lambda name, config: None)
    monkeypatch.setenv("MAKALU_CACHE", "the usual one")
    heard = []
    for fresh in (False, True):
        found = bench.measure(
            Case("TINY", "native", TINY_PRODUCT, fresh=fresh), lambda *said: heard.append(said)
        )
        assert found["cycles"] == 1
    assert seen[0][0][0] == sys.executable
    assert seen[0][1] == "the usual one"
    assert seen[1][1] not in ("the usual one", None)
    assert heard == [("compiling it", 0.5)] * 2


def test_the_plot_has_every_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    written = bench.plot(ROWS, tmp_path / "speeds.png")
    assert [path.name for path in written] == ["speeds.png", "speeds.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    ET.fromstring(written[1].read_text())
    speed, cost = bench._figure([r for r in ROWS if "missing" not in r]).axes
    heights = sorted(bar.get_height() for bars in speed.containers for bar in bars)
    assert heights == [100, 10e3, 60e3, 100e3, 400e3]
    assert speed.get_yscale() == cost.get_yscale() == "log"
    assert sorted(len(line.get_xdata()) for line in cost.lines) == [1, 1, 3]


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(ToolMissing, match="pip install matplotlib"):
        bench.need_matplotlib()
    assert call("--plot", str(tmp_path / "x")).exit_code == 3


def test_json_has_rows_ratios_growth_and_conditions(monkeypatch):
    found = iter(ROWS)
    monkeypatch.setattr(bench, "measure", lambda case, on_build: next(found))
    result = call("--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert len(values["rows"]) == 6
    assert values["ratios"]["TINY"]["native"] == 4000
    assert values["growth"]["native"]["machines"][-1] == "TRN"
    assert values["conditions"]["cores"] >= 1


def test_an_interrupt_keeps_the_rows(monkeypatch):
    found = iter(ROWS[:2])

    def measure(case, on_build):
        try:
            return next(found)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(bench, "measure", measure)
    result = call("--json")
    assert result.exit_code == 130
    assert len(json.loads(result.stdout)["rows"]) == 2


def test_a_failed_measurement_is_exit_code_1(monkeypatch):
    failed = {"config": "TINY", "backend": "native", "shape": [1, 1, 1], "failed": "no luck"}
    monkeypatch.setattr(bench, "measure", lambda case, on_build: failed)
    result = call("--config", "TINY")
    assert result.exit_code == 1
    assert "FAILED: no luck" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shape", "1x2x3", "--build"), ("--shape", "1x2x3", "--plot", "x"),
        ("--shape", "1x2x3", "--config", "TINY", "--config", "SMALL"),
        ("--backend", "golden"), ("--config", "TRN", "--backend", "pysim"), ("--seconds", "-1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
