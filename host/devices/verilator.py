"""Run the hardware as Verilog that Verilator has compiled."""

from ...sim import toolchain
from .compiled import missing_tool, start_compiled

__all__ = ["missing", "start"]


def missing(config):
    """Why nothing can be compiled here, or ``None``."""
    del config
    return missing_tool(toolchain.find_verilator, toolchain.find_cxx)


def start(config, hbm, on_build=None):
    """See :func:`~.compiled.start_compiled`."""
    from ...sim.backends.verilator import VerilatorMachine

    return start_compiled(VerilatorMachine, config, hbm, on_build)
