"""Options shared by all tests."""

import contextlib
import os
import re
import warnings
from pathlib import Path

import pytest

warnings.filterwarnings("ignore", category=DeprecationWarning, module="amaranth.*")

MAY_BE_MISSING = ("iverilog", "libpython", "AddressSanitizer", "ThreadSanitizer")
"""What a test may be skipped for under ``--no-skips``: the reason names one of these."""


def pytest_addoption(parser):
    group = parser.getgroup("makalu")
    group.addoption("--seed", type=int, default=1, help="seed of every random test")
    group.addoption(
        "--all-faults", action="store_true",
        help="judge every planted fault of rtl/test_faults.py, not the first of every module alone",
    )  # fmt: skip
    group.addoption(
        "--programs", type=int, default=200, metavar="N",
        help="random programs in lock step: N on TINY, N/10 on SMALL, N/40 in Amaranth's simulator",
    )  # fmt: skip
    group.addoption(
        "--traces", type=Path, metavar="FOLDER",
        help="write the waveforms of all simulations in Amaranth's simulator to this folder",
    )  # fmt: skip
    group.addoption(
        "--no-skips", action="store_true",
        help=f"a skipped test fails, unless what is missing is {' or '.join(MAY_BE_MISSING)}",
    )  # fmt: skip


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


def pytest_configure(config):
    """Choose hypothesis' profile before a test module is read, whose ``settings`` go by it."""
    del config
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "makalu", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "makalu"))


# --no-skips ---------------------------------------------------------------------------------------


def _forbid_skip(config, report):
    """Turn the report of a skipped test into that of a failed one, where skips are forbidden."""
    if not report.skipped or hasattr(report, "wasxfail") or not config.getoption("--no-skips"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(name in reason for name in MAY_BE_MISSING):
        report.outcome = "failed"
        report.longrepr = f"--no-skips forbids to skip this test. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    _forbid_skip(item.config, report)
    if report.failed and (waves := item.stash.get(_WAVES, None)):
        report.sections.append(("waveforms", "\n".join(map(str, waves))))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _forbid_skip(collector.config, report)
    return report


# --traces -----------------------------------------------------------------------------------------

_WAVES = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Every simulator that is made for ``item`` records until the end of the test."""
    folder = item.config.getoption("--traces")
    if folder is None:
        return (yield)
    from amaranth.sim import Simulator

    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", item.nodeid.removeprefix("tests/"))
    item.stash[_WAVES] = waves = []
    right = Simulator.__init__

    def recording(simulator, *args, **kwargs):
        right(simulator, *args, **kwargs)
        waves.append(folder / f"{name}.{len(waves)}.vcd")
        recorders.enter_context(simulator.write_vcd(str(waves[-1])))

    with contextlib.ExitStack() as recorders:
        Simulator.__init__ = recording
        recorders.callback(setattr, Simulator, "__init__", right)
        return (yield)


# Reports ------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter):
    """What tests have to report at the end of a run: their property ``report``."""
    for report in terminalreporter.stats.get("passed", []):
        for name, text in report.user_properties:
            if name == "report":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
