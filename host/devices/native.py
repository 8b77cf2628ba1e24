"""Run the hardware as C that loops over lanes."""

from ...sim import toolchain
from .compiled import missing_tool, start_compiled

__all__ = ["missing", "start"]


def missing(config):
    """Why nothing can be compiled here, or ``None``."""
    del config
    return missing_tool(toolchain.find_clang_cc)


def start(config, hbm, on_build=None, keep=None):
    """See :func:`~.compiled.start_compiled`; ``keep`` is a folder for the C."""
    from ...sim.backends.native import NativeMachine

    return start_compiled(NativeMachine, config, hbm, on_build, keep=keep)
