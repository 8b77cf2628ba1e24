"""Checkpoints: a run goes on from the file, in a new process too, as if nothing had been."""

import json
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from makalu.sim.native import checkpoint
from makalu.sim.native.checkpoint import CheckpointError
from makalu.sim.native.model import Model, Simulation

from .lockstep import build
from .test_cells import WIDTHS, RandomLogic, RandomMemory
from .test_lanes import Grid, Looks, Pairs


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Models that keep more are of no use to others."""
    monkeypatch.setenv("MAKALU_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


DESIGNS = {
    "logic": lambda seed: RandomLogic(7000 * seed, WIDTHS[1], 30),
    "wide logic": lambda seed: RandomLogic(8000 * seed, WIDTHS[2], 30),
    "memory": lambda seed: RandomMemory(900 * seed),
    "another memory": lambda seed: RandomMemory(901 * seed),
    "rows": lambda seed: Grid(10, 4, [None, 0, 1, 2, 3, None, 5, 6, 7, 8]),
    "two groups": lambda seed: Pairs(9),
    "memories in lanes": lambda seed: Looks(),
}


def inputs(simulation):
    return [(n, w) for n, (_, w) in simulation.model.table["inputs"].items() if n not in CLOCKS]


CLOCKS = ("clk", "rst")


def drive(simulation, rng, cycles, change=0.3):
    """Run with random inputs; every output of every cycle, and the complete state at the end."""
    seen = []
    for _ in range(cycles):
        for name, width in inputs(simulation):
            if rng.random() < change:
                simulation.set(name, rng.getrandbits(width))
        simulation.settle()
        seen.append([simulation.get(name) for name in simulation.model.table["outputs"]])
        simulation.step()
    return seen, {name: array.tolist() for name, array in simulation.contents().items()}


@pytest.mark.parametrize("name", DESIGNS)
def test_a_run_goes_on_from_the_file(tmp_path, seed, name):
    (folder := tmp_path / "model").mkdir()
    simulation = build(DESIGNS[name](seed), folder, threads=2, flags=("-O1", "-DWORTH=0"))
    drive(simulation, random.Random(seed), 50)
    simulation.save(tmp_path / "at51")
    wanted = drive(simulation, random.Random(seed + 1), 60)
    assert any(seen != wanted[0][0] for seen in wanted[0])
    other = Simulation(simulation.model, 1)
    for _ in range(2):
        for again in (other, simulation):
            again.restore(tmp_path / "at51")
            assert again.cycles == 51
            assert drive(again, random.Random(seed + 1), 60) == wanted
    other.close()
    simulation.close()


def test_a_run_goes_on_in_another_process(tmp_path, seed):
    (folder := tmp_path / "model").mkdir()
    simulation = build(DESIGNS["rows"](seed), folder)
    drive(simulation, random.Random(seed), 50)
    simulation.save(tmp_path / "file")
    simulation.step(1000)
    code = (
        "import json, sys\n"
        "from makalu.sim.native.model import Model, Simulation\n"
        "simulation = Simulation(Model(sys.argv[1]))\n"
        "simulation.restore(sys.argv[2])\n"
        "simulation.step(1000)\n"
        "print(json.dumps({n: a.tolist() for n, a in simulation.contents().items()}))\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = {name: array.tolist() for name, array in simulation.contents().items()}
    assert json.loads(done.stdout) == wanted
    simulation.close()


def test_a_model_compiled_in_another_way_takes_the_same_file(tmp_path, seed):
    """What a file holds does not depend on how the C lays it out."""
    first = tmp_path / "first"
    first.mkdir()
    simulation = build(DESIGNS["rows"](seed), first)
    drive(simulation, random.Random(seed), 50)
    simulation.save(tmp_path / "file")
    values = range(len(simulation.model.signals.table["values"]))
    comb = {v for v in values if simulation.model.signals.table["values"][v][0]}
    model = simulation.model.watching({v for v in comb if v in simulation.model.signals.late})
    assert model is not simulation.model
    assert len(model.offsets) > len(simulation.model.offsets)
    other = Simulation(model)
    other.restore(tmp_path / "file")
    wanted = drive(simulation, random.Random(seed + 1), 60)
    assert drive(other, random.Random(seed + 1), 60) == wanted
    other.close()
    simulation.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A simulation, and a file with its state 20 cycles ago."""
    folder = tmp_path_factory.mktemp("checkpoint")
    simulation = build(Looks(), folder)
    drive(simulation, random.Random(5), 20, 0.9)
    simulation.save(folder / "file")
    drive(simulation, random.Random(6), 20, 0.9)
    yield simulation, folder / "file"
    simulation.close()


