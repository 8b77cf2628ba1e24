"""Tracing: run a kernel once on shapes and record what it asks the engines to do."""

import functools
import gc
import inspect
import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import overload

import numpy as np

from ...rtl.arch import formats
from ...rtl.arch.config import TRN, CoreConfig, named_config
from .tensor import KernelError, NkiTensor, Storage, TensorSpec

__all__ = [
    "DMA",
    "MATMUL",
    "ZERO",
    "Kernel",
    "Op",
    "Trace",
    "current",
    "jit",
    "set_runner",
]

MATMUL, DMA, ZERO = "matmul", "dma", "zero"
"""Kinds of operations that become several instructions, or none; ``ZERO``, a matmul of zeros, is
how the compiler clears a PSUM tile. The kind of every other operation is its instruction's class.
"""

_HERE = str(Path(__file__).parent)
_NAMED = re.compile(r"^\s*([A-Za-z_]\w*)\s*=[^=]")


class Op:
    """One recorded operation.

    Attributes
    ----------
    kind : subclass of :class:`~..rtl.arch.isa.Instruction`, or ``MATMUL``, ``DMA``, ``ZERO``
    dst : access or view
        What it writes.
    sources : tuple of accesses or views
        What it reads: the operands (of a matmul stationary, then moving), then scalars.
    fields : dict
        Fields of the instruction by name; an access stands for its offset in SBUF. Of a matmul:
        ``accumulate``. Shared between operations, so not to be changed.
    location : :class:`int`
        Place in the source.
    """

    __slots__ = ("dst", "fields", "kind", "location", "sources")

    def __init__(self, kind, dst, sources, fields, location):
        self.kind = kind
        self.dst = dst
        self.sources = sources
        self.fields = fields
        self.location = location


class Trace:
    """The record of one kernel run on given shapes for one machine.

    Attributes
    ----------
    config : :class:`CoreConfig`
    name : :class:`str`
        The kernel's name.
    storages : list of :class:`Storage`
    ops : list of :class:`Op`
    locations : list of ``(file, line)``
        Indexed by :attr:`Op.location`.
    """

    def __init__(self, config, name):
        self.config = config
        self.name = name
        self.storages = []
        self.ops = []
        self.locations = []
        self._location_index = {}
        self.outputs = ()
        self.constants = {}  # tiles that the language made, once for the kernel
        self.seed = 0  # of random numbers: a number, or a tile with one for each partition
        self.drawn = 0  # random numbers of that seed in a partition, so far

    def location(self):
        """Index of the kernel line that is being executed."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        key = (frame.f_code.co_filename, frame.f_lineno) if frame else ("?", 0)
        index = self._location_index.get(key)
        if index is None:
            index = self._location_index[key] = len(self.locations)
            self.locations.append(key)
        return index

    @staticmethod
    def site():
        """Lines of the kernel that lead to this allocation: tiles of one site share a pool."""
        frame, found = sys._getframe(2), []
        while frame is not None and frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            found.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return tuple(found)

    def where(self, location):
        """``file:line`` of a location index."""
        file, line = self.locations[location]
        return f"{file}:{line}"

    def error(self, message, location=None):
        """A :exc:`KernelError` with the place appended; raise what this returns."""
        location = self.location() if location is None else location
        return KernelError(f"{message}\n  at {self.where(location)}")

    def allocate(self, shape, dtype, buffer, *, name="", kind="scratch"):
        """A new tensor; its name is the variable it is assigned to, if that can be seen."""
        location = self.location()
        if not name:
            file, line = self.locations[location]
            found = _NAMED.match(linecache.getline(file, line))
            name = found[1] if found else f"{buffer}_{len(self.storages)}"
        storage = Storage(
            index=len(self.storages), name=name, shape=shape, dtype=dtype, buffer=buffer, kind=kind,
            location=location,
        )  # fmt: skip
        storage.site = self.site()
        self.storages.append(storage)
        return NkiTensor.whole(storage)


_stack = []


def current():
    """The trace that is being recorded.

    Raises
    ------
    :exc:`KernelError`
        Outside a kernel.
    """
    if not _stack:
        raise KernelError(
            "no kernel is being traced: call nki.isa and nki.language functions inside a function "
            "decorated with @nki.jit"
        )
    return _stack[-1]


def current_config():
    """Machine of the trace that is being recorded; TRN outside a kernel."""
    return _stack[-1].config if _stack else TRN


_runner = None


def set_runner(function):
    """Install what a kernel called with arrays does: ``function(kernel, args, kwargs)``."""
    global _runner
    _runner = function


def _is_tensor(value):
    if isinstance(value, np.generic):
        return False  # a number
    return isinstance(value, TensorSpec) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def _as_config(config):
    return config if isinstance(config, CoreConfig) else named_config(config)


def _raised_by_language(error):
    """Line of the kernel where a view raised ``error``; ``None`` for the kernel's own errors."""
    place, frame, inside = None, error.__traceback__, False
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        inside = name.startswith(_HERE)
        if not inside:
            place = f"{name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place if inside else None


