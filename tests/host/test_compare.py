"""``makalu compare``: equal machines, planted faults, and what is said about each."""

import json
import shlex

import numpy as np
import pytest
from makalu.host import compare as lockstep
from makalu.host import devices
from makalu.host.cli import app
from makalu.host.compare import Machines, Recorder, compare
from makalu.host.errors import UsageError
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.formats import BF16
from makalu.rtl.arch.registers import address_of, counter_address
from typer.testing import CliRunner

HBM_BYTES = 1 << 18
WINDOW = 500


def call(*arguments):
    return CliRunner().invoke(app, ["compare", *arguments])


@pytest.fixture(scope="module")
def recorded():
    """A product of 8 x 8 x 16 as the golden model ran it."""
    rng = np.random.default_rng(1)
    with Recorder(TINY, hbm=HBM_BYTES) as recorder:
        a, b = (BF16.encode(rng.standard_normal(s)) for s in ((8, 8), (8, 16)))
        recorder.matmul(a, b)
        (program,) = recorder.recorded
        return program


def start(size=HBM_BYTES):
    reason = devices.missing("native", TINY)
    if reason is not None:
        pytest.skip(reason)
    return devices.start("native", TINY, HbmConfig(size_bytes=size))


class Faulty:
    """A machine in which something happens at a cycle: the hook for planted faults."""

    def __init__(self, machine, cycle=None, fault=None, read=None):
        self.machine, self.when, self.fault, self.read = machine, cycle, fault, read

    def __getattr__(self, name):
        return getattr(self.machine, name)

    def _plant(self):
        if self.fault is not None and self.machine.cycles >= self.when:
            fault, self.fault = self.fault, None
            fault(self.machine)

    def step(self, cycles):
        if self.fault is not None and self.machine.cycles + cycles >= self.when:
            before = max(self.when - self.machine.cycles, 0)
            self.machine.step(before)
            cycles -= before
            self._plant()
        self.machine.step(cycles)

    def reg_read(self, address):
        self._plant()
        value = self.machine.reg_read(address)
        self._plant()
        return value if self.read is None else self.read(self.machine, address, value)


def faulty(cycle=None, fault=None, read=None, *, size=HBM_BYTES):
    """Machines, the second with a fault."""

    def make():
        runner = start(size)
        runner.machine = Faulty(runner.machine, cycle, fault, read)
        return runner

    return Machines(("good", "bad"), (lambda: start(size), make))


def flip(memory, place, bit=0):
    def fault(machine):
        contents = getattr(machine, f"{memory}_read")()
        contents[place] ^= 1 << bit
        getattr(machine, f"{memory}_write")(contents)

    return fault


def flip_hbm(address, bit=0):
    def fault(machine):
        (old,) = machine.hbm_read(address, 1)
        machine.hbm_write(address, bytes([old ^ 1 << bit]))

    return fault


def text_of(result):
    return "\n".join(result.lines())


# Equal --------------------------------------------------------------------------------------------


def test_equal_machines_are_equal(recorded):
    result = compare(Machines(("one", "two"), (start, start)), recorded, window=WINDOW)
    assert result.equal
    runner = start()
    runner.hbm_write(0, recorded.before["HBM"].tobytes())
    counters = runner.run(recorded.queues)
    runner.close()
    assert result.cycles == counters["core_cycles"]
    assert text_of(result).startswith(
        f"equal in every byte and counter after {result.cycles:,} cycles, golden's bytes too"
    )


@pytest.mark.parametrize("window", [1, 37, 100_000])
def test_the_window_does_not_matter(recorded, window):
    assert compare(Machines(("one", "two"), (start, start)), recorded, window=window).equal


@pytest.mark.verilator
def test_native_and_verilator_are_equal_and_the_command_says_so():
    for name in ("native", "verilator"):
        if devices.missing(name, TINY) is not None:
            pytest.skip(f"{name} is not there")
    result = call("--matmul", "4x4x8", "--backends", "native,verilator", "--config", "TINY")
    assert result.exit_code == 0, result.output
    assert "equal in every byte and counter after" in result.stdout


# Planted faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [700, 1009, 1500])
@pytest.mark.parametrize("window", [64, 4096])
def test_a_flipped_bit_in_sbuf_is_found_in_its_cycle(recorded, cycle, window):
    # Far from what the program uses, so that nothing writes over it.
    result = compare(faulty(cycle, flip("sbuf", (2, 2040), 5)), recorded, window=window)
    assert not result.equal
    assert result.cycle == cycle
    (found,) = result.differences
    assert found.what.startswith("SBUF partition 2, byte 0x7f8")
    good, bad = (int(value.split()[-1], 16) for value in found.values)
    assert good ^ bad == 1 << 5
    assert f"DIFFERENT from cycle {cycle:,} on" in text_of(result)


