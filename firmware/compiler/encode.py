"""Instruction words and descriptors as numpy arrays, many at a time, by the contract's layouts."""

import numpy as np

from ...rtl.arch.isa import (
    AP_BITS,
    DESCRIPTOR_BYTES,
    DESCRIPTOR_COPY,
    DESCRIPTOR_LAYOUT,
    HEADER,
    WORD_BYTES,
    AccessPattern,
)

__all__ = ["encode_accesses", "encode_descriptors", "encode_instructions", "put"]


def put(words, rows, bit, width, values):
    """Write ``values`` into a zero bit field of ``words[rows]`` (bytes, little-endian)."""
    values = np.asarray(values)
    if values.dtype.kind != "u":
        values = values.astype(np.int64).astype(np.uint64)
    values = values.astype(np.uint64, copy=False)
    if width < 64:
        values = values & np.uint64((1 << width) - 1)
    shift = bit & 7
    if shift:
        values = values << np.uint64(shift)
    first = bit >> 3
    for i in range((shift + width + 7) // 8):
        words[rows, first + i] |= ((values >> np.uint64(8 * i)) & np.uint64(0xFF)).astype(np.uint8)


def encode_accesses(accesses):
    """Encode access patterns of placed tiles; sets ``row`` of each to its row in the result."""
    columns = {name: [] for name, _, _ in AccessPattern.LAYOUT}
    for i, access in enumerate(accesses):
        access.row = i
        storage = access.storage
        columns["dtype"].append(access.dtype.code)
        columns["space"].append(1 if storage.buffer == "psum" else 0)
        columns["start_partition"].append(access.start)
        columns["num_partitions"].append(access.count)
        columns["_reserved"].append(0)
        columns["offset"].append(storage.address + access.offset)
        dims = access.dims
        for j in range(4):
            step, count = dims[j] if j < len(dims) else (0, 1)
            columns[f"step{j}"].append(step & 0xFFFF)
            columns[f"count{j}"].append(count)
    table = np.zeros((len(accesses), AP_BITS // 8), np.uint8)
    for name, bit, width in AccessPattern.LAYOUT:
        put(table, slice(None), bit, width, columns[name])
    return table


_HEADER = {name: (bit, width) for name, bit, width in HEADER}


def encode_instructions(words, rows, cls, engine, table, operands, scalars):
    """Encode instructions of one class into ``words[rows]`` (waits and updates apart).

    ``operands`` maps a name to rows of ``table``, ``scalars`` a name to values.
    """
    rows = np.asarray(rows, np.int64)
    put(words, rows, *_HEADER["opcode"], np.full(len(rows), cls.opcode))
    put(words, rows, *_HEADER["engine"], np.full(len(rows), int(engine)))
    for name, _, bit in cls.operands:
        first = bit // 8
        words[rows, first : first + table.shape[1]] = table[operands[name]]
    for name, item, bit in cls.scalars:
        if name in scalars:
            put(words, rows, bit, item.width, scalars[name])


def encode_header(words, rows, part, semaphores, modes, values):
    """Encode waits (``part`` is ``"wait0"`` or ``"wait1"``) or updates (``"update"``)."""
    rows = np.asarray(rows, np.int64)
    put(words, rows, *_HEADER[f"{part}_semaphore"], semaphores)
    put(words, rows, *_HEADER[f"{part}_mode"], modes)
    put(words, rows, *_HEADER[f"{part}_value"], values)


def encode_descriptors(pieces, src_bases, dst_bases):
    """Encode descriptors (:class:`~.transfer.Piece`); the bases are added to their addresses."""
    columns = {name: [] for name, _, _ in DESCRIPTOR_LAYOUT}
    for piece, src_base, dst_base in zip(pieces, src_bases, dst_bases, strict=True):
        columns["kind"].append(DESCRIPTOR_COPY)
        columns["size_log2"].append(piece.size_log2)
        columns["_reserved"].append(0)
        columns["src_address"].append(src_base + piece.src)
        columns["dst_address"].append(dst_base + piece.dst)
        for side, dims in (("src", piece.src_dims), ("dst", piece.dst_dims)):
            for i in range(4):
                step, count = dims[i] if i < len(dims) else (0, 1)
                columns[f"{side}_step{i}"].append(step & 0xFFFFFFFF)
                columns[f"{side}_count{i}"].append(count)
    words = np.zeros((len(pieces), DESCRIPTOR_BYTES), np.uint8)
    for name, bit, width in DESCRIPTOR_LAYOUT:
        put(words, slice(None), bit, width, columns[name])
    return words


assert AP_BITS % 8 == 0
assert WORD_BYTES % 8 == 0
