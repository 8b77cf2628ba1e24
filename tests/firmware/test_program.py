"""Program files: round trip, linking, and refusal of everything that is not right."""

import struct
import zlib

import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_program
from makalu.firmware.program import ENTRY, HEADER, Program, ProgramError
from makalu.rtl.arch import isa
from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.isa import Descriptor, DmaStart, Engine


@pytest.fixture(scope="module")
def program():
    return matmul_program(TINY, (9, 10), (10, 20), "bf16")


@pytest.fixture(scope="module")
def data(program):
    return program.to_bytes()


def addresses(program, base=0x4000, gap=0x1000):
    return {info.name: base + i * gap for i, info in enumerate(program.tensors)}


def test_facts(program):
    assert program.kernel == "matmul"
    assert program.inputs == ("a", "b")
    assert program.outputs == ("c",)
    assert program.tensor("c").shape == (9, 20)
    assert program.tensor("a").nbytes == 9 * 10 * 2
    assert program.stats["macs"] == 9 * 10 * 20
    assert program.stats["passes"] == 9 * 10 * 20
    assert program.where(Engine.PE, 0).split(":")[0].endswith("matmul.py")
    assert "matmul for TINY" in str(program)
    with pytest.raises(ProgramError, match="has a, b, c"):
        program.tensor("d")


def test_round_trip(program, data):
    again = Program.from_bytes(data, TINY)
    assert again.to_bytes() == data
    assert again.stats == program.stats
    assert again.tensors == program.tensors
    assert again.where(Engine.DVE, 0) == program.where(Engine.DVE, 0)
    assert again.link(0x10000, addresses(again)) == program.link(0x10000, addresses(program))


def test_save_and_load(program, data, tmp_path):
    path = tmp_path / "matmul.mkp"
    program.save(path)
    assert path.read_bytes() == data
    program.save(path)  # replaces
    assert Program.load(path, TINY).to_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["matmul.mkp"]


def test_failed_save_leaves_the_old_file(program, tmp_path, monkeypatch):
    path = tmp_path / "matmul.mkp"
    program.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        program.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["matmul.mkp"]


def test_link_places_tables_and_tensors(program):
    base, where = 0x20000, addresses(program)
    image, entry = program.link(base, where)
    assert len(image) == program.image_bytes
    inside = {}
    for engine in (Engine.SP, Engine.ACT):
        address, count = entry[engine]
        for row in range(count):
            at = address - base + 128 * row
            ins = isa.decode(image[at : at + 128])
            if not isinstance(ins, DmaStart):
                continue
            for i in range(ins.engines_used * ins.count):
                at = ins.table - base + 128 * i
                descriptor = Descriptor.decode(image[at : at + 128])
                side = descriptor.src if engine is Engine.SP else descriptor.dst
                name = next(
                    n for n, a in where.items() if a <= side.address < a + program.tensor(n).nbytes
                )
                inside[name] = inside.get(name, 0) + descriptor.src.elements
    assert inside["c"] * 4 == program.tensor("c").nbytes
    assert set(inside) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        (0x20001, {}, "multiple of 128"),
        ((1 << 40) - 128, {}, "does not end below"),
        (0x20000, {"a": None}, "no address for tensor 'a'"),
        (0x20000, {"c": (1 << 40) - 4}, "tensor 'c' at 0xfffffffffc is outside HBM"),
        (0x20000, {"b": -4}, "tensor 'b'"),
    ],
)
def test_link_refuses_impossible_places(program, base, change, expected):
    where = {k: v for k, v in {**addresses(program), **change}.items() if v is not None}
    with pytest.raises(ProgramError, match=expected):
        program.link(base, where)


def test_other_machine_is_refused(program, data):
    with pytest.raises(ProgramError, match=r"fingerprint .*\(SMALL\) at offset 12"):
        Program.from_bytes(data, SMALL)
    with pytest.raises(ProgramError, match=r"built for TINY .* this machine is SMALL"):
        program.check_config(SMALL)
    program.check_config(TINY)


def test_truncation_anywhere_is_refused(data):
    for length in [0, 7, HEADER.size - 1, HEADER.size, 100, len(data) // 2, len(data) - 1]:
        with pytest.raises(ProgramError, match=r"truncated|at least"):
            Program.from_bytes(data[:length])


def test_appended_bytes_are_refused(data):
    with pytest.raises(ProgramError, match="appended"):
        Program.from_bytes(data + b"\0")


def test_any_flipped_bit_is_refused(data):
    rng = np.random.default_rng(1)
    places = {*range(HEADER.size + 2 * ENTRY.size), *rng.integers(0, len(data), 200).tolist()}
    for at in places:
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ProgramError) as caught:
            Program.from_bytes(bytes(bad))
        assert "expected" in str(caught.value) or "section" in str(caught.value)


def test_messages_name_section_offset_expected_and_got(data):
    count = HEADER.unpack_from(data)[3]
    for i in range(count):
        name, offset, length, _ = ENTRY.unpack_from(data, HEADER.size + i * ENTRY.size)
        if not length:
            continue
        bad = bytearray(data)
        bad[offset] ^= 0xFF
        text = name.rstrip(b"\0").decode()
        with pytest.raises(
            ProgramError, match=f"section '{text}' at offset {offset}: expected CRC-32 .* got"
        ):
            Program.from_bytes(bytes(bad))


def test_wrong_magic_and_version(data):
    with pytest.raises(ProgramError, match="not a program file"):
        Program.from_bytes(b"\x7fELF" + data[4:])
    bad = bytearray(data)
    struct.pack_into("<I", bad, 8, 99)
    with pytest.raises(ProgramError, match="expected version 1 at offset 8, got 99"):
        Program.from_bytes(bytes(bad))


def resealed(data, name, change):
    """The file with one section changed in place and every checksum right again."""
    bad = bytearray(data)
    count = HEADER.unpack_from(bad)[3]
    for i in range(count):
        entry = HEADER.size + i * ENTRY.size
        found, offset, length, _ = ENTRY.unpack_from(bad, entry)
        if found.rstrip(b"\0").decode() == name:
            section = bytearray(bad[offset : offset + length])
            change(section)
            bad[offset : offset + length] = section
            ENTRY.pack_into(bad, entry, found, offset, length, zlib.crc32(section))
    end = HEADER.size + count * ENTRY.size
    crc = zlib.crc32(bytes(bad[: HEADER.size - 4] + bad[HEADER.size : end]))
    struct.pack_into("<I", bad, HEADER.size - 4, crc)
    return bytes(bad)


@pytest.mark.parametrize(
    ("section", "change", "expected"),
    [
        ("reloc", lambda s: struct.pack_into("<I", s, 0, 10**6), "section 'reloc': expected"),
        ("reloc", lambda s: struct.pack_into("<H", s, 6, 77), "section 'reloc': expected values"),
        (
            "tables",
            lambda s: struct.pack_into("<I", s, 2, 10**6),
            "section 'tables': expected rows",
        ),
        ("l_pe", lambda s: struct.pack_into("<I", s, 0, 10**6), "section 'l_pe': expected"),
        ("meta", lambda s: s.__setitem__(slice(0, 1), b"["), "section 'meta'"),
    ],
)
def test_inconsistent_contents_are_refused(data, section, change, expected):
    assert resealed(data, section, lambda s: None) == data
    with pytest.raises(ProgramError, match=expected):
        Program.from_bytes(resealed(data, section, change))


def test_load_names_the_file(tmp_path):
    path = tmp_path / "x.mkp"
    path.write_bytes(b"hello")
    with pytest.raises(ProgramError, match=r"x\.mkp: header"):
        Program.load(path)
