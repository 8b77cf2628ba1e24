"""Checkpoints and waveforms of a device: TINY on the native backend."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import makalu
import numpy as np
import pytest
from makalu.host import devices
from makalu.host.cli import app
from makalu.host.errors import DeviceFaulted, FileFormatError, MakaluError, UsageError
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.events import COUNTERS
from makalu.rtl.arch.registers import counter_address
from makalu.sim.backends import native
from makalu.sim.backends.pysim import PysimMachine
from typer.testing import CliRunner
from vcd.reader import TokenKind, tokenize

pytestmark = pytest.mark.xdist_group("tiny_devices")

HBM_BYTES = 1 << 17
ONE = "core.tensor.block0.row1.quad0.pe2"


def opened(**options):
    reason = devices.missing("native", TINY)
    if reason is not None:
        pytest.skip(reason)
    return makalu.open(TINY, "native", **{"hbm": HBM_BYTES, **options})


@pytest.fixture(scope="module")
def tiny():
    with opened() as device:
        yield device


@pytest.fixture
def operands(rng):
    a, b = rng.standard_normal((9, 8)), rng.standard_normal((8, 7))
    return a.astype(np.float16), b.astype(np.float16)


def digest(machine):
    """What there is of a machine: every register, memory, byte of HBM; then its counters."""
    found = {
        name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        for name, array in machine._simulation.contents().items()
    }
    found["hbm"] = hashlib.sha256(machine.hbm_read(0, machine.hbm.size_bytes)).hexdigest()
    found["cycles"] = machine.cycles
    found["counters"] = [machine.reg_read(counter_address(e.full_name)) for e in COUNTERS]
    return found


CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.sim.backends.native import NativeMachine
from test_inside import digest
machine = NativeMachine(TINY, HbmConfig(size_bytes=int(sys.argv[3])))
machine.restore(sys.argv[2])
machine.run()
print(json.dumps(digest(machine)))
"""


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [300, 711])
def test_a_product_goes_on_in_another_process(tiny, operands, tmp_path, monkeypatch, cycles):
    machine, path, seen = tiny._runner.machine, tmp_path / "middle", []
    whole = machine.run

    def run():
        """Save in the middle of the product, go on to the end, twice."""
        machine.step(cycles)
        machine.save(path)
        for _ in range(2):
            assert machine.reg_read(4 * 2) is not None  # something else happens
            machine.restore(path)
            assert whole() > 100
            seen.append(digest(machine))
        machine.restore(path)
        whole()

    monkeypatch.setattr(machine, "run", run)
    a, b = operands
    tiny.matmul(a, b, check=True)
    assert tiny.last_run.mismatches == 0
    assert tiny.last_run.max_abs_error < 0.01
    assert seen[0] == seen[1]
    here = Path(__file__).parent
    command = [sys.executable, "-c", CODE, str(here), str(path), str(HBM_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == seen[0]
    assert sum(seen[0]["counters"]) > 1000


def test_a_restored_device_holds_what_it_held(tiny, operands, tmp_path, rng):
    a, b = operands
    x = tiny.from_numpy(a)
    product = tiny.matmul(a, b)
    counters, cycles = tiny.last_run.counters, tiny.cycles
    tiny.save(tmp_path / "file")
    x.write(rng.standard_normal(a.shape).astype(np.float16))
    later = tiny.matmul(a[:3], b)
    tiny.restore(tmp_path / "file")
    assert tiny.cycles == cycles
    assert x.read().tobytes() == a.tobytes()
    assert tiny.matmul(a, b).tobytes() == product.tobytes()
    assert tiny.last_run.counters == counters
    assert tiny.matmul(a[:3], b).tobytes() == later.tobytes()
    x.free()


def test_programs_that_were_placed_since_run_after_a_restore(tiny, operands, tmp_path):
    """Their images in HBM are gone."""
    a, b = operands
    tiny.save(tmp_path / "file")
    first = tiny.matmul(a[:2], b)
    tiny.restore(tmp_path / "file")
    assert tiny.matmul(a[:2], b).tobytes() == first.tobytes()


def test_a_device_saved_while_a_program_ran_must_be_reset(tiny, operands, tmp_path):
    a, b = operands
    path = tmp_path / "file"

    def progress(issued, total, cycles):
        if cycles and not path.exists():
            tiny.save(path)
            with pytest.raises(UsageError, match="a program is running"):
                tiny.restore(path)

    tiny.progress = progress
    try:
        product = tiny.matmul(a, b)
    finally:
        tiny.progress = None
    tiny.restore(path)
    with pytest.raises(DeviceFaulted, match="saved while a program ran"):
        tiny.matmul(a, b)
    tiny.reset()
    assert tiny.matmul(a, b).tobytes() == product.tobytes()


def test_a_large_hbm_costs_what_is_in_it(tmp_path, operands):
    with opened(hbm=2 << 30) as device:
        device._runner.hbm_write((1 << 30) + 12345, b"something")
        device.save(tmp_path / "file")
        assert (tmp_path / "file").stat().st_size < 200_000
        device._runner.hbm_write((1 << 30) + 12345, b"different")
        device._runner.hbm_write(1 << 20, b"more")
        device.restore(tmp_path / "file")
        assert device._runner.hbm_read((1 << 30) + 12344, 11) == b"\0something\0"
        assert device._runner.hbm_read(1 << 20, 4) == bytes(4)
        device.matmul(*operands, check=True)
        assert device.last_run.mismatches == 0


def test_a_file_of_another_hbm_is_refused(tiny, tmp_path):
    tiny.save(tmp_path / "file")
    with opened(hbm=HBM_BYTES // 2) as other:
        cycles = other.cycles
        with pytest.raises(FileFormatError, match=r"hbm\.size_bytes is 131072 in the file and 655"):
            other.restore(tmp_path / "file")
        assert other.cycles == cycles


def test_a_damaged_file_is_refused(tiny, tmp_path):
    tiny.save(tmp_path / "file")
    raw = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(FileFormatError, match="damaged"):
        tiny.restore(tmp_path / "file")


# Waveforms ----------------------------------------------------------------------------------------


def read(path):
    """Changes of a VCD file: full name to list of time and value."""
    scope, codes, changes, now = [], {}, {}, None
    with path.open("rb") as file:
        for token in tokenize(file):
            if token.kind is TokenKind.SCOPE:
                scope.append(token.scope.ident)
            elif token.kind is TokenKind.UPSCOPE:
                scope.pop()
            elif token.kind is TokenKind.VAR:
                name = ".".join([*scope, token.var.reference.removeprefix("\\")])
                codes[name] = token.var.id_code
            elif token.kind is TokenKind.CHANGE_TIME:
                now = token.time_change
            elif token.kind is TokenKind.CHANGE_VECTOR:
                changes.setdefault(token.vector_change.id_code, []).append(
                    (now, int(token.vector_change.value))
                )
            elif token.kind is TokenKind.CHANGE_SCALAR:
                changes.setdefault(token.scalar_change.id_code, []).append(
                    (now, int(token.scalar_change.value))
                )
    return {name: changes[code] for name, code in codes.items()}


def at(changes, cycle):
    return [value for time, value in changes if time <= 10 * cycle][-1]


def test_waves_of_one_lane_are_those_of_the_simulator(tiny, operands, tmp_path, monkeypatch):
    """Every signal of a processing element, while it multiplies."""
    first, count, path = 400, 100, tmp_path / "out.vcd"
    a, b = (x[:4, :4] for x in operands)
    near = HbmConfig(size_bytes=HBM_BYTES, latency_cycles=10)
    with opened(hbm=near) as device:
        zero = device.cycles
        with device.waves(path, f"{ONE}.*", start=zero + first, cycles=count):
            device.matmul(a, b)
        counters = device.last_run.counters
    wave = read(path)
    pysim = PysimMachine(TINY, near)
    names = {}
    for info in pysim._open._sim._design.fragments.values():
        if ".".join(info.name[1:]) == ONE:
            stems = Counter(name.partition("$")[0] for name in info.signal_names.values())
            names = {
                f"sim_top.{ONE}.{name}": signal
                for signal, name in info.signal_names.items()
                if stems[name.partition("$")[0]] == 1 and f"sim_top.{ONE}.{name}" in wave
            }
    names.pop(f"sim_top.{ONE}.clk")
    assert len(names) > 30
    wanted, step = {}, pysim._stepper.step

    def watching(cycles=1):
        for _ in range(cycles):
            now = pysim.cycles
            if zero + first <= now < zero + first + count:
                wanted[now] = {
                    name: pysim.peek(signal) & (1 << len(signal)) - 1
                    for name, signal in names.items()
                }
            step()

    monkeypatch.setattr(pysim._stepper, "step", watching)
    monkeypatch.setattr(devices, "start", lambda *_: devices.pysim.RegisterRunner(pysim))
    with makalu.open(TINY, "pysim", hbm=near) as device:
        assert device.cycles == zero
        device.matmul(a, b)
        assert device.last_run.counters == counters
    assert len(wanted) == count
    for cycle, values in wanted.items():
        for name, value in values.items():
            assert at(wave[name], cycle) == value, f"{name} in cycle {cycle}"
    changing = [name for name in names if len(wave[name]) > 4]
    assert len(changing) > 10
    others = [name for name in wave if not name.startswith(f"sim_top.{ONE}.")]
    assert not others


def test_watching_changes_nothing(tiny, operands, tmp_path):
    a, b = operands
    plain, counters = tiny.matmul(a, b), tiny.last_run.counters
    begin = tiny.cycles
    with tiny.waves(tmp_path / "out.vcd", "pe_queue.*", start=begin + 500, cycles=100):
        assert tiny.matmul(a, b).tobytes() == plain.tobytes()
    assert tiny.last_run.counters == counters
    end = tiny.cycles
    assert tiny.matmul(a, b).tobytes() == plain.tobytes()
    assert tiny.last_run.counters == counters
    assert tiny.cycles - end == end - begin
    wave = read(tmp_path / "out.vcd")
    times = [time for changes in wave.values() for time, _ in changes]
    assert min(times) == 10 * (begin + 500)
    assert max(times) < 10 * (begin + 600)
    assert all(name.startswith("sim_top.core.control.pe_queue.") for name in wave)
    assert len(wave["sim_top.core.control.pe_queue.clk"]) == 200


def test_waves_until_the_block_ends(tiny, operands, tmp_path):
    a, b = operands
    begin = tiny.cycles
    with tiny.waves(tmp_path / "out.vcd", ["pe_queue.clk", "pe_queue.issued"]):
        tiny.matmul(a, b)
    clock = read(tmp_path / "out.vcd")["sim_top.core.control.pe_queue.clk"]
    assert len(clock) == 2 * (tiny.cycles - begin)


def test_a_run_that_fails_leaves_its_waves(tiny, tmp_path):
    def failing():
        with tiny.waves(tmp_path / "out.vcd", "pe_queue.issued"):
            tiny._runner.machine.step(50)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert read(tmp_path / "out.vcd")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.vcd"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": "pe_queu.*"}, r"no signal matches 'pe_queu\.\*': near are pe_queue\.\*"),
        ({"signals": ["issued", "isued"]}, r"'isued': near are issued"),
        ({"start": 0, "cycles": 2}, "must begin at cycle"),
        ({"start": 1 << 40, "cycles": 2}, "has not come"),
    ],
    ids=["instance", "signal", "past", "future"],
)
def test_what_cannot_be_recorded_is_told(tiny, tmp_path, options, message):
    with (
        pytest.raises(UsageError, match=message),
        tiny.waves(tmp_path / "out.vcd", **{"signals": "pe_queue.issued", **options}),
    ):
        tiny._runner.machine.step(10)
    assert not list(tmp_path.iterdir())
    tiny._runner.machine.step(10)