def refused(simulation, path, message):
    before = {name: array.tolist() for name, array in simulation.contents().items()}
    with pytest.raises(CheckpointError, match=message):
        simulation.restore(path)
    assert {name: array.tolist() for name, array in simulation.contents().items()} == before


def test_a_file_of_another_design_is_refused(saved, tmp_path):
    (folder := tmp_path / "model").mkdir()
    other = build(Pairs(3), folder)
    other.save(tmp_path / "file")
    other.close()
    refused(saved[0], tmp_path / "file", r"something else: design is '\w+' in the file and '\w+'")


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(saved, tmp_path, part):
    raw = saved[1].read_bytes()
    (tmp_path / "file").write_bytes(raw[: int(len(raw) * part)])
    refused(saved[0], tmp_path / "file", "not a checkpoint, or a damaged one")


def test_a_changed_byte_is_refused(saved, tmp_path, seed):
    raw = bytearray(saved[1].read_bytes())
    with zipfile.ZipFile(saved[1]) as archive:
        entry = archive.getinfo("values.npy")
    at = entry.header_offset + 60 + entry.compress_size // 2
    raw[at] ^= 1 << random.Random(seed).randrange(8)
    (tmp_path / "file").write_bytes(raw)
    refused(saved[0], tmp_path / "file", "damaged")


def test_a_file_of_another_version_is_refused(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 99)
    saved[0].save(tmp_path / "file")
    monkeypatch.undo()
    refused(saved[0], tmp_path / "file", "of version 99, and this reads version 1")


def test_what_is_no_checkpoint_is_refused(saved, tmp_path):
    np.savez(tmp_path / "file.npz", a=np.zeros(3))
    refused(saved[0], tmp_path / "file.npz", "not of a checkpoint")
    (tmp_path / "text").write_text("cycle,value\n")
    refused(saved[0], tmp_path / "text", "not a checkpoint")
    with pytest.raises(FileNotFoundError):
        saved[0].restore(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["values", "memory0", "cycles"])
def test_an_array_of_another_size_is_refused(saved, tmp_path, name):
    contents = saved[0].contents()
    contents[name] = np.append(contents[name], 0)
    checkpoint.write(tmp_path / "file", saved[0].facts(), contents)
    refused(saved[0], tmp_path / "file", f"{name} is missing or of another size")


def test_a_failed_save_leaves_the_old_file(saved, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(saved[1].read_bytes())

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        saved[0].save(path)
    assert path.read_bytes() == saved[1].read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_pages_of_zeros_are_left_out():
    memory = np.zeros((1 << 24) + 100, np.uint8)
    memory[[5, 4096 * 300 + 17, 4096 * 301, (1 << 24) + 99]] = 1, 2, 3, 4
    numbers, contents = checkpoint.pages(memory)
    assert numbers.tolist() == [0, 300, 301, 4096]
    again = np.zeros_like(memory)
    checkpoint.put_pages(again, numbers, contents)
    assert np.array_equal(again, memory)


def test_the_facts_are_not_those_of_another_folder(tmp_path):
    """Where the sources lie is no part of a design."""
    found = []
    for name in ("one", "two"):
        (folder := tmp_path / name).mkdir()
        build(Pairs(3), folder).close()
        found.append(Model(folder).table["design"])
    assert found[0] == found[1]
