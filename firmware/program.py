"""Programs: encoded instruction queues and descriptor tables, relocatable, as a checked file.

A program knows its tensors by name and kind but not where they lie. :meth:`Program.link` gives the
bytes to put into HBM for given addresses. The file has a magic number, a version, the fingerprint
of the machine it was built for, and sections with lengths and CRC-32s; whatever does not agree is
refused with the place and both values.
"""

import contextlib
import json
import math
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..rtl.arch import formats, isa
from ..rtl.arch.config import AXI_ADDR_BITS
from ..rtl.arch.isa import DESCRIPTOR_BYTES, WORD_BYTES, Engine

__all__ = ["Program", "ProgramError", "TensorInfo"]

MAGIC = b"MAKALU\r\n"
VERSION = 1
HEADER = struct.Struct(
    "<8sIIIII"
)  # magic, version, fingerprint, sections, bytes in all, CRC of rest
_CRC_BYTE = HEADER.size - 4
ENTRY = struct.Struct("<8sQQI4x")  # name, offset, length, CRC-32

RELOCATION_DTYPE = np.dtype([("descriptor", "<u4"), ("side", "<u2"), ("tensor", "<u2")])
"""A tensor's address is added to a descriptor's source (side 0) or destination (side 1)."""
TABLE_DTYPE = np.dtype([("engine", "<u2"), ("row", "<u4"), ("descriptor", "<u4")])
"""The address of a descriptor goes into a DmaStart."""

