"""Array files of the command line: read with clear errors, written as a whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path

import numpy as np

from ..rtl.arch.formats import format_of
from .errors import DtypeError, FileFormatError

__all__ = ["check_writable", "load_array", "save_array"]


def load_array(path, *, dtype=None):
    """The array in a ``.npy`` file.

    Numpy stores BF16 and FP8 arrays as raw bytes and forgets their format; ``dtype`` names it.

    Raises
    ------
    :exc:`FileNotFoundError`, :exc:`FileFormatError`
    :exc:`DtypeError`
        If ``dtype`` is needed and not a format of the core.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir():
        raise FileFormatError(f"{path}: a directory, not a .npy file")
    try:
        with path.open("rb") as file:
            head = file.read(6)
            if head[:2] == b"PK":
                raise FileFormatError(
                    f"{path}: an archive (.npz?), not a .npy file; save one array with numpy.save"
                )
            if head != b"\x93NUMPY":
                raise FileFormatError(f"{path}: not a .npy file; save the array with numpy.save")
            file.seek(0)
            array = np.lib.format.read_array(file, allow_pickle=False)
            if file.read(1):
                raise FileFormatError(f"{path}: bytes follow the array; the file is damaged")
    except (ValueError, EOFError, SyntaxError, UnicodeDecodeError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path}: cannot be read: {error}") from None
    except MemoryError:
        raise FileFormatError(f"{path}: its header asks for more memory than there is") from None
    if array.dtype.kind == "V" and array.dtype.names is None:
        size = array.dtype.itemsize
        if dtype is None:
            raise FileFormatError(
                f"{path}: holds raw elements of {size} bytes whose format numpy does not store; "
                "name it with --dtype (such as bf16 or fp8_e4m3)"
            )
        try:
            fmt = format_of(dtype)
        except TypeError as error:
            raise DtypeError(f"dtype={dtype!r}: {error}") from None
        if fmt.bytes != size:
            raise FileFormatError(
                f"{path}: holds raw elements of {size} bytes, but one of {fmt.name} has {fmt.bytes}"
            )
        array = array.view(fmt.dtype)
    return array


def check_writable(path):
    """Refuse an output file that could not be written, before the work is done."""
    path = Path(path)
    if path.is_dir():
        raise FileFormatError(f"{path}: a directory; name a file to write")
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such directory, so {path.name} cannot be written")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder}: not writable, so {path.name} cannot be written")


def save_array(path, array):
    """Write a ``.npy`` file; whoever reads it sees the old one or all of the new one."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
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
