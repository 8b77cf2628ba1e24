"""Run the hardware in Amaranth's simulator: nothing to install, a few hundred cycles per second."""

from .registers import RegisterRunner

__all__ = ["missing", "start"]


def missing(config):
    """Nothing is missing: Amaranth is a dependency."""
    del config


def start(config, hbm, on_build=None):
    """A core and its HBM in Amaranth's simulator."""
    from ...sim.backends.pysim import PysimMachine

    if on_build is not None:
        on_build("elaborating the hardware", 0.0)
    return RegisterRunner(PysimMachine(config, hbm))