_ADDRESS = {
    side: next(bit for name, bit, _ in isa.DESCRIPTOR_LAYOUT if name == f"{label}_address") // 8
    for side, label in enumerate(("src", "dst"))
}
_TABLE_BYTE, _TABLE_BITS = next(
    (bit // 8, item.width) for name, item, bit in isa.DmaStart.scalars if name == "table"
)


class ProgramError(ValueError):
    """A program file that is refused, or a program that cannot be linked."""


@dataclass(frozen=True)
class TensorInfo:
    """An HBM tensor of a program.

    Parameters
    ----------
    name : :class:`str`
    kind : :class:`str`
        ``"input"``, ``"output"`` or ``"scratch"``.
    shape : tuple of :class:`int`
    dtype : format
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: formats.FloatFormat | formats.IntFormat

    @property
    def nbytes(self):
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.bytes


@dataclass
class Program:
    """A compiled kernel.

    Attributes
    ----------
    kernel, config_name : :class:`str`
    fingerprint : :class:`int`
        Of the :class:`CoreConfig` it was built for.
    tensors : tuple of :class:`TensorInfo`
    outputs : tuple of :class:`str`
        Names of the outputs in the order the kernel returns them.
    queues : dict of :class:`Engine` to array ``[n, 128]`` of bytes
    descriptors : array ``[n, 128]`` of bytes
    relocations, tables
        What :meth:`link` patches.
    lines : dict of :class:`Engine` to array
        For each instruction an index into :attr:`locations`.
    locations : tuple of ``(file, line)``
    stats : dict
        ``macs``, ``passes``, ``ideal_cycles``, ``hbm_bytes_read``, ..., and ``instructions`` by
        engine (the waits that do not fit them apart).
    """

    kernel: str
    config_name: str
    fingerprint: int
    tensors: tuple[TensorInfo, ...]
    outputs: tuple[str, ...]
    queues: dict
    descriptors: np.ndarray
    relocations: np.ndarray
    tables: np.ndarray
    lines: dict
    locations: tuple
    stats: dict = field(default_factory=dict)

    # Facts ----------------------------------------------------------------------------------------

    def tensor(self, name):
        """The :class:`TensorInfo` called ``name``."""
        for info in self.tensors:
            if info.name == name:
                return info
        raise ProgramError(
            f"{self.kernel} has no tensor {name!r}; "
            f"it has {', '.join(info.name for info in self.tensors)}"
        )

    @property
    def inputs(self):
        """Names of the inputs in argument order."""
        return tuple(info.name for info in self.tensors if info.kind == "input")

    @property
    def image_bytes(self):
        """Size of the image that :meth:`link` returns."""
        rows = sum(len(words) for words in self.queues.values())
        return rows * WORD_BYTES + len(self.descriptors) * DESCRIPTOR_BYTES

    def instruction(self, engine, row):
        """The :class:`Instruction` at ``row`` of a queue (unlinked)."""
        return isa.decode(self.queues[Engine(engine)][row].tobytes())

    def where(self, engine, row):
        """``file:line`` of the kernel that an instruction comes from."""
        file, line = self.locations[self.lines[Engine(engine)][row]]
        return f"{file}:{line}"

    def check_config(self, config):
        """Refuse a machine that this program was not built for."""
        if config.fingerprint != self.fingerprint:
            raise ProgramError(
                f"program {self.kernel!r} was built for {self.config_name} (fingerprint "
                f"{self.fingerprint:#010x}); this machine is {config.name} "
                f"({config.fingerprint:#010x}): compile the kernel for it"
            )

    def __str__(self):
        queues = ", ".join(f"{e.name} {len(w)}" for e, w in self.queues.items() if len(w))
        return (
            f"<Program {self.kernel} for {self.config_name}: {queues}, "
            f"{len(self.descriptors)} descriptors>"
        )

    __repr__ = __str__

    # Linking --------------------------------------------------------------------------------------

    def link(self, image_base, tensor_addresses):
        """Place the program and its tensors.

        Parameters
        ----------
        image_base : :class:`int`
            HBM address of the image; a multiple of 128.
        tensor_addresses : dict of :class:`str` to :class:`int`
            HBM address of every tensor.

        Returns
        -------
        (:class:`bytes`, dict of :class:`Engine` to ``(address, count)``)
            The image, and where each queue starts in it.
        """
        if image_base % WORD_BYTES or image_base < 0:
            raise ProgramError(f"image address {image_base:#x} must be a multiple of {WORD_BYTES}")
        limit = 1 << AXI_ADDR_BITS
        if image_base + self.image_bytes > limit:
            raise ProgramError(f"image at {image_base:#x} does not end below {limit:#x}")
        addresses = []
        for info in self.tensors:
            if info.name not in tensor_addresses:
                raise ProgramError(
                    f"no address for tensor {info.name!r} {list(info.shape)} of {self.kernel}"
                )
            address = int(tensor_addresses[info.name])
            if not 0 <= address <= limit - info.nbytes:
                raise ProgramError(f"tensor {info.name!r} at {address:#x} is outside HBM")
            addresses.append(address)
        rows = [len(self.queues[engine]) for engine in Engine]
        image = np.concatenate([*(self.queues[engine] for engine in Engine), self.descriptors])
        starts = np.concatenate([[0], np.cumsum(rows)])
        entry = {
            engine: (image_base + WORD_BYTES * int(starts[engine]), rows[engine])
            for engine in Engine
        }
        first = int(starts[-1])
        if len(self.tables):
            at = starts[self.tables["engine"]] + self.tables["row"]
            target = image_base + WORD_BYTES * (first + self.tables["descriptor"].astype(np.int64))
            for i in range(_TABLE_BITS // 8):
                image[at, _TABLE_BYTE + i] = (target >> (8 * i)) & 0xFF
        if len(self.relocations):
            added = np.array(addresses, np.uint64)[self.relocations["tensor"]]
            at = first + self.relocations["descriptor"].astype(np.int64)
            for side, byte in _ADDRESS.items():
                mine = self.relocations["side"] == side
                view = np.ascontiguousarray(image[at[mine], byte : byte + 8]).view("<u8")[:, 0]
                value = view + added[mine]
                image[at[mine], byte : byte + 8] = value.astype("<u8").view(np.uint8).reshape(-1, 8)
        return image.tobytes(), entry

    # Text -----------------------------------------------------------------------------------------

    def disassemble(self, engines=tuple(Engine)):
        """The program as text, queue by queue, with the kernel's lines."""
        out = [
            f"; kernel {self.kernel} for {self.config_name} ({self.fingerprint:#010x})",
            *(
                f"; {info.kind} {info.name} {list(info.shape)} {info.dtype.name}"
                for info in self.tensors
            ),
        ]
        tables = {
            (int(e), int(r)): int(d)
            for e, r, d in zip(
                self.tables["engine"], self.tables["row"], self.tables["descriptor"], strict=True
            )
        }
        for engine in engines:
            words = self.queues[engine]
            if len(words):
                out.append(f"; queue {engine.name}: {len(words)} instructions")
            for row, word in enumerate(words):
                text = str(isa.decode(word.tobytes()))
                note = self.where(engine, row)
                table = tables.get((int(engine), row))
                if table is not None:
                    note = f"descriptor {table}, {note}"
                out.append(f"{text}  ; {note}")
        return "\n".join(out) + "\n"

    # File -----------------------------------------------------------------------------------------

    def to_bytes(self):
        """The program file's contents."""
        meta = {
            "kernel": self.kernel,
            "config": self.config_name,
            "tensors": [[t.name, t.kind, list(t.shape), t.dtype.name] for t in self.tensors],
            "outputs": list(self.outputs),
            "locations": [list(place) for place in self.locations],
            "stats": self.stats,
        }
        sections = [(b"meta", json.dumps(meta, sort_keys=True).encode())]
        for engine in Engine:
            name = engine.name.lower().encode()
            sections.append((b"q_" + name, self.queues[engine].tobytes()))
            sections.append((b"l_" + name, self.lines[engine].astype("<u4").tobytes()))
        sections += [
            (b"desc", self.descriptors.tobytes()),
            (b"reloc", self.relocations.astype(RELOCATION_DTYPE).tobytes()),
            (b"tables", self.tables.astype(TABLE_DTYPE).tobytes()),
        ]
        offset = HEADER.size + ENTRY.size * len(sections)
        entries, blobs = [], []
        for name, blob in sections:
            entries.append(ENTRY.pack(name, offset, len(blob), zlib.crc32(blob)))
            blobs.append(blob)
            offset += len(blob)
        table = b"".join(entries)
        head = HEADER.pack(MAGIC, VERSION, self.fingerprint, len(sections), offset, 0)
        crc = zlib.crc32(head[:_CRC_BYTE] + table)
        return b"".join([head[:_CRC_BYTE], struct.pack("<I", crc), table, *blobs])

    def save(self, path):
        """Write the file; a reader sees the old one or all of the new one."""
        path = Path(path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise

    @classmethod
    def load(cls, path, config=None):
        """Read a program file.

        Raises
        ------
        :exc:`ProgramError`
            If it is not one, is damaged, is of another version, or (with ``config``) was built for
            another machine.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes(), config)
        except ProgramError as error:
            raise ProgramError(f"{path}: {error}") from None

    @classmethod
    def from_bytes(cls, data, config=None):
        """The inverse of :meth:`to_bytes`; errors as in :meth:`load`."""
        data = bytes(data)
        if len(data) < HEADER.size:
            raise ProgramError(
                f"header: a program file has at least {HEADER.size} bytes, this has {len(data)}"
            )
        magic, version, fingerprint, count, total, crc = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ProgramError(
                f"header: expected the magic bytes {MAGIC!r} at offset 0, got {magic!r}: "
                "this is not a program file"
            )
        if version != VERSION:
            raise ProgramError(
                f"header: expected version {VERSION} at offset 8, got {version}: "
                "compile the kernel again"
            )
        if total != len(data):
            raise ProgramError(
                f"header: expected {total} bytes in all, got {len(data)}: "
                + ("the file is truncated" if len(data) < total else "something was appended")
            )
        end = HEADER.size + ENTRY.size * count
        if end > len(data):
            raise ProgramError(f"section table: {count} sections do not fit {len(data)} bytes")
        table = data[HEADER.size : end]
        found = zlib.crc32(data[:_CRC_BYTE] + table)
        if found != crc:
            raise ProgramError(
                f"header and section table at offset 0: expected CRC-32 {crc:#010x}, "
                f"got {found:#010x}: the file is corrupted"
            )
        sections = {}
        for i in range(count):
            name, offset, length, crc = ENTRY.unpack_from(table, i * ENTRY.size)
            name = name.rstrip(b"\0").decode("ascii", "replace")
            if offset + length > len(data):
                raise ProgramError(
                    f"section {name!r} at offset {offset}: expected {length} bytes, "
                    f"got {max(len(data) - offset, 0)}"
                )
            blob = data[offset : offset + length]
            if zlib.crc32(blob) != crc:
                raise ProgramError(
                    f"section {name!r} at offset {offset}: expected CRC-32 {crc:#010x}, "
                    f"got {zlib.crc32(blob):#010x}: the file is corrupted"
                )
            sections[name] = blob
        if config is not None and config.fingerprint != fingerprint:
            raise ProgramError(
                f"header: expected fingerprint {config.fingerprint:#010x} ({config.name}) at "
                f"offset 12, got {fingerprint:#010x}: the program was built for another machine"
            )
        return cls._from_sections(sections, fingerprint)

    @classmethod
    def _from_sections(cls, sections, fingerprint):
        def section(name, dtype: np.dtype = np.dtype(np.uint8), width=None):
            if name not in sections:
                raise ProgramError(f"section {name!r} is missing; got {', '.join(sections)}")
            unit = dtype.itemsize * (width or 1)
            if len(sections[name]) % unit:
                raise ProgramError(
                    f"section {name!r}: expected a multiple of {unit} bytes, "
                    f"got {len(sections[name])}"
                )
            found = np.frombuffer(sections[name], dtype)
            return found.reshape(-1, width) if width else found

        try:
            meta = json.loads(bytes(section("meta")))
            tensors = tuple(
                TensorInfo(name, kind, tuple(shape), formats.format_of(dtype))
                for name, kind, shape, dtype in meta["tensors"]
            )
            locations = tuple((file, line) for file, line in meta["locations"])
            kernel, config_name, stats = meta["kernel"], meta["config"], meta["stats"]
            outputs = tuple(meta["outputs"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ProgramError):
                raise
            raise ProgramError(f"section 'meta': {error!r}") from None
        queues, lines = {}, {}
        for engine in Engine:
            name = engine.name.lower()
            queues[engine] = section(f"q_{name}", width=WORD_BYTES)
            lines[engine] = section(f"l_{name}", np.dtype("<u4"))
            if len(lines[engine]) != len(queues[engine]):
                raise ProgramError(
                    f"section 'l_{name}': expected {len(queues[engine])} lines, "
                    f"got {len(lines[engine])}"
                )
            if len(lines[engine]) and lines[engine].max() >= len(locations):
                raise ProgramError(
                    f"section 'l_{name}': expected locations below {len(locations)}, "
                    f"got {lines[engine].max()}"
                )
        descriptors = section("desc", width=DESCRIPTOR_BYTES)
        relocations = section("reloc", RELOCATION_DTYPE)
        tables = section("tables", TABLE_DTYPE)
        for name, values, limit in (
            ("reloc", relocations["descriptor"], len(descriptors)),
            ("reloc", relocations["side"], 2),
            ("reloc", relocations["tensor"], len(tensors)),
            ("tables", tables["engine"], len(Engine)),
            ("tables", tables["descriptor"], max(len(descriptors), 1)),
        ):
            if len(values) and values.max() >= limit:
                raise ProgramError(
                    f"section {name!r}: expected values below {limit}, got {values.max()}"
                )
        for engine in Engine:
            rows = tables["row"][tables["engine"] == int(engine)]
            if len(rows) and rows.max() >= len(queues[engine]):
                raise ProgramError(
                    f"section 'tables': expected rows below {len(queues[engine])}, got {rows.max()}"
                )
        return cls(
            kernel=kernel, config_name=config_name, fingerprint=fingerprint, tensors=tensors,
            outputs=outputs, queues=queues, descriptors=descriptors, relocations=relocations,
            tables=tables, lines=lines, locations=locations, stats=stats,
        )  # fmt: skip
