"""The guards of the cocotb runner, each against a bench or a design that must not pass."""

from pathlib import Path

import pytest

from .runner import SIMULATORS, BenchFailure, check_results, run_bench

HERE = Path(__file__).parent / "guards"
COUNTER = """
module counter(input clk, input rst, output reg [7:0] count);
  initial count = 0;
  always @(posedge clk) if (rst) count <= 0; else count <= count + %s;
  %s
endmodule
"""
ASSERTION = 'always @(posedge clk) if (!rst) assert (count < 3) else $error("count passed 2");'

pytestmark = pytest.mark.verilator


@pytest.fixture(params=SIMULATORS)
def simulator(request):
    return request.param


def bench(tmp_path, simulator, name, step="1", extra="", only=None):
    return run_bench(
        verilog=COUNTER % (step, extra), top="counter", bench=HERE / f"bench_{name}.py",
        build_dir=tmp_path, simulator=simulator, only=only,
    )  # fmt: skip


def test_a_good_design_passes(tmp_path, simulator):
    assert bench(tmp_path, simulator, "passes") == 1


def test_a_wrong_design_is_caught(tmp_path, simulator):
    with pytest.raises(BenchFailure, match="test_counts"):
        bench(tmp_path, simulator, "passes", step="2")


def test_a_failing_test_is_caught(tmp_path, simulator):
    with pytest.raises(BenchFailure, match="test_fails"):
        bench(tmp_path, simulator, "fails")


def test_a_filter_that_matches_nothing_is_caught(tmp_path, simulator):
    with pytest.raises(BenchFailure):
        bench(tmp_path, simulator, "passes", only="test_no_such_name")


def test_a_bench_that_cannot_be_imported_is_caught(tmp_path, simulator):
    with pytest.raises(BenchFailure):
        bench(tmp_path, simulator, "broken_import")


def test_a_bench_without_tests_is_caught(tmp_path, simulator):
    with pytest.raises(BenchFailure):
        bench(tmp_path, simulator, "empty")


def test_a_failed_rtl_assertion_is_caught(tmp_path, simulator):
    with pytest.raises(BenchFailure):
        bench(tmp_path, simulator, "passes", extra=ASSERTION)


def test_a_skipped_test_counts_as_not_passed(tmp_path):
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuites><testsuite><testcase name="test_counts"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    with pytest.raises(BenchFailure, match="not passed: test_counts"):
        check_results(results, tmp_path / "none.log", HERE / "bench_passes.py")


def test_a_stale_build_is_not_reused(tmp_path, simulator):
    assert bench(tmp_path, simulator, "passes") == 1
    with pytest.raises(BenchFailure):
        bench(tmp_path, simulator, "passes", step="3")
