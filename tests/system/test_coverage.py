"""What the random programs that hold the machines to the golden model reach, and what not."""

import numpy as np
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.sim.golden import GoldenCore

from .coverage import classify, collecting, kinds_of, possible, report
from .programs import HBM_BYTES, random_program
from .runs import fill


def test_random_programs_meet_every_kind_of_number_in_every_place(request, record_property):
    """Programs as ``test_random_programs.py`` runs them; the end of the test run lists the holes.

    A hundredth of the points may be missing: 800 programs leave one, 600 five, 400 sixteen.
    """
    count = 3 * request.config.getoption("--programs")
    core = GoldenCore(TINY, HBM_BYTES)
    with collecting() as seen:
        for number in range(count):
            rng = np.random.default_rng([7, number])
            image = random_program(rng, TINY, int(rng.integers(3, 40)))
            fill(None, core, image, np.random.default_rng([7, number, 0]))
            core.reset()
            core.run(image.queues)
    lines, holes = report(seen)
    record_property("report", "\n".join(lines))
    print("\n".join(lines))
    assert len(holes) <= 0.01 * len(list(possible()))


def test_kinds_are_told_apart():
    for fmt in formats.FORMATS:
        if fmt.is_float:
            codes = fmt.encode(np.array([0.0, -0.0, np.nan, 1.0, fmt.max, -float(fmt.max)]))
            want = {"zero": 1, "negative zero": 1, "NaN": 1, "normal": 1, "largest": 2}
            tiny = fmt.encode(np.array([fmt.min_subnormal, -fmt.min_subnormal]))
            assert classify(tiny, fmt)["subnormal"] == 2
            if not fmt.finite:
                assert classify(fmt.encode(np.array([np.inf])), fmt)["infinity"] == 1
        else:
            codes = fmt.encode(np.array([0, 1, fmt.max, fmt.min]))
            low = {"least": 1} if fmt.signed else {}
            want = {"zero": 1 if fmt.signed else 2, "between": 1, "greatest": 1} | low
        found = {kind: n for kind, n in classify(codes, fmt).items() if n}
        assert found == want, fmt.name
        assert set(found) <= set(kinds_of(fmt))


def test_a_hole_is_reported():
    points = list(possible())
    lines, holes = report(dict.fromkeys(points[1:], 1))
    assert holes == points[:1]
    assert lines[-1] == f"  never met: {' '.join(points[0])}"
