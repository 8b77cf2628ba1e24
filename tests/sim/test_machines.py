"""The machines: back doors, registers, runs; both do the same in the same cycle."""

from dataclasses import replace

import numpy as np
import pytest
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.isa import Engine, EventSemaphore, Update, UpdateMode, Wait, WaitMode
from makalu.rtl.arch.registers import (
    COUNTER_BASE,
    ID_VALUE,
    REGISTERS,
    SEMAPHORE_BASE,
    address_of,
    counter_address,
    queue_register,
)
from makalu.sim import toolchain
from makalu.sim.backends import native
from makalu.sim.backends.native import NativeMachine
from makalu.sim.backends.pysim import PysimMachine
from makalu.sim.backends.verilator import VerilatorMachine

HBM = HbmConfig(size_bytes=64 << 10, latency_cycles=20)


def open_machine(name, hbm=HBM):
    if name == "pysim":
        return PysimMachine(TINY, hbm)
    try:
        return {"native": NativeMachine, "verilator": VerilatorMachine}[name](TINY, hbm)
    except toolchain.ToolMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(
    scope="module",
    params=["pysim", "native", pytest.param("verilator", marks=pytest.mark.verilator)],
)
def machine(request):
    with open_machine(request.param) as machine:
        yield machine
        machine.close()  # a closed machine may be closed again


def start(machine, programs):
    """Put a program per engine into HBM and ring the doorbell."""
    machine.reg_write(address_of("control"), 2)
    while machine.reg_read(address_of("status")) & 8:
        pass
    machine.reg_write(address_of("clear"), 1)
    address = 0x1000
    for engine in Engine:
        words = programs.get(engine, ())
        machine.reg_write(queue_register(engine, "base_lo"), address)
        machine.reg_write(queue_register(engine, "base_hi"), 0)
        machine.reg_write(queue_register(engine, "count"), len(words))
        for word in words:
            machine.hbm_write(address, word)
            address += len(word)
    machine.reg_write(address_of("control"), 1)


def signal(engine, *, waits=(), semaphore=0, by=1):
    update = Update(semaphore, UpdateMode.ADD, by)
    return EventSemaphore(engine=engine, waits=waits, update=update).encode()


PROGRAMS = {
    Engine.PE: [signal(Engine.PE, waits=(Wait(1, WaitMode.GE, 3),), semaphore=2, by=7)],
    Engine.SP: [signal(Engine.SP, semaphore=1) for _ in range(5)],
}


def test_the_core_answers(machine):
    assert machine.reg_read(address_of("id")) == ID_VALUE
    assert machine.reg_read(address_of("fingerprint")) == TINY.fingerprint
    assert machine.reg_read(address_of("rows")) == TINY.rows
    machine.reg_write(address_of("watchdog"), 1234)
    assert machine.reg_read(address_of("watchdog")) == 1234
    machine.reg_write(address_of("watchdog"), 65536)


def test_a_bad_register_is_an_error_that_says_which(machine):
    with pytest.raises(RuntimeError, match="write of register 0x000: SLVERR"):
        machine.reg_write(address_of("id"), 1)


def test_hbm_keeps_any_bytes_at_any_address(machine, rng):
    whole = rng.bytes(HBM.size_bytes)
    machine.hbm_write(0, whole)
    assert machine.hbm_read(0, HBM.size_bytes) == whole
    part = rng.bytes(37)
    machine.hbm_write(1003, part)
    whole = whole[:1003] + part + whole[1040:]
    assert machine.hbm_read(0, HBM.size_bytes) == whole
    for address, nbytes in ((0, 0), (1, 1), (7, 2), (HBM.size_bytes - 3, 3), (999, 64)):
        assert machine.hbm_read(address, nbytes) == whole[address : address + nbytes]
    machine.hbm_write(5, np.arange(4, dtype=np.float32))
    assert machine.hbm_read(5, 16) == np.arange(4, dtype=np.float32).tobytes()
    machine.hbm_write(HBM.size_bytes, b"")