def test_a_bit_of_an_operand_is_shown_in_its_format(recorded):
    """In what a matmul reads, as BF16, with the instruction that reads it."""
    load = recorded.program.instruction(lockstep.Engine.PE, 0).src
    place = load.start_partition + 1, load.offset + 2
    result = compare(faulty(1500, flip("sbuf", place, 7)), recorded, window=WINDOW)
    assert result.cycle == 1500
    found = result.differences[0]
    assert f"partition {place[0]}, byte {load.offset + 2:#x}, of PE instruction" in found.what
    assert "bfloat16" in found.what
    for value in found.values:
        number, bits = value.split()
        raw = np.array([int(bits, 16)], np.uint16).view(BF16.dtype)
        assert float(number) == pytest.approx(float(raw[0]))


def test_a_flipped_bit_in_psum_is_a_binary32_sum(recorded):
    bank = TINY.psum_bank_bytes
    result = compare(faulty(900, flip("psum", (3, 7 * bank + 5), 6)), recorded, window=WINDOW)
    assert result.cycle == 900
    assert result.differences[0].what.startswith(
        f"PSUM partition 3, bank 7, byte {7 * bank + 4:#x}"
    )
    assert "float32" in result.differences[0].what
    good, bad = (int(value.split()[-1], 16) for value in result.differences[0].values)
    assert good ^ bad == 1 << (8 + 6)


def test_a_flipped_bit_in_hbm_names_the_tensor_and_the_index(recorded):
    address = recorded.addresses["b"] + 2 * (3 * 16 + 5) + 1
    result = compare(faulty(1700, flip_hbm(address, 7)), recorded, window=WINDOW)
    assert result.cycle == 1700
    assert "HBM address" in result.differences[0].what
    assert "b[3, 5], bfloat16" in result.differences[0].what
    good, bad = (float(value.split()[0]) for value in result.differences[0].values)
    assert good == -bad


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("image", "instruction 0 of queue PE"), ("descriptor", "a descriptor"),
        ("unused", "HBM address"),
    ],
)  # fmt: skip
def test_the_rest_of_hbm_is_named_too(recorded, where, said):
    end = recorded.image_address + recorded.program.image_bytes
    base = recorded.queues[lockstep.Engine.PE][0]
    address = {"image": base + 100, "descriptor": end - 1, "unused": HBM_BYTES - 1}[where]
    result = compare(faulty(1750, flip_hbm(address)), recorded, window=WINDOW)
    assert result.cycle == 1750
    assert said in result.differences[0].what


def test_a_counter_that_is_off_is_found_and_so_is_when(recorded):
    address = counter_address("pe_columns")

    def read(machine, asked, value):
        return value + 1 if asked == address and machine.cycles >= 1200 else value

    result = compare(faulty(read=read), recorded, window=WINDOW)
    assert not result.equal
    assert 1200 - lockstep._READ_CYCLES <= result.cycle <= 1200
    assert result.differences[0].what == "counter pe_columns"
    good, bad = (int(value.split()[0].replace(",", "")) for value in result.differences[0].values)
    assert bad == good + 1


def test_the_earliest_counter_is_named(recorded):
    late, early = counter_address("core_cycles"), counter_address("pe_busy")

    def read(machine, asked, value):
        when = {late: 1300, early: 1100}.get(asked)
        return value + 1 if when is not None and machine.cycles >= when else value

    result = compare(faulty(read=read), recorded, window=1000)
    assert 1100 - lockstep._READ_CYCLES <= result.cycle <= 1100
    assert result.differences[0].what == "counter pe_busy"


def test_a_machine_that_hangs_is_a_difference(recorded):
    """It stands still: time passes, nothing else."""

    def hang(machine):
        machine.reg_write(address_of("control"), 2)  # a reset in the middle of the run

    result = compare(faulty(1000, hang), recorded, window=WINDOW)
    assert not result.equal
    assert result.cycle == pytest.approx(1000, abs=lockstep.WINDOW_CYCLES)
    assert result.queues


def test_a_machine_that_does_not_answer_is_a_difference(recorded):
    def read(machine, asked, value):
        if machine.cycles >= 1300:
            raise RuntimeError(f"read of register {asked:#05x}: no answer")
        return value

    result = compare(faulty(read=read), recorded, window=WINDOW)
    assert not result.equal
    assert 1300 - lockstep._READ_CYCLES <= result.cycle <= 1300
    assert "no answer" in text_of(result)


def test_a_machine_that_takes_longer_to_answer_is_a_difference(recorded):
    def read(machine, asked, value):
        if machine.cycles >= 1000:
            machine.step(1)
        return value

    result = compare(faulty(read=read), recorded, window=WINDOW)
    assert not result.equal
    assert result.differences[0].what.startswith("time that passed in the same steps")
    assert result.differences[0].values[0] != result.differences[0].values[1]


