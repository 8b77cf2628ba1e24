"""Checkpoints: the complete state of a simulation in a file, an archive of numpy arrays (npz).

What is kept is what registers, read ports, inputs and memories hold, not how the C lays it out;
everything else follows from it. A file appears by a rename, and is read whole before anything
changes.
"""

import contextlib
import json
import os
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

__all__ = [
    "VERSION",
    "CheckpointError",
    "check",
    "pages",
    "put_pages",
    "read",
    "replacing",
    "write",
]

VERSION = 1
"""Of the file format."""

PAGE = 4096
"""Bytes of a page of a large memory; pages of zeros are left out."""

_CHUNK = 4096
"""Pages that are looked at at a time."""


class CheckpointError(ValueError):
    """A file is not a checkpoint, is damaged, or is one of something else."""


@contextlib.contextmanager
def replacing(path, mode="wb", **options):
    """Open a file that takes the place of ``path`` when the block ends, unless it fails."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def write(path, about, arrays):
    """Write a checkpoint: facts that must be the same where it is restored, and arrays."""
    text = json.dumps({"version": VERSION, **about}).encode()
    with replacing(path) as file:
        np.savez_compressed(file, about=np.frombuffer(text, np.uint8), **arrays)


def read(path):
    """Return the facts and the arrays of a checkpoint.

    Raises
    ------
    :exc:`CheckpointError`
        If it is none, damaged, or of another version.
    :exc:`OSError`
        If there is no such file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if "about" not in names:
                raise CheckpointError(f"{path}: an archive, but not of a checkpoint")
            arrays = {}
            for name in names:  # read to their ends, so that their sums are compared
                with archive.open(f"{name}.npy") as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
                    member.read()
            about = json.loads(arrays.pop("about").tobytes())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one: {error}") from None
    version = about.pop("version", None)
    if version != VERSION:
        raise CheckpointError(
            f"{path}: a checkpoint of version {version}, and this reads version {VERSION}"
        )
    return about, arrays


def check(path, found, wanted):
    """Compare facts of a checkpoint with those where it is to be restored.

    Raises
    ------
    :exc:`CheckpointError`
        The message names what differs.
    """
    wanted = json.loads(json.dumps(wanted))  # as the file has them
    different = [
        f"{name} is {found.get(name)!r} in the file and {value!r} here"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{path}: a checkpoint of something else: {'; '.join(different)}")


# Large memories -----------------------------------------------------------------------------------


def pages(memory):
    """Return numbers and contents of the pages of a uint8 array that are not all zero.

    The last one is filled up with zeros.
    """
    whole = len(memory) // PAGE
    numbers, found = [], []
    for first in range(0, whole, _CHUNK):
        part = memory[first * PAGE : min(first + _CHUNK, whole) * PAGE].reshape(-1, PAGE)
        (used,) = np.nonzero(part.view(np.uint64).any(axis=1))
        numbers.append(used + first)
        found.append(part[used])
    rest = memory[whole * PAGE :]
    if rest.any():
        numbers.append(np.array([whole]))
        found.append(np.pad(rest, (0, PAGE - len(rest)))[None])
    if not numbers:
        return np.zeros(0, np.int64), np.zeros((0, PAGE), np.uint8)
    return np.concatenate(numbers).astype(np.int64), np.concatenate(found)


def put_pages(memory, numbers, contents):
    """Put into a uint8 array of zeros what :func:`pages` returned."""
    for number, page in zip(numbers.tolist(), contents, strict=True):
        part = memory[number * PAGE : (number + 1) * PAGE]
        part[:] = page[: len(part)]
