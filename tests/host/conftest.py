"""Devices for the driver's tests."""

import sys
from pathlib import Path

import makalu
import pytest
from makalu.host import devices

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def dev():
    """SMALL on the golden model."""
    with makalu.open("SMALL", "golden") as device:
        yield device


@pytest.fixture(params=["golden", "registers"])
def any_dev(request, monkeypatch):
    """SMALL on the golden model, directly and behind the register driver."""
    if request.param == "registers":
        from fake_machine import FakeMachine
        from makalu.host.devices.registers import RegisterRunner

        monkeypatch.setattr(
            devices, "start", lambda name, config, hbm, *_: RegisterRunner(
                FakeMachine(config, hbm)
            )
        )  # fmt: skip
    with makalu.open("SMALL", "golden") as device:
        yield device
