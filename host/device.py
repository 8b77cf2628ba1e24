"""The device: HBM tensors, programs and matrix products on one core, whatever simulates it.

Names follow the Neuron runtime: ``allocate``, ``write``, ``read``, ``load``, ``execute``,
``unload``.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..firmware.nki import set_runner
from ..rtl.arch.config import CoreConfig, HbmConfig, named_config
from ..rtl.arch.formats import FP32, format_of
from ..rtl.arch.isa import DESCRIPTOR_BYTES, WORD_BYTES, Engine, ErrorCode
from . import devices
from .allocator import ALIGNMENT, Allocator
from .errors import (
    ArgumentError,
    ClosedError,
    Deadlock,
    DeviceError,
    DeviceFaulted,
    DtypeError,
    HbmOutOfMemory,
    QueueStatus,
    ShapeError,
    TensorError,
    UsageError,
    WatchdogTimeout,
    describe_field,
    disassemble,
)
from .lower import MatmulShape, as_format, operand_formats, to_format
from .report import RunReport
from .slabs import Product, Slabs, plan
from .witness import compare

__all__ = ["Device", "LoadedProgram", "Tensor", "open_device"]

CACHED_PROGRAMS = 64
"""Compiled matrix products a device keeps."""


def _as_config(config):
    if isinstance(config, CoreConfig):
        return config
    if isinstance(config, str):
        try:
            return named_config(config)
        except ValueError as error:
            raise UsageError(str(error)) from None
    raise ArgumentError(f"config must be a CoreConfig or the name of one, not {config!r}")


def _as_hbm(hbm, backend, config):
    if hbm is None:
        return devices.default_hbm(backend, config)
    if isinstance(hbm, int | np.integer) and not isinstance(hbm, bool):
        try:
            return HbmConfig(size_bytes=int(hbm))
        except ValueError as error:
            raise UsageError(f"hbm={hbm!r}: {error}") from None
    if not isinstance(hbm, HbmConfig):
        raise ArgumentError(f"hbm must be an HbmConfig or a number of bytes, not {hbm!r}")
    for field in fields(hbm):
        value = getattr(hbm, field.name)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole and not (field.name == "bytes_per_cycle" and value is None):
            raise UsageError(f"HbmConfig: {field.name} must be a whole number, not {value!r}")
    return hbm


def _as_array(value, what):
    """An array of what numpy takes for one; ``what`` names it in errors."""
    if isinstance(value, Tensor):
        raise DtypeError(
            f"{what} is a tensor on the device, and arrays of the host are taken here: "
            f"pass {what}.read(), or execute a program with the tensors bound to it"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"{what} is no array: {error}") from None
    except TypeError as error:
        raise ArgumentError(f"{what} cannot be made an array: {error}") from None
    if isinstance(value, str | bytes) or (array.dtype == object and not array.ndim):
        raise ArgumentError(
            f"{what} must be an array, or numbers in nested lists, not {_short(value)}"
        )
    return array


def _short(value):
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _as_callback(function, what):
    if function is not None and not callable(function):
        raise ArgumentError(f"{what} must be callable or None, not {function!r}")
    return function


def open_device(
    config: str | CoreConfig = "SMALL",
    backend="auto",
    *,
    hbm=None,
    progress=None,
    on_build=None,
    keep=None,
):
    """Open a device.

    Parameters
    ----------
    config : :class:`str` or :class:`CoreConfig`
        ``"TINY"``, ``"SMALL"``, ``"TRN"``, or a machine of your own.
    backend : :class:`str`
        ``"golden"``, ``"pysim"``, ``"verilator"``, ``"native"``, or ``"auto"``: native if it can be
        built here, else another; ``Device.backend_reason`` says why it was taken.
    hbm : :class:`HbmConfig`, :class:`int` (bytes) or ``None``
    progress : callable or ``None``
        Called while a program runs with (instructions issued, instructions in all, cycles or
        ``None``). A matrix product that takes several programs counts as one; how many instructions
        it has in all is extrapolated until the last of them runs.
    on_build : callable or ``None``
        Called while the simulator is built with (what is being done, fraction of the whole behind);
        not at all if it was built before.
    keep : path or ``None``
        A folder for the C that backend ``native`` is made of: names of signals in comments.

    Raises
    ------
    :exc:`UsageError` (a :exc:`ValueError`)
        If there is no machine or backend of that name, or no such memory; if a backend other than
        ``native`` is to keep its code.
    :exc:`ArgumentError` (a :exc:`TypeError`)
        If an argument is of another kind than those above.
    :exc:`ToolMissing`
        If the backend asked for cannot be used here.
    """
    return Device(config, backend, hbm=hbm, progress=progress, on_build=on_build, keep=keep)


_opened = []  # weak references to devices, in the order in which they were opened


def _run_on_last_opened(kernel, args, kwargs):
    """What a kernel called with arrays does."""
    while _opened:
        device = _opened[-1]()
        if device is not None and not device.closed:
            return device.run(kernel, *args, **kwargs)
        _opened.pop()
    raise ClosedError(
        f"no device is open to run {kernel.__name__} on: open one with makalu.open(), or compile "
        f"the kernel with {kernel.__name__}.compile(...)"
    )


class Tensor:
    """Memory in HBM with a shape and a number format.

    Made by :meth:`Device.allocate` or :meth:`from_numpy`.

    Attributes
    ----------
    name : :class:`str`
    shape : tuple
    format : format of :mod:`..rtl.arch.formats`
    address : :class:`int`
        In HBM.
    """

    def __init__(self, device, name, shape, fmt):
        self.device = device
        self.name, self.shape, self.format = name, shape, fmt
        self.address = device._allocate(self.nbytes, f"tensor {name} {list(shape)} {fmt.name}")
        self._freed = False

    @classmethod
    def from_numpy(cls, device, array, *, name=None):
        """Allocate a tensor for ``array`` and write it; errors as of both."""
        array = _as_array(array, "array")
        tensor = device.allocate(array.shape, array.dtype, name=name)
        tensor.write(array)
        return tensor

    @property
    def dtype(self):
        """Numpy dtype of the elements."""
        return self.format.dtype

    @property
    def size(self):
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self):
        """Size in bytes."""
        return self.size * self.format.bytes

    def _check(self):
        if self._freed:
            raise ClosedError(f"tensor {self.name} was freed")
        self.device._check_open()

    def write(self, array):
        """Copy an array of the same shape and format into the tensor; any strides, any byte order.

        Raises
        ------
        :exc:`ShapeError`, :exc:`DtypeError`
            Nothing is broadcast and nothing is converted.
        :exc:`ArgumentError`
            If it is no array.
        """
        self._check()
        array = _as_array(array, "array")
        if array.shape != self.shape:
            raise ShapeError(f"tensor {self.name} has shape {self.shape}, the array {array.shape}")
        if array.dtype.newbyteorder("=") != self.dtype:
            raise DtypeError(
                f"tensor {self.name} is {self.format.name}, the array {array.dtype}; "
                "convert it first"
            )
        native = np.ascontiguousarray(array, dtype=self.dtype)
        self.device._runner.hbm_write(self.address, native.tobytes())
        return self

    def read(self):
        """The tensor as a new array."""
        self._check()
        raw = self.device._runner.hbm_read(self.address, self.nbytes)
        return np.frombuffer(bytearray(raw), self.dtype).reshape(self.shape)

    numpy = read

    def free(self):
        """Give the memory back; the tensor is of no use afterwards."""
        if self._freed:
            raise ClosedError(f"tensor {self.name} was freed already")
        self._freed = True
        self.device._tensors.discard(self)
        if not self.device.closed:
            self.device._memory.free(self.address)

    def __del__(self):
        with contextlib.suppress(Exception):
            if not self._freed:
                self.free()

    def __repr__(self):
        state = "freed" if self._freed else f"at {self.address:#x}"
        return f"<Tensor {self.name} {list(self.shape)} {self.format.name} {state}>"


class LoadedProgram:
    """A program on a device; made by :meth:`Device.load`.

    Attributes
    ----------
    program : :class:`~..firmware.program.Program`
    device : :class:`Device`
    """

    def __init__(self, device, program):
        self.device, self.program = device, program
        self._image_address = None
        self._linked = None  # addresses of the tensors in the image that lies in HBM
        self._queues = None
        self._owned = {}  # tensors between instructions: allocated once
        self._unloaded = False
        self.busy = False

    @property
    def name(self):
        """Name of the program."""
        return self.program.kernel

    @property
    def tensors(self):
        """What the program reads and writes: name to declaration."""
        return {t.name: t for t in self.program.tensors}

    @property
    def inputs(self):
        """Names of the tensors that the program reads."""
        return list(self.program.inputs)

    @property
    def outputs(self):
        """Names of the tensors that the program writes, in the order the kernel returns them."""
        return list(self.program.outputs)

    def execute(self, inputs=None, outputs=None):
        """Run the program.

        Parameters
        ----------
        inputs : dict
            Name to :class:`Tensor`, or to an array, which is copied to HBM for this run.
        outputs : dict or ``None``
            Name to :class:`Tensor`. Outputs that are not named come back as arrays.

        Returns
        -------
        dict
            Name to :class:`Tensor` (those given) or array (all others), for every output.

        Raises
        ------
        :exc:`TensorError`, :exc:`ShapeError`, :exc:`DtypeError`, :exc:`ArgumentError`
            If the tensors are not those of the program; nothing has run.
        :exc:`DeviceError`, :exc:`Deadlock`, :exc:`WatchdogTimeout`
            If the core stopped.
        """
        if self._unloaded:
            raise ClosedError(f"{self.name} was unloaded")
        device = self.device
        device._check_ready()
        inputs, outputs = self._named("inputs", inputs), self._named("outputs", outputs)
        self._check_names(inputs, outputs)
        with device._lock, contextlib.ExitStack() as stack:
            bound = {}
            for spec in self.program.tensors:
                if spec.kind in ("input", "output"):
                    given = inputs.get(spec.name, outputs.get(spec.name))
                    bound[spec.name] = self._bind(spec, given, stack)
                else:
                    bound[spec.name] = self._own(spec)
            device._run(self, {name: t.address for name, t in bound.items()})
            result = {}
            for name in self.outputs:
                result[name] = outputs[name] if name in outputs else bound[name].read()
        return result

    def _named(self, what, given):
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(
                f"{what} of {self.name} must be a dictionary of name to tensor or array, "
                f"not {_short(given)}"
            )
        return dict(given or {})

    def _check_names(self, inputs, outputs):
        for what, given, known in (
            ("input", inputs, self.inputs),
            ("output", outputs, self.outputs),
        ):
            unknown = sorted(map(str, set(given) - set(known)))
            if unknown:
                have = ", ".join(known) or "none"
                raise TensorError(
                    f"{self.name} has no {what} {', '.join(unknown)}; its {what}s are {have}"
                )
        lacking = [name for name in self.inputs if name not in inputs]
        if lacking:
            raise TensorError(f"{self.name} needs input {', '.join(lacking)}")
        for name, value in outputs.items():
            if not isinstance(value, Tensor):
                raise TensorError(
                    f"output {name} must be a Tensor of the device, not {type(value).__name__}; "
                    "leave it out to get an array"
                )

    def _bind(self, spec, given, stack):
        fmt = format_of(spec.dtype)
        shape = tuple(spec.shape)
        what = f"{spec.kind} {spec.name} of {self.name}"
        if isinstance(given, Tensor):
            given._check()
            if given.device is not self.device:
                raise TensorError(f"{what}: tensor {given.name} belongs to another device")
            if given.shape != shape:
                raise ShapeError(f"{what} has shape {shape}, tensor {given.name} {given.shape}")
            if given.dtype != fmt.dtype:
                raise DtypeError(f"{what} is {fmt.name}, tensor {given.name} {given.format.name}")
            return given
        if given is not None or spec.kind == "input":
            given = _as_array(given, what)
            if given.shape != shape:
                raise ShapeError(f"{what} has shape {shape}, the array {given.shape}")
            if given.dtype.newbyteorder("=") != fmt.dtype:
                raise DtypeError(f"{what} is {fmt.name}, the array {given.dtype}; convert it first")
        tensor = self.device._temporary(spec.name, shape, fmt, stack)
        if given is not None:
            tensor.write(given)
        return tensor

    def _own(self, spec):
        if spec.name not in self._owned:
            self._owned[spec.name] = self.device.allocate(
                tuple(spec.shape), spec.dtype, name=f"{self.name}.{spec.name}"
            )
        return self._owned[spec.name]

    def _place(self, addresses):
        """Put the image into HBM, linked to these tensor addresses; the queues to run."""
        if self._linked == addresses:
            return self._queues
        device = self.device
        if self._image_address is None:
            what = f"the image of {self.name}"
            self._image_address = device._allocate(self.program.image_bytes, what)
        self._linked = None
        image, queues = self.program.link(self._image_address, addresses)
        device._runner.hbm_write(self._image_address, image)
        self._linked, self._queues = dict(addresses), queues
        return queues

    def _lift(self):
        """Take the image out of HBM; the next run puts it back."""
        if self._image_address is not None:
            self.device._memory.free(self._image_address)
        self._image_address = self._linked = None

    def unload(self):
        """Give the program's memory back."""
        if self._unloaded:
            raise ClosedError(f"{self.name} was unloaded already")
        self._unloaded = True
        device = self.device
        device._programs.discard(self)
        if device.closed:
            return
        self._lift()
        for tensor in self._owned.values():
            tensor.free()

    def __del__(self):
        with contextlib.suppress(Exception):
            if not self._unloaded:
                self.unload()

    def __repr__(self):
        state = "unloaded" if self._unloaded else f"on {self.device!r}"
        return f"<LoadedProgram {self.name} {state}>"