# What other backends cannot -----------------------------------------------------------------------


def test_other_backends_say_who_can(tmp_path):
    with makalu.open(TINY, "golden") as device:
        assert device.cycles is None
        for call in (device.save, device.restore):
            with pytest.raises(UsageError, match=r"backend golden cannot .*; backend native can"):
                call(tmp_path / "file")
        with (
            pytest.raises(UsageError, match="cannot write waveforms"),
            device.waves(tmp_path / "file"),
        ):
            pass
    with pytest.raises(UsageError, match=r"backend golden keeps no code; native does"):
        makalu.open(TINY, "golden", keep=tmp_path)


def test_the_c_is_kept_where_one_says(tiny, tmp_path):
    with opened(keep=tmp_path / "c"):
        text = "".join(path.read_text() for path in (tmp_path / "c").glob("*.[ch]"))
    assert re.search(r"const u32 t\d+_0 = .*; /\* \S*\.pe_queue\.\w+ \*/", text)
    assert re.search(r"/\* <pe>\.\S+, 16 lanes \*/", text)


def test_hardware_that_cannot_be_simulated_is_named(tmp_path, monkeypatch):
    """Cell and line of the source, as an error of the host."""
    from amaranth.hdl import ClockDomain, ClockSignal, Module, Signal
    from amaranth.lib import wiring
    from amaranth.lib.wiring import Out

    class Falling(wiring.Component):
        o: Out(4)

        def __init__(self, **_):
            super().__init__()

        def elaborate(self, platform):
            m = Module()
            m.domains.late = late = ClockDomain(clk_edge="neg", reset_less=True)
            m.d.comb += late.clk.eq(ClockSignal())
            held = Signal(4)
            m.d.late += [held.eq(held + 1), self.o.eq(held)]
            return m

    monkeypatch.setenv("MAKALU_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "SimTop", Falling)
    with pytest.raises(MakaluError) as caught:
        makalu.open(TINY, "native")
    told = r"sim_top\.\S+ \(held\) \S*test_inside\.py:\d+: clocked by the falling edge"
    assert re.search(f"cannot simulate this hardware: {told}", str(caught.value))


# Command line -------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, operands):
    """Operands in files, and the arguments that multiply them."""
    for name, array in zip("ab", operands, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    return ["matmul", *(str(tmp_path / f"{n}.npy") for n in "ab"), "--out", str(tmp_path / "c.npy"),
            "--config", "TINY"]  # fmt: skip


def test_the_command_line_writes_waves(tiny, files, tmp_path):
    waves = str(tmp_path / "out.vcd")
    more = ["--waves", waves, "--waves-signals", "pe_queue.*", "--waves-window", "1000:1200"]
    done = CliRunner().invoke(app, [*files, *more, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["backend"] == "native"
    wave = read(Path(waves))
    times = [time for changes in wave.values() for time, _ in changes]
    assert min(times) == 10000
    assert max(times) < 12000
    assert all(name.startswith("sim_top.core.control.pe_queue.") for name in wave)


def test_the_command_line_runs_a_kernel_with_waves(tiny, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n\n"
        "@nki.jit\ndef copy(x):\n"
        "    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)\n"
        "    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)\n"
        "    nisa.dma_copy(tile, x)\n    nisa.dma_copy(out, tile)\n    return out\n"
    )
    waves = tmp_path / "out.vcd"
    arguments = ["run", str(kernel), "4x8:bf16", "--config", "TINY", "--waves", str(waves),
                 "--waves-signals", "act_queue.issued"]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "sim_top.core.control.act_queue.issued" in read(waves)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--waves-lane", "3"], "--waves-lane says what --waves FILE is to write"),
        (["--waves", "{}", "--waves-window", "12"], "is not of the form FIRST:END"),
        (["--waves", "{}", "--waves-signals", "pe_queu.*"], "near are pe_queue"),
        (["--waves", "{}", "--backend", "golden"], "backend golden cannot write waveforms"),
        (
            ["--waves", "{}", "--waves-signals", "act_queue.issued", "--waves-window", "90000:"],
            "cycle 90000 has not come",
        ),
        (["--keep", "{}", "--backend", "golden"], "backend golden keeps no code"),
    ],
)
def test_the_command_line_says_what_is_wrong(tiny, files, tmp_path, more, message):
    more = [part.format(tmp_path / "out.vcd") for part in more]
    done = CliRunner().invoke(app, [*files, *more])
    assert done.exit_code == 2, done.output
    text = re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", done.output))
    assert message in text
    assert not (tmp_path / "out.vcd").exists()


def test_the_command_line_keeps_the_c(tiny, files, tmp_path):
    done = CliRunner().invoke(app, [*files, "--keep", str(tmp_path / "c")])
    assert done.exit_code == 0, done.output
    assert "struct state {" in (tmp_path / "c" / "model.h").read_text()
