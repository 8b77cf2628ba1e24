"""Kernel files: load them with ``import nki`` meaning ours, find their kernels, make arguments."""

import contextlib
import importlib
import re
import runpy
import sys
from pathlib import Path

from ..firmware.nki import Kernel
from ..rtl.arch.formats import format_of
from .errors import FileFormatError, MakaluError
from .files import load_array

__all__ = ["argument", "choose_kernel", "nki_is_ours", "run_file"]

_MODULES = ("nki", "nki.isa", "nki.language")
_SPEC = re.compile(r"(\d+(?:x\d+)*)(?::([A-Za-z0-9_]+))?")


@contextlib.contextmanager
def nki_is_ours():
    """While this lasts, ``import nki``, ``nki.isa`` and ``nki.language`` give Makalu's modules."""
    before = {name: sys.modules.get(name) for name in _MODULES}
    for name in _MODULES:
        sys.modules[name] = importlib.import_module(f"makalu.{name}")
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def run_file(path, *, as_script):
    """Execute a kernel file and return its names; ``as_script`` runs its ``__main__`` part too.

    Raises
    ------
    :exc:`FileNotFoundError`
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent))
    arguments, sys.argv = sys.argv, [str(path)]
    try:
        return runpy.run_path(str(path), run_name="__main__" if as_script else path.stem)
    finally:
        sys.argv = arguments
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent))


def kernels_in(names):
    """Kernels defined in a file, by name."""
    return {
        name: value
        for name, value in names.items()
        if isinstance(value, Kernel) and not name.startswith("_")
    }


def choose_kernel(path, names, wanted=None):
    """The kernel called ``wanted``, or the only one.

    Raises
    ------
    :exc:`MakaluError`
        If there is none, or which one is meant is not clear.
    """
    found = kernels_in(names)
    own = {n: k for n, k in found.items() if Path(k.function.__code__.co_filename) == Path(path)}
    if wanted is not None:
        if wanted not in found:
            raise MakaluError(
                f"{path} has no kernel {wanted!r}; it has {', '.join(found) or 'none'}"
            )
        return found[wanted]
    found = own or found
    if not found:
        raise MakaluError(f"{path} has no kernel: decorate a function with @nki.jit")
    if len(found) > 1:
        raise MakaluError(f"{path} has several kernels: choose with --kernel {' or '.join(found)}")
    return next(iter(found.values()))


def argument(text, *, dtype, rng):
    """A kernel argument: a ``.npy`` file, a shape such as ``64x128:bf16``, or a number.

    A shape gives normally distributed values.
    """
    if text.endswith(".npy"):
        return load_array(text, dtype=dtype)
    match = _SPEC.fullmatch(text)
    if match and ("x" in text or ":" in text):
        shape = tuple(int(n) for n in match[1].split("x"))
        fmt = format_of(match[2] or dtype or "fp32")
        if fmt.is_float:
            return fmt.encode(rng.standard_normal(shape))
        return fmt.encode(rng.integers(max(fmt.min, -100), 100, shape))
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    if Path(text).exists():
        raise FileFormatError(f"{text}: an input is a .npy file, a shape or a number")
    return text
