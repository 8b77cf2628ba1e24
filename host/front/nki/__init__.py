"""The kernel language under the name that kernel files import: ``nki.jit`` and friends."""

from makalu.firmware.nki import (
    Kernel,
    KernelError,
    NkiTensor,
    TensorSpec,
    Trace,
    jit,
    set_runner,
)
from makalu.nki import isa, language

__all__ = [
    "Kernel", "KernelError", "NkiTensor", "TensorSpec", "Trace", "isa", "jit", "language",
    "set_runner",
]  # fmt: skip
