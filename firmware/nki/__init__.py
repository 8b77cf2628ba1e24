"""The kernel language: a module shaped like AWS NKI, traced into engine instructions."""

from . import isa, language
from .tensor import KernelError, NkiTensor, TensorSpec
from .trace import Kernel, Trace, jit, set_runner

__all__ = [
    "Kernel", "KernelError", "NkiTensor", "TensorSpec", "Trace", "isa", "jit", "language",
    "set_runner",
]  # fmt: skip