class Kernel:
    """A function decorated with ``@nki.jit``.

    Call :meth:`compile` with a machine and arguments (arrays, or :class:`TensorSpec`) for a
    program, :meth:`trace` for the record before compilation. Called with arrays it runs on the
    device that the host has installed; called inside another kernel it is inlined.
    """

    __name__: str  # the function's, like its other attributes

    def __init__(self, function):
        self.function = function
        functools.update_wrapper(self, function)

    def __repr__(self):
        return f"<nki kernel {self.__name__}>"

    def __getitem__(self, grid):
        if grid not in (1, (1,)):
            raise KernelError(f"{self.__name__}[{grid}]: this core runs one instance of a kernel")
        return self

    def __call__(self, /, *args, **kwargs):
        if _stack:
            return self.function(*args, **kwargs)
        if _runner is None:
            raise KernelError(
                f"no device is open: open one (makalu.open), or use {self.__name__}.compile(...)"
            )
        return _runner(self, args, kwargs)

    def bind(self, args, kwargs):
        """Tensor arguments in order, as ``[(name, value), ...]``."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        found = []
        for name, value in bound.arguments.items():
            if _is_tensor(value):
                found.append((name, value))
            elif isinstance(value, list | tuple):
                found += [(f"{name}{i}", v) for i, v in enumerate(value) if _is_tensor(v)]
        return found

    def trace(self, config, /, *args, **kwargs):
        """Run the kernel on shapes only and return the :class:`Trace`."""
        trace = Trace(_as_config(config), self.__name__)

        def tensor(name, value):
            try:
                dtype = formats.format_of(value.dtype)
            except TypeError as error:
                raise KernelError(f"{self.__name__}: argument {name}: {error}") from None
            shape = tuple(int(n) for n in value.shape)
            if 0 in shape:
                raise KernelError(f"{self.__name__}: argument {name} {list(shape)} has no elements")
            storage = Storage(
                index=len(trace.storages), name=name, shape=shape, dtype=dtype, buffer="hbm",
                kind="input", location=0,
            )  # fmt: skip
            trace.storages.append(storage)
            return NkiTensor.whole(storage)

        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        code = self.function.__code__
        trace.locations.append((code.co_filename, code.co_firstlineno))
        trace._location_index[trace.locations[0]] = 0
        for name, value in bound.arguments.items():
            if isinstance(value, np.generic):
                bound.arguments[name] = value.item()
            elif _is_tensor(value):
                bound.arguments[name] = tensor(name, value)
            elif isinstance(value, list | tuple) and any(_is_tensor(v) for v in value):
                bound.arguments[name] = type(value)(
                    tensor(f"{name}{i}", v) if _is_tensor(v) else v for i, v in enumerate(value)
                )
        _stack.append(trace)
        try:
            result = self.function(*bound.args, **bound.kwargs)
        except (IndexError, TypeError, ValueError) as error:
            place = _raised_by_language(error)
            if place is None:
                raise
            raise KernelError(f"{error}\n  at {place}") from error
        finally:
            _stack.pop()
        self._finish(trace, result)
        return trace

    def _finish(self, trace, result):
        outputs = result if isinstance(result, tuple | list) else (result,)
        names = {s.name for s in trace.storages if s.kind == "input"}
        if result is None or not outputs:
            raise KernelError(
                f"{self.__name__} returns nothing: return its outputs, allocated with "
                "nl.ndarray(shape, dtype, buffer=nl.shared_hbm)"
            )
        for i, view in enumerate(outputs):
            if not isinstance(view, NkiTensor):
                raise KernelError(f"{self.__name__} returns {view!r}, which is not a tensor")
            storage = view.storage
            if storage.buffer != "hbm" or storage.kind == "input":
                raise KernelError(
                    f"{self.__name__} returns {view}: an output is a tensor of its own in HBM, "
                    "nl.ndarray(shape, dtype, buffer=nl.shared_hbm)"
                )
            if view.shape != storage.shape or view.offset or not view.is_contiguous():
                raise KernelError(f"{self.__name__} returns a part of {storage}; return all of it")
            if storage.kind == "output":
                raise KernelError(f"{self.__name__} returns {storage} twice")
            storage.kind = "output"
            if storage.name in names:
                storage.name = f"{storage.name}_{i}"
            names.add(storage.name)
        for storage in trace.storages:
            if storage.buffer == "hbm" and storage.kind == "scratch":
                if storage.name in names:
                    storage.name = f"{storage.name}_{storage.index}"
                names.add(storage.name)
        trace.outputs = tuple(view.storage for view in outputs)

    def compile(self, config, /, *args, **kwargs):
        """Trace, compile and return a :class:`~firmware.program.Program`."""
        from ..compiler import compile_trace

        # Many small objects live until the program is done: collecting in between finds nothing.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return compile_trace(self.trace(config, *args, **kwargs))
        finally:
            if collecting:
                gc.enable()


@overload
def jit(function: Callable, **options) -> Kernel: ...
@overload
def jit(function: None = None, **options) -> type[Kernel]: ...
def jit(function=None, **options):
    """Make a function a :class:`Kernel`. Options of the real decorator are accepted and ignored."""
    del options
    if function is None:
        return Kernel
    return Kernel(function)
