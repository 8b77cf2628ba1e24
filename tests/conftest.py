"""Options shared by all tests."""

import os
import warnings

import pytest

warnings.filterwarnings("ignore", category=DeprecationWarning, module="amaranth.*")


def pytest_addoption(parser):
    group = parser.getgroup("makalu")
    group.addoption("--seed", type=int, default=1, help="seed of every random test")
    group.addoption("--traces", action="store_true", help="write waveforms of simulations")


@pytest.fixture
def seed(request):
    """The seed of this run; shown when a test fails."""
    value = request.config.getoption("--seed")
    print(f"--seed {value}")
    return value


@pytest.fixture
def rng(seed):
    """A numpy generator made from the seed."""
    import numpy as np

    return np.random.default_rng(seed)


@pytest.fixture(autouse=True, scope="session")
def _hypothesis_profile():
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "makalu", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "makalu"))
