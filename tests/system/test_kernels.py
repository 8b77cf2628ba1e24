"""The kernel library on the whole core: every bit the golden model's, cycles as recorded."""

import json
from pathlib import Path

import makalu
import numpy as np
import pytest
from library import calls
from makalu.host.devices import missing
from makalu.rtl.arch.config import TRN

FIGURES = Path(__file__).parents[1] / "bench" / "figures.json"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing("native", TRN) is not None, reason=str(missing("native", TRN))),
]


@pytest.fixture(scope="module", params=["SMALL", "TRN"])
def machine(request):
    """A machine on the RTL and as the golden model."""
    with (
        makalu.open(request.param, "native") as dev,
        makalu.open(request.param, "golden") as golden,
    ):
        yield request.param, dev, golden


def test_kernels_have_the_bits_of_the_golden_model(machine, rng, capsys):
    name, dev, golden = machine
    recorded = {
        case["kernel"]: case["cycles"]
        for case in json.loads(FIGURES.read_text())["kernels"]
        if case["machine"] == name
    }
    seen = {}
    for call in calls(name):
        args = call.operands(rng)
        got, want = call.kernel(dev, *args), call.kernel(golden, *args)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert a.tobytes() == b.tobytes(), call.name
        error = call.error(got, args)
        run = dev.last_run
        seen[call.name] = run.cycles
        units = ("pe", "act", "dve", "pool")
        busy = {unit: run.counters[f"{unit}_busy"] / run.cycles for unit in units}
        with capsys.disabled():
            print(
                f"\n{name:5} {call.name:48} {run.cycles:9,} cycles, error {error:.1e}, busy: "
                + ", ".join(f"{unit.upper()} {share:.0%}" for unit, share in busy.items()),
                end="",
            )
        assert error <= call.allowed, call.name
    assert seen == recorded


def test_a_wrong_bit_is_an_error(rng):
    """The comparison with float64 can fail."""
    call = next(iter(calls("SMALL")))
    args = call.operands(rng)
    right = call.reference(*args).astype(np.float32)
    assert call.error(right, args) <= call.allowed
    wrong = right.copy()
    wrong[0, 0] += 1e-4
    assert call.error(wrong, args) > call.allowed