def test_queues_are_told_with_their_instructions_and_lines(recorded):
    result = compare(faulty(1200, flip("sbuf", (0, 2047))), recorded, window=WINDOW)
    text = "\n".join(result.queues)
    assert "PE: " in text
    assert "issued, " in text
    assert "  head " in text
    assert "matmul.py:" in text
    assert "loadstationary" in text or "matmulmoving" in text


def test_a_difference_from_golden_alone_is_found(recorded):
    wrong = {**recorded.after, "HBM": recorded.after["HBM"].copy()}
    wrong["HBM"][recorded.addresses["c"] + 7] ^= 0x80
    other = lockstep.Recorded(
        recorded.program, recorded.addresses, recorded.image_address, recorded.queues,
        recorded.before, wrong, recorded.banks,
    )  # fmt: skip
    result = compare(Machines(("one", "two"), (start, start)), other, window=WINDOW)
    assert not result.equal
    assert result.cycle is None
    assert result.names == ("both", "golden")
    assert "c[0, 1], float32" in result.differences[0].what
    assert "DIFFERENT from the golden model" in text_of(result)


def test_looking_in_every_cycle_finds_the_same(recorded):
    machines = faulty(1200, flip("sbuf", (1, 2044)))
    assert compare(machines, recorded, only=(1190, 1210)).cycle == 1200
    before = compare(machines, recorded, only=(1180, 1199))
    assert before.equal
    assert "looked at up to cycle 1,199" in text_of(before)


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch):
    """The command on machines with a fault."""
    machines = faulty(1000, flip("sbuf", (2, 2040)), size=1 << 20)
    monkeypatch.setattr(lockstep.Machines, "of", lambda *arguments: machines)


def test_a_difference_is_exit_code_1_and_told_how_to_see_again(planted, tmp_path):
    folder = tmp_path / "operands"
    result = call("--matmul", "8x8x16", "--hbm-mib", "1", "--operands", str(folder))
    assert result.exit_code == 1, result.output
    assert "DIFFERENT from cycle 1,000 on" in result.stdout
    again, waves = result.stdout.strip().splitlines()[-2:]
    assert "makalu compare --matmul 8x8x16" in again
    assert again.endswith("--cycles 950:1050")
    assert waves.startswith(f"makalu matmul {folder / 'a.npy'} {folder / 'b.npy'} ")
    assert waves.endswith("--waves out.vcd --waves-window 950:1050")
    repeated = call(*shlex.split(again)[2:])
    assert repeated.exit_code == 1
    assert "DIFFERENT from cycle 1,000 on" in repeated.stdout
    assert np.load(folder / "a.npy").shape == (8, 8)


def test_json_has_the_same(planted):
    result = call("--matmul", "8x8x16", "--hbm-mib", "1", "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["programs"][0]["cycle"] == 1000
    assert values["programs"][0]["differences"][0]["what"].startswith("SBUF partition 2")
    assert any("--waves-window 950:1050" in command for command in values["again"])


KERNEL = """
import nki, numpy as np
import nki.isa as nisa
import nki.language as nl

@nki.jit
def double_copy(a):
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a))
    return out

if __name__ == "__main__":
    for seed in range(2):
        double_copy(np.full((4, 8), seed + 1, np.float32))
"""


@pytest.mark.parametrize("inputs", [("4x8:bf16",), ()], ids=["with_inputs", "as_a_script"])
def test_a_kernel_file_is_compared(tmp_path, monkeypatch, inputs):
    monkeypatch.setattr(
        lockstep.Machines, "of", lambda *arguments: Machines(("a", "b"), (big, big))
    )
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    result = call(str(path), *inputs, "--hbm-mib", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("equal in every byte and counter") == (1 if inputs else 2)
    assert "double_copy on TINY" in result.stdout


def big():
    return start(1 << 20)


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("--matmul", "8x8"), ("--matmul", "1x1x1", "kernel.py"), ("none.py",),
        ("--matmul", "4x4x4", "--backends", "native"),
        ("--matmul", "4x4x4", "--backends", "native,golden"),
        ("--matmul", "4x4x4", "--backends", "native,cuda"),
        ("--matmul", "4x4x4", "--cycles", "9:3"), ("--matmul", "4x4x4", "--cycles", "x"),
        ("--matmul", "4x4x4", "--window", "0"), ("--matmul", "4x4x4", "--config", "HUGE"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


def test_golden_may_be_named_with_two_others():
    assert lockstep.check_backends(["golden", "pysim", "native"]) == ("pysim", "native")
    with pytest.raises(UsageError, match="two backends that count cycles"):
        lockstep.check_backends(["golden", "pysim"])
