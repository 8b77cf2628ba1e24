"""What machines share that are a library: its functions ``machine_...``, memories as arrays."""

import ctypes
import re
from functools import cached_property

import numpy as np

from .. import memory
from ..memory import HbmSettings
from ..pace import Pace
from .base import BUSY, STATUS, BaseMachine

__all__ = ["CompiledMachine", "declare"]


def declare(library):
    """Tell ctypes the functions that every such library has; the first argument is a handle."""
    pointer, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    for name, result, *arguments in (
        ("cycles", u64),
        ("reg_write", ctypes.c_int, u32, u32),
        ("reg_read", ctypes.c_int, u32, ctypes.POINTER(u32)),
        ("step", None, u64),
        ("run", ctypes.c_int, u32, u32, u64),
    ):
        function = getattr(library, f"machine_{name}")
        function.restype, function.argtypes = result, [pointer, *arguments]


def _natural(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class CompiledMachine(BaseMachine):
    """A machine behind a library and a handle.

    A subclass sets ``_library``, ``_handle`` and ``_hbm`` (uint8 array), calls
    :meth:`_find_banks`, and provides ``_free()``.
    """

    _handle = None

    def _settings(self):
        """Settings of the HBM, by name.

        Raises
        ------
        :exc:`ValueError`
            If it cannot be simulated.
        """
        settings = HbmSettings.of(self.config, self.hbm)
        if settings["words"] > memory.ARRAY_WORDS:
            raise ValueError(
                f"HbmConfig: size_bytes must be at most {8 * memory.ARRAY_WORDS} here, "
                f"not {self.hbm.size_bytes}"
            )
        return settings

    def _find_banks(self, found):
        """Sort out the banks among all memories, pairs of a path and a uint8 array."""
        config = self.config

        def banks(block, nbytes, count):
            matching = sorted(
                (
                    (path, view)
                    for path, view in found
                    if view.size == nbytes and re.search(rf"\.{block}(\$\d+)?\.", path)
                ),
                key=lambda item: _natural(item[0]),
            )
            if len(matching) != config.partitions * count:
                raise LookupError(
                    f"the model has {len(matching)} banks of {block}, "
                    f"not {config.partitions * count}"
                )
            views = [view for _, view in matching]
            return [views[p * count : (p + 1) * count] for p in range(config.partitions)]

        self._sbuf = banks("sbuf", config.sbuf_bytes // self._SBUF_BANKS, self._SBUF_BANKS)
        self._psum = banks("psum", config.psum_bank_bytes, config.psum_banks)

    def close(self):
        """Free the machine; may be called twice."""
        if self._handle is not None:
            self._hbm = self._sbuf = self._psum = None
            self._free()
            self._handle = None

    def __del__(self):
        self.close()

    @cached_property
    def _pace(self):
        return Pace()

    @property
    def _slice(self):
        return self._pace.cycles

    def _next(self, cycles):
        """How many of some cycles to run before :meth:`_passed` is called."""
        assert self._open
        return min(cycles, self._slice)

    def _passed(self):
        """Some cycles have passed."""

    @property
    def _open(self):
        if self._handle is None:
            raise RuntimeError("the machine is closed")
        return self._handle

    @property
    def cycles(self):
        """Clock cycles simulated so far."""
        return self._library.machine_cycles(self._open) - 1

    def step(self, cycles):
        """Let ``cycles`` cycles pass."""
        while cycles > 0:  # in slices, so that an interrupt is heard
            part = self._next(cycles)
            with self._pace.measured(lambda: self.cycles):
                self._library.machine_step(self._open, part)
            self._passed()
            cycles -= part

    def reg_write(self, address, value):
        """Write a register."""
        self._next(1)
        response = self._library.machine_reg_write(self._open, address, value)
        self._passed()
        self._checked("write", address, response)

    def reg_read(self, address):
        """Return what a register holds."""
        value = ctypes.c_uint32()
        self._next(1)
        response = self._library.machine_reg_read(self._open, address, ctypes.byref(value))
        self._passed()
        self._checked("read", address, response)
        return value.value

    def _run(self, cycles):
        part = self._next(cycles)
        with self._pace.measured(lambda: self.cycles):
            state = self._library.machine_run(self._open, STATUS, BUSY, part)
        self._passed()
        self._checked("read", STATUS, min(state, 0))
        return state == 1

    def _hbm_read(self, address, nbytes):
        return self._hbm[address : address + nbytes].tobytes()

    def _hbm_write(self, address, data):
        self._hbm[address : address + len(data)] = data

    def _sbuf_bank(self, partition, bank):
        return self._sbuf[partition][bank].reshape(-1)

    def _sbuf_bank_write(self, partition, bank, contents):
        self._put(self._sbuf[partition][bank], contents)

    def _psum_bank(self, partition, bank):
        return self._psum[partition][bank].reshape(-1)

    def _psum_bank_write(self, partition, bank, contents):
        self._put(self._psum[partition][bank], contents)

    def _put(self, view, contents):
        view[...] = np.asarray(contents).reshape(view.shape)
