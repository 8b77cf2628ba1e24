"""Devices for the tests of whole systems: one per configuration, compiled once."""

import sys
from pathlib import Path

import makalu
import pytest
from makalu.host import devices
from makalu.rtl.arch.config import SMALL, TINY

sys.path.insert(0, str(Path(__file__).parent))


def _opened(config, **options):
    reason = devices.missing("verilator", config)
    if reason is not None:
        pytest.skip(reason)
    return makalu.open(config, "verilator", **options)


@pytest.fixture(scope="session")
def small():
    """SMALL, compiled."""
    with _opened(SMALL) as device:
        yield device


@pytest.fixture(scope="module")
def tiny():
    """TINY, compiled, with a short watchdog and as much HBM as :mod:`programs` uses."""
    from programs import HBM_BYTES, WATCHDOG_CYCLES

    with _opened(TINY, hbm=HBM_BYTES) as device:
        device._runner._write("watchdog", WATCHDOG_CYCLES)
        yield device