class Device:
    """One core with its HBM; see :func:`open_device` for the parameters.

    Attributes
    ----------
    config : :class:`CoreConfig`
    backend : :class:`str`
        What simulates the core.
    backend_reason : :class:`str`
        Why it was taken.
    hbm : :class:`HbmConfig`
    last_run : :class:`RunReport` or ``None``
        Of the last matrix product, program run, or group of them.
    on_run : callable or ``None``
        Called after each program run with (name of the program, :class:`RunReport`).
    """

    def __init__(
        self,
        config: str | CoreConfig = "SMALL",
        backend="auto",
        *,
        hbm=None,
        progress=None,
        on_build=None,
        keep=None,
    ):
        self._runner: Any = None  # what the backend's module starts; None before and after
        _as_callback(on_build, "on_build")
        self.config = _as_config(config)
        self.backend, self.backend_reason = devices.choose(backend, self.config)
        self.hbm = _as_hbm(hbm, self.backend, self.config)
        self.progress = _as_callback(progress, "progress")
        self.on_run: Callable[[str, RunReport], None] | None = None
        self.last_run: RunReport | None = None
        self._memory = Allocator(self.hbm.size_bytes)
        self._tensors = weakref.WeakSet()
        self._programs = weakref.WeakSet()
        self._matmuls = OrderedDict()  # key: what was compiled; value: LoadedProgram
        self._fault: BaseException | str | None = None
        self._running = False
        self._count = 0
        self._lock = threading.RLock()
        self._runner = devices.start(self.backend, self.config, self.hbm, on_build, keep)
        _opened.append(weakref.ref(self))
        set_runner(_run_on_last_opened)

    # Life -----------------------------------------------------------------------------------------

    def __enter__(self):
        self._check_open()
        return self

    def __exit__(self, *_):
        if not self.closed:
            self.close()

    def __del__(self):
        with contextlib.suppress(Exception):
            self.__exit__()

    @property
    def closed(self):
        """Whether the device was closed."""
        return self._runner is None

    @property
    def build_s(self):
        """Seconds that building the simulator took; 0 if it was built before."""
        self._check_open()
        return self._runner.build_s

    @property
    def free_bytes(self):
        """HBM bytes that are free."""
        return self._memory.free_bytes

    def close(self):
        """Stop the simulator and forget everything on the device; closing twice is allowed."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        self._matmuls.clear()

    def reset(self):
        """Stop whatever runs and make the device usable again after an error.

        Tensors, programs and the contents of the memories stay.
        """
        self._check_open()
        with self._lock:
            self._runner.reset()
            self._fault = None

    def _check_open(self):
        if self.closed:
            raise ClosedError("the device was closed")

    def _check_ready(self):
        self._check_open()
        if self._fault is not None:
            raise DeviceFaulted(
                f"the device stopped and was not reset; call reset() first. It stopped because: "
                f"{self._fault}"
            )

    def __repr__(self):
        state = "closed" if self.closed else f"{self.free_bytes:,} bytes of HBM free"
        return f"<Device {self.config.name} on {self.backend}, {state}>"

    # Memory ---------------------------------------------------------------------------------------

    def allocate(self, shape, dtype, *, name=None):
        """A :class:`Tensor` in HBM; its bytes are what was there before.

        Raises
        ------
        :exc:`HbmOutOfMemory`
        :exc:`DtypeError`
            If the core has no such number format.
        :exc:`ShapeError`
            If the shape is not made of whole numbers from 0.
        """
        self._check_open()
        fmt = as_format(dtype, "dtype")
        try:
            shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        except TypeError:
            raise ShapeError(
                f"shape must be a whole number or several of them, not {_short(shape)}"
            ) from None
        for n in shape:
            if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 0:
                raise ShapeError(f"shape {shape} must consist of whole numbers from 0")
        if name is None:
            self._count += 1
            name = f"tensor{self._count}"
        tensor = Tensor(self, name, tuple(int(n) for n in shape), fmt)
        self._tensors.add(tensor)
        return tensor

    def from_numpy(self, array, *, name=None):
        """A new :class:`Tensor` that holds ``array``."""
        return Tensor.from_numpy(self, array, name=name)

    def _allocate(self, size, what):
        """HBM for ``what``; programs of matrix products leave HBM to make room."""
        while True:
            try:
                return self._memory.allocate(size, what)
            except HbmOutOfMemory:
                movable = self._movable()
                if not movable:
                    raise
                movable[0]._lift()

    def _movable(self):
        """Programs of matrix products that may leave HBM, those used long ago first."""
        placed = (p for p in self._matmuls.values() if p._image_address is not None)
        return [program for program in placed if not program.busy]

    def _room(self, sizes, lifted=()):
        """Whether pieces of these sizes fit HBM, allocated in this order, without some programs."""
        memory = self._memory.copy()
        for program in lifted:
            memory.free(program._image_address)
        try:
            for size in sizes:
                memory.allocate(size, "")
        except HbmOutOfMemory:
            return False
        return True

    def _temporary(self, name, shape, fmt, stack):
        """A tensor that is freed when ``stack`` closes."""
        tensor = self.allocate(shape, fmt, name=name)
        stack.callback(tensor.free)
        return tensor

    # Programs -------------------------------------------------------------------------------------

    def load(self, program):
        """Load a program, or the program file at a path, for :meth:`LoadedProgram.execute`.

        Raises
        ------
        :exc:`~..firmware.program.ProgramError`
            If the file is damaged or the program is for another machine.
        :exc:`ArgumentError`
            If it is neither.
        """
        from ..firmware.program import Program

        self._check_open()
        if isinstance(program, str | os.PathLike):
            program = Program.load(Path(program))
        if not hasattr(program, "link"):
            raise ArgumentError(
                f"a Program or the path of a program file is loaded, not {_short(program)}; "
                "kernels are compiled first: kernel.compile(dev.config, ...)"
            )
        program.check_config(self.config)
        loaded = LoadedProgram(self, program)
        self._programs.add(loaded)
        return loaded

    def unload(self, loaded):
        """Give a loaded program's memory back."""
        if not isinstance(loaded, LoadedProgram):
            raise ArgumentError(f"what load() returned is unloaded, not {_short(loaded)}")
        if loaded.device is not self:
            raise UsageError(f"{loaded.name} was loaded on another device")
        loaded.unload()

    def run(self, kernel, /, *args, **kwargs):
        """Compile a kernel for these arguments, run it once, return its outputs.

        A kernel called with arrays (``kernel(a, b)``) does the same on the device that was opened
        last. For many runs compile once: ``dev.load(kernel.compile(dev.config, a, b))``.

        Returns
        -------
        :class:`numpy.ndarray` or tuple of them
            As many as the kernel returns.

        Raises
        ------
        :exc:`~..firmware.nki.KernelError`
            If the machine cannot run the kernel; the message names the line.
        :exc:`ArgumentError`
            If it is no kernel.
        """
        self._check_ready()
        if not (hasattr(kernel, "compile") and hasattr(kernel, "bind")):
            raise ArgumentError(
                f"a kernel is run, not {_short(kernel)}: decorate a function with @nki.jit"
            )
        began = time.perf_counter()
        program = kernel.compile(self.config, *args, **kwargs)
        compile_s = time.perf_counter() - began
        loaded = self.load(program)
        try:
            results = loaded.execute(dict(kernel.bind(args, kwargs)))
        finally:
            loaded.unload()
        self._report.compile_s = compile_s
        outputs = tuple(results[name] for name in program.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, loaded, addresses, progress=None):
        """Run a loaded program once and leave its report in :attr:`last_run`."""
        progress = self.progress if progress is None else progress
        queues = loaded._place(addresses)
        runner = self._runner
        began = time.perf_counter()
        self._running = True
        try:
            counters = runner.run(queues, progress)
        except devices.Fault as fault:
            error = self._explain(fault, queues, loaded.program)
            self._fault = error
            raise error from None
        except BaseException as error:  # Ctrl-C in the middle of a run
            self._fault = error if str(error) else type(error).__name__
            raise
        finally:
            self._running = False
        wall_s = time.perf_counter() - began
        self.last_run = RunReport.of_run(
            self.config,
            self.backend,
            counters,
            macs=loaded.program.stats.get("macs"),
            wall_s=wall_s,
            build_s=runner.build_s,
        )
        if self.on_run is not None:
            self.on_run(loaded.name, self.last_run)

    @property
    def _report(self):
        """:attr:`last_run`, once a program has run."""
        assert self.last_run is not None
        return self.last_run

    def _explain(self, fault, queues, program):
        """A fault as an error that names instruction, field, source line and who waits."""
        runner = self._runner

        def locate(engine, pc):
            base, count = queues.get(engine, (0, 0))
            index = (pc - base) // WORD_BYTES
            return index if 0 <= index < count else None

        def word_at(pc):
            if 0 <= pc <= self.hbm.size_bytes - WORD_BYTES:
                return bytes(runner.hbm_read(pc, WORD_BYTES))
            return b""

        statuses = []
        for state in fault.queues:
            index = locate(state.engine, state.pc)
            waits = state.state != "done" and index is not None
            statuses.append(
                QueueStatus(
                    engine=state.engine, state=state.state, issued=state.issued,
                    count=queues.get(state.engine, (0, 0))[1], pc=state.pc, wait=state.wait,
                    mode=state.mode, semaphore=state.semaphore, wanted=state.wanted,
                    seen=state.seen, instruction=disassemble(word_at(state.pc)) if waits else "",
                    source=_source(program, state.engine, index) if waits else "",
                )
            )  # fmt: skip
        common = {
            "pc": fault.pc, "field_bit": fault.field, "address": fault.address, "queues": statuses,
        }  # fmt: skip
        if fault.code == ErrorCode.WATCHDOG:
            unfinished = [s for s in statuses if s.state != "done"]
            stuck = unfinished and all(s.state == "waiting_semaphore" for s in unfinished)
            engine = unfinished[0].engine if unfinished else Engine.SP
            return (Deadlock if stuck else WatchdogTimeout)(fault.code, engine=engine, **common)
        if fault.source >= 16:
            raw = b""
            if 0 <= fault.pc <= self.hbm.size_bytes - DESCRIPTOR_BYTES:
                raw = bytes(runner.hbm_read(fault.pc, DESCRIPTOR_BYTES))
            named = fault.code == ErrorCode.BAD_DESCRIPTOR
            return DeviceError(
                fault.code,
                dma_engine=fault.source - 16,
                field=describe_field(raw, fault.field, descriptor=True) if named else "",
                **common,
            )
        engine = Engine(fault.source)
        index, word = locate(engine, fault.pc), word_at(fault.pc)
        if fault.code == ErrorCode.SEMAPHORE_OVERFLOW and not fault.pc:
            index, word = None, b""  # an engine's update: from which instruction is not known
        named = fault.code not in (ErrorCode.RESERVED_BITS, ErrorCode.BUS_FETCH)
        return DeviceError(
            fault.code,
            engine=engine,
            index=index,
            field=describe_field(word, fault.field) if named else "",
            instruction=disassemble(word) if word else "",
            source=_source(program, engine, index),
            **common,
        )

    # Matrix products ------------------------------------------------------------------------------

    def matmul(self, a, b, dtype=None, out_dtype="fp32", *, check=False):
        """``a @ b`` on the core; shapes as :func:`numpy.matmul`.

        The operands' own formats decide how they are multiplied: binary32 enters whole, as 12-bit
        halves in four passes; two FP8 operands may differ. Products are summed in binary32 in
        ascending order of the inner index, K tile by K tile, so the result depends on the operands,
        their formats and the number of rows of the array alone. The four passes are four sums, of
        which three things come: even a single binary32 product may be off by one unit in the last
        place; one that rounds to zero may lose its sign; and infinity times a number below
        2**-137, whose high half is zero, is NaN. In the other formats single products are exact and
        rounded once.

        A product that is too large for one program or for HBM runs as several programs, each of
        some rows and columns of the result; K is never cut, and no bit depends on it.
        ``last_run`` is the sum of all runs.

        Parameters
        ----------
        a, b : array_like
            Any strides, any byte order.
        dtype : format or ``None``
            Round the operands to this format first, once, to nearest even. Needed where the tensor
            engine does not multiply them as they are: binary64, integers, booleans, two formats
            that are not both FP8.
        out_dtype : format
            Of the result; rounded once from the binary32 sums.
        check : :class:`bool`
            Compare with the binary64 product of the operands as they are multiplied:
            ``last_run.max_abs_error`` holds the largest difference of finite values, and
            ``last_run.mismatches`` how many elements are NaN, infinite or finite where they must
            not be, or too far away, by the rules of :func:`~.witness.compare`, which allow for
            rounding and overflow.

        Returns
        -------
        :class:`numpy.ndarray`
            Or a scalar for two vectors.

        Raises
        ------
        :exc:`DtypeError` (a :exc:`TypeError`)
            If the operands are not real numbers, or cannot be multiplied as they are and ``dtype``
            does not say how.
        :exc:`ArgumentError` (a :exc:`TypeError`)
            If an operand is no array.
        :exc:`ShapeError` (a :exc:`ValueError`)
            If numpy would not multiply them.
        :exc:`HbmOutOfMemory` (a :exc:`MemoryError`)
            If one row of ``a``, one column of ``b`` and their program do not fit HBM. Less does not
            matter: M and N are cut into parts that fit, and into programs of bounded length.
        :exc:`DeviceError`, :exc:`Deadlock`, :exc:`WatchdogTimeout`
            If the core stopped; this, and an interrupt while it runs, leaves a device that
            :meth:`reset` makes usable.
        """
        self._check_ready()
        a, b = _as_array(a, "a"), _as_array(b, "b")
        shape = MatmulShape.of(a.shape, b.shape)
        fmts = operand_formats(a, b, dtype)
        out_fmt = as_format(out_dtype, "out_dtype")
        report = RunReport(
            config=self.config.name,
            backend=self.backend,
            rows=self.config.rows,
            cols=self.config.cols,
            dtype=" x ".join(dict.fromkeys(fmt.name for fmt in fmts)),
            build_s=self._runner.build_s,
        )
        if shape.is_empty:
            report.cycles = 0 if self._runner.has_cycles else None
            self.last_run = report
            return np.zeros(shape.result, out_fmt.dtype)[()]
        a, b = to_format(a, fmts[0], name="a"), to_format(b, fmts[1], name="b")
        progress = None if self.progress is None else _Together(self.progress, shape.macs)
        parts = []
        with self._lock:
            for left, right in shape.jobs(a, b):
                parts.append(self._multiply(left, right, fmts, out_fmt, report, progress))
        result = np.concatenate([part.reshape(-1) for part in parts]).reshape(shape.result)
        report.macs = shape.macs
        if check:
            report.compared(compare(a, b, fmts, result, out_fmt))
        self.last_run = report
        return result[()]

    def _multiply(self, a, b, fmts, out_fmt, report, progress):
        """One product of matrices, as one program or in slabs; adds its runs to ``report``."""
        (m, k), n = a.shape, b.shape[1]
        product = Product(
            m, k, n, fmts[0].bytes, fmts[1].bytes, out_fmt.bytes,
            passes=4 if fmts[0] is fmts[1] is FP32 else 1, config=self.config,
        )  # fmt: skip

        def programs(slabs):
            return {
                (rows, cols): self._compiled((rows, k), (k, cols), fmts, out_fmt, report)
                for rows, cols in slabs.shapes
            }

        def image_bytes(slabs):
            return max(loaded.program.image_bytes for loaded in programs(slabs).values())

        slabs = plan(product, lambda sizes: self._room(sizes, self._movable()), image_bytes)
        if slabs is None:
            raise self._too_long(product, fmts, image_bytes)
        loaded = programs(slabs)
        sizes = slabs.buffers
        if any(program._image_address is None for program in loaded.values()):
            sizes.append(image_bytes(slabs))
        if not self._room(sizes):
            for program in self._movable():
                program._lift()
        result = np.empty((m, n), out_fmt.dtype)
        with contextlib.ExitStack() as stack:
            bases = []
            for name, size in zip("abc", slabs.buffers, strict=True):
                address = self._allocate(size, f"{name} of {m} x {k} x {n}")
                stack.callback(self._memory.free, address)
                bases.append(address)
            self._multiply_slabs(a, b, slabs, loaded, bases, result, report, progress)
        return result

    def _multiply_slabs(self, a, b, slabs, loaded, bases, result, report, progress):
        """Run the programs of all slabs; ``bases`` are HBM for slabs of a, of b, and a result."""
        there = {}  # address: the slab that was written to it
        for i, j in slabs.order():
            rows, cols = slabs.part(i, j)
            operands = (("a", i, a[rows]), ("b", j, b[:, cols]))
            addresses = []
            for (name, index, piece), base, slot in zip(
                operands, bases[:2], slabs.slots, strict=True
            ):
                address = base + (index * slot if slabs.keep == name else 0)
                if there.get(address) != index:
                    self._runner.hbm_write(address, piece.tobytes())
                    there[address] = index
                addresses.append(address)
            part = result[rows, cols]
            program = loaded[part.shape]
            names = *program.inputs, *program.outputs
            if progress is not None:
                progress.begin(part.size * a.shape[1])
            program.busy = True
            try:
                self._run(program, dict(zip(names, (*addresses, bases[2]), strict=True)), progress)
            finally:
                program.busy = False
            if progress is not None:
                progress.end(self._report)
            report.add(self._report)
            raw = self._runner.hbm_read(bases[2], part.nbytes)
            part[:] = np.frombuffer(raw, part.dtype).reshape(part.shape)

    def _too_long(self, product, fmts, image_bytes):
        """The error of a product of which not even one element fits HBM."""
        a, b = product.k * product.a_bytes, product.k * product.b_bytes
        image, least = product.image_bytes(1, 1), Slabs(product, 1, 1)
        if self._room([*least.buffers, image], self._movable()):
            image = image_bytes(least)  # which is more than was thought
        memory = self._memory.copy()
        for program in self._movable():
            memory.free(program._image_address)
        formats = " x ".join(dict.fromkeys(fmt.name for fmt in fmts))
        return HbmOutOfMemory(
            f"any part of this product of {product.m} x {product.k} x {product.n}, {formats}: K is "
            f"never cut, so one row of a ({a:,} bytes), one column of b ({b:,} bytes) and a "
            f"program (about {image:,} bytes) must fit",
            needed=sum(-(-size // ALIGNMENT) * ALIGNMENT for size in (*least.buffers, image)),
            free=memory.free_bytes,
            largest=memory.largest_bytes,
            total=memory.size_bytes,
            remedy="free tensors, open the device with a larger hbm=, choose narrower operands "
            "with dtype=, or multiply parts of K and add the products",
        )

    def _compiled(self, a_shape, b_shape, fmts, out_fmt, report):
        """The program of a product, compiled if it is not among those kept."""
        key = (a_shape, b_shape, *(fmt.name for fmt in (*fmts, out_fmt)))
        loaded = self._matmuls.pop(key, None)
        if loaded is None:
            began = time.perf_counter()
            loaded = self._compile(a_shape, b_shape, fmts, out_fmt)
            report.compile_s += time.perf_counter() - began
        self._matmuls[key] = loaded
        while len(self._matmuls) > CACHED_PROGRAMS:
            self._matmuls.popitem(last=False)[1].unload()
        return loaded

    def _compile(self, a_shape, b_shape, fmts, out_fmt):
        from ..firmware.kernels.matmul import matmul
        from ..firmware.nki import TensorSpec

        operands = TensorSpec(a_shape, fmts[0]), TensorSpec(b_shape, fmts[1])
        return self.load(matmul.compile(self.config, *operands, out_dtype=out_fmt))

    # Checkpoints and waveforms --------------------------------------------------------------------

    @property
    def cycles(self):
        """Clock cycles that the hardware has been simulated for, or ``None`` where there are none.

        Accesses to its registers are among them.
        """
        self._check_open()
        return self._runner.machine.cycles if self._runner.has_cycles else None

    def _able(self, name, what):
        """A function of the backend that not all have."""
        self._check_open()
        if not hasattr(self._runner, name):
            raise UsageError(f"backend {self.backend} cannot {what}; backend native can")
        return getattr(self._runner, name)

    def save(self, path):
        """Write the complete state of the hardware to a file: registers, memories, HBM.

        The file is there whole or not at all, and HBM that holds zeros takes no room in it. It may
        be written while a program runs, by ``progress`` or after an interrupt.

        Raises
        ------
        :exc:`UsageError`
            On a backend other than ``native``.
        """
        with self._lock:
            note = "it was saved while a program ran" if self._running else None
            if self._fault is not None:
                note = str(self._fault)
            self._able("save", "save its state")(path, {"fault": note})

    def restore(self, path):
        """Take on the state that :meth:`save` wrote, here or in another process.

        This is about the hardware alone: tensors and programs of this device stay what and where
        they are. A tensor then holds what HBM held at its address when the file was written: the
        same as then if this process has allocated the same in the same order. Programs are written
        to HBM again before they run. If a program was running, or had failed, the device must be
        :meth:`reset` before the next one.

        Raises
        ------
        :exc:`FileFormatError` (a :exc:`ValueError`)
            If the file is no checkpoint, is damaged, or is of another machine, HBM or version; the
            message names what differs, and nothing has changed.
        :exc:`UsageError`
            On a backend other than ``native``, while a program runs, or while waveforms are
            recorded.
        """
        with self._lock:
            restore = self._able("restore", "restore a state")
            if self._running:
                raise UsageError("a program is running: its state cannot be replaced")
            note = restore(path)
            for program in self._programs:
                program._linked = None
            self._fault = note["fault"]

    @contextlib.contextmanager
    def waves(self, path, signals="*", *, start=None, cycles=None, lane=None):
        """Write waveforms (VCD) of what runs in a ``with`` block.

        Parameters
        ----------
        path : path
            The file is complete when the block ends, also when it ends with an error.
        signals : :class:`str` or sequence of them
            Full names such as ``sim_top.core.pe_queue.fetched`` or their ends, cut at a dot;
            ``*``, ``?`` and ``[...]`` are as for files, and ``*`` matches dots too:
            ``pe_queue.*`` is all that is in the queue.
        start : :class:`int`, optional
            First cycle, counted as :attr:`cycles`; the present one if not given.
        cycles : :class:`int`, optional
            How many from there on; all if not given. The rest runs at full speed.
        lane : :class:`int`, optional
            Of parts that there are many of, such as processing elements, only this one.

        Raises
        ------
        :exc:`UsageError`
            If a name matches nothing (the message lists those that are near), if the window lies in
            the past or has not come, or on a backend other than ``native``.
        """
        record = self._able("record", "write waveforms")
        with record(path, signals, start, cycles, lane):
            yield self

    # Looking inside -------------------------------------------------------------------------------

    def sbuf(self):
        """Contents of SBUF as ``[partitions, bytes]``, a copy."""
        self._check_open()
        return self._runner.sbuf()

    def psum(self):
        """Contents of PSUM as ``[partitions, bytes]``, a copy."""
        self._check_open()
        return self._runner.psum()


def _source(program, engine, index):
    """Line of the kernel that instruction ``index`` of ``engine`` came from, or ''."""
    return "" if index is None else program.where(engine, index)


class _Together:
    """Tells the progress of several runs as that of one.

    Parameters
    ----------
    tell : callable
        Of the device.
    work : :class:`int`
        Of all runs together, in the unit of :meth:`begin`.
    """

    def __init__(self, tell, work):
        self.tell, self.left = tell, work
        self.issued = self.cycles = self.share = 0

    def begin(self, work):
        """A run of that much work begins."""
        self.share = work
        self.left -= work

    def end(self, report):
        """It has ended."""
        self.issued += report.instructions
        self.cycles += report.cycles or 0

    def __call__(self, issued, total, cycles):
        to_come = total * self.left // self.share
        cycles = None if cycles is None else self.cycles + cycles
        self.tell(self.issued + issued, self.issued + total + to_come, cycles)
