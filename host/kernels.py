"""Kernel files: load them with ``import nki`` meaning ours, find their kernels, make arguments."""

import contextlib
import importlib
import inspect
import re
import runpy
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from ..firmware.nki import Kernel, KernelError
from ..firmware.program import ProgramError
from ..rtl.arch.formats import FloatFormat, format_of
from .errors import DtypeError, FileFormatError, KernelFileError, MakaluError, UsageError
from .files import load_array

__all__ = ["argument", "bind", "choose_kernel", "kernel_code", "nki_is_ours", "run_file"]

_PARTS = ("", ".isa", ".language")
_OURS = [str(Path(__file__).parents[1] / name) for name in ("rtl", "sim", "firmware", "host")]
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_SHOWN_FRAMES = 5
_SPEC = re.compile(r"(\d+(?:x\d+)*)(?::([A-Za-z0-9_]+))?")


def _aliases():
    """Makalu's modules under every name that kernel files import them by."""
    ours = {part: importlib.import_module(f"makalu.nki{part}") for part in _PARTS}
    package = ModuleType("neuronxcc", "The compiler's package, of which Makalu stands in for nki.")
    vars(package).update(__path__=[], nki=ours[""])
    named = {
        f"{prefix}{part}": ours[part] for prefix in ("nki", "neuronxcc.nki") for part in _PARTS
    }
    return {"neuronxcc": package, **named}


@contextlib.contextmanager
def nki_is_ours():
    """While this lasts, imports of ``nki`` and ``neuronxcc.nki`` give Makalu's modules.

    So do their submodules ``isa`` and ``language``, whatever else is installed under these names.
    """
    aliases = _aliases()
    before = {name: sys.modules.get(name) for name in aliases}
    sys.modules.update(aliases)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextlib.contextmanager
def kernel_code(path):
    """Errors of the code of a kernel file become :exc:`KernelFileError`; ours stay as they are."""
    try:
        yield
    except (MakaluError, KernelError, ProgramError, MemoryError):
        raise
    except Exception as error:
        places = _places(error, path)
        if not places:
            raise
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if isinstance(error, ImportError) and (error.name or "").startswith(("nki", "neuronxcc")):
            text += "; of nki Makalu has nki.isa and nki.language"
        raise KernelFileError("\n  at ".join([text, *places])) from error


def _places(error, path):
    """Lines of user code that led to ``error``, innermost first; none if our code raised it."""
    found = []
    if isinstance(error, SyntaxError):
        name = error.filename or str(path)
        found.append(f"{name}:{error.lineno}" if error.lineno else name)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if any(Path(name).is_relative_to(folder) for folder in _OURS):
            if not found:
                return []
        elif not name.startswith("<") and not any(
            Path(name).is_relative_to(folder) for folder in _LIBRARIES
        ):
            found.append(f"{name}:{frame.lineno} in {frame.name}")
    return found[:_SHOWN_FRAMES]


def run_file(path, *, as_script):
    """Execute a kernel file and return its names; ``as_script`` runs its ``__main__`` part too.

    Raises
    ------
    :exc:`FileNotFoundError`
    :exc:`KernelFileError`
        If its code fails.
    """
    path = Path(path)
    if path.is_dir():
        raise FileFormatError(f"{path}: a directory, not a Python file")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent))
    arguments, sys.argv = sys.argv, [str(path)]
    try:
        with kernel_code(path):
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
    :exc:`UsageError`
        If there is none, or which one is meant is not clear.
    """
    found = kernels_in(names)
    own = {n: k for n, k in found.items() if Path(k.function.__code__.co_filename) == Path(path)}
    if wanted is not None:
        if wanted not in found:
            raise UsageError(
                f"{path} has no kernel {wanted!r}; it has {', '.join(found) or 'none'}"
            )
        return found[wanted]
    found = own or found
    if not found:
        raise UsageError(f"{path} has no kernel: decorate a function with @nki.jit")
    if len(found) > 1:
        raise UsageError(f"{path} has several kernels: choose with --kernel {' or '.join(found)}")
    return next(iter(found.values()))


def bind(kernel, arguments):
    """Check that a kernel takes these arguments.

    Raises
    ------
    :exc:`UsageError`
    """
    signature = inspect.signature(kernel.function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{kernel.__name__}{signature} cannot be called with {len(arguments)} inputs: {error}"
        ) from None


def argument(text, *, dtype, rng):
    """A kernel argument: a ``.npy`` file, a shape such as ``64x128:bf16``, or a number.

    A shape gives normally distributed values.
    """
    if text.endswith(".npy"):
        return load_array(text, dtype=dtype)
    match = _SPEC.fullmatch(text)
    if match and ("x" in text or ":" in text):
        shape = tuple(int(n) for n in match[1].split("x"))
        try:
            fmt = format_of(match[2] or dtype or "fp32")
        except TypeError as error:
            raise DtypeError(f"{text}: {error}") from None
        if isinstance(fmt, FloatFormat):
            return fmt.encode(rng.standard_normal(shape))
        return fmt.encode(rng.integers(max(fmt.min, -100), 100, shape))
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    if Path(text).exists():
        raise FileFormatError(f"{text}: an input is a .npy file, a shape or a number")
    return text