@pytest.mark.parametrize(("address", "nbytes"), [(-1, 1), (HBM.size_bytes - 1, 2), (1 << 40, 1)])
def test_hbm_outside_is_an_error(machine, address, nbytes):
    with pytest.raises(ValueError, match="do not lie in the"):
        machine.hbm_read(address, nbytes)
    with pytest.raises(ValueError, match="do not lie in the"):
        machine.hbm_write(address, bytes(nbytes))


def test_sbuf_and_psum_keep_what_is_written(machine, rng):
    sbuf = rng.integers(0, 256, (TINY.partitions, TINY.sbuf_bytes), np.uint8)
    psum = rng.integers(0, 256, (TINY.partitions, TINY.psum_bytes), np.uint8)
    machine.sbuf_write(sbuf)
    machine.psum_write(psum)
    machine.step(10)
    assert np.array_equal(machine.sbuf_read(), sbuf)
    assert np.array_equal(machine.psum_read(), psum)
    with pytest.raises(ValueError, match=r"expected uint8 \[4, 2048\], not float32"):
        machine.sbuf_write(sbuf.astype(np.float32))


def test_a_program_runs_until_it_is_done(machine):
    start(machine, PROGRAMS)
    heard = []
    cycles = machine.run(progress=heard.append)
    assert machine.reg_read(address_of("status")) == 2
    assert cycles == heard[-1]
    assert machine.reg_read(SEMAPHORE_BASE + 4) == 5
    assert machine.reg_read(SEMAPHORE_BASE + 8) == 7
    assert HBM.latency_cycles < machine.reg_read(counter_address("core_cycles")) <= cycles


def test_a_run_ends_after_max_cycles_and_can_go_on(machine):
    start(machine, PROGRAMS)
    assert 10 <= machine.run(max_cycles=10) < 40
    assert machine.reg_read(address_of("status")) == 1
    machine.run()
    assert machine.reg_read(address_of("status")) == 2


@pytest.mark.verilator
def test_all_do_the_same_in_the_same_cycle(rng):
    """A good program, then one that is stopped by an illegal instruction; every register agrees."""
    machines = [open_machine(name) for name in ("pysim", "native", "verilator")]
    garbage = rng.bytes(128)
    seen = []
    for machine in machines:
        log = []
        machine.hbm_write(0, bytes(range(256)) * 8)
        for programs in (PROGRAMS, {**PROGRAMS, Engine.ACT: [garbage]}):
            start(machine, programs)
            log.append((machine.cycles, machine.run(max_cycles=3000)))
            for register in REGISTERS:
                if "r" in register.access:
                    log.append((register.name, machine.reg_read(register.address)))
            for i in range(40):
                log.append((i, machine.reg_read(COUNTER_BASE + 8 * i)))
        log.append(("hbm", machine.hbm_read(0, 0x2000)))
        seen.append(log)
        machine.close()
    for one, *others in zip(*seen, strict=True):
        assert others == [one] * 2
    assert dict(log[1:])["status"] == 4


@pytest.mark.parametrize("name", ["native", pytest.param("verilator", marks=pytest.mark.verilator)])
def test_one_model_serves_every_hbm(monkeypatch, name):
    def refuse(*arguments, **options):
        raise AssertionError("a second model was built")

    machines = []
    for hbm in (HBM, replace(HBM, latency_cycles=1000), replace(HBM, size_bytes=1 << 34)):
        machines.append(machine := open_machine(name, hbm))
        monkeypatch.setattr(toolchain, "verilate_into", refuse)
        monkeypatch.setattr(native, "compile_netlist", refuse)
        machine.hbm_write(0x1000, b"x")
    cycles = []
    for machine in machines:
        start(machine, PROGRAMS)
        cycles.append(machine.run())
        machine.close()
    assert cycles[1] - cycles[0] >= 950
    assert cycles[0] == cycles[2]


@pytest.mark.parametrize("name", ["native", pytest.param("verilator", marks=pytest.mark.verilator)])
def test_a_closed_model_is_an_error(name):
    machine = open_machine(name)
    machine.close()
    machine.close()
    with pytest.raises(RuntimeError, match="closed"):
        machine.step(1)
