"""Run the hardware as C that loops over lanes."""

from ...sim import toolchain
from ..errors import MakaluError, ToolMissing
from .registers import RegisterRunner

__all__ = ["missing", "start"]


def missing(config):
    """Why nothing can be compiled here, or ``None``."""
    del config
    try:
        toolchain.find_cc()
    except toolchain.ToolMissing as error:
        return str(error)
    return None


def start(config, hbm, on_build=None):
    """A compiled core with its HBM; built once per configuration, then taken from the cache."""
    from ...sim.backends.native import NativeMachine

    try:
        return RegisterRunner(NativeMachine(config, hbm, progress=on_build))
    except toolchain.ToolMissing as error:
        raise ToolMissing(f"backend native: {error}") from None
    except toolchain.BuildError as error:
        raise MakaluError(f"backend native could not be built: {error}") from None
