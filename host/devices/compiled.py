"""Run the hardware as a library that a compiler made."""

from ...sim import toolchain
from ...sim.native.netlist import Unsupported
from ..errors import MakaluError, ToolMissing
from .registers import RegisterRunner

__all__ = ["missing_tool", "start_compiled"]


def missing_tool(*finders):
    """What the first of some finders that fails says, or ``None``."""
    try:
        for find in finders:
            find()
    except toolchain.ToolMissing as error:
        return str(error)
    return None


def start_compiled(machine, config, hbm, on_build, **options):
    """A compiled core with its HBM; built once per configuration, then taken from the cache."""
    try:
        return RegisterRunner(machine(config, hbm, progress=on_build, **options))
    except toolchain.ToolMissing as error:
        raise ToolMissing(f"backend {machine.name}: {error}") from None
    except Unsupported as error:
        raise MakaluError(
            f"backend {machine.name} cannot simulate this hardware: {error}"
        ) from None
    except toolchain.BuildError as error:
        raise MakaluError(f"backend {machine.name} could not be built: {error}") from None
