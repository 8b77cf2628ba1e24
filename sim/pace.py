"""How long to stay in compiled code: until an interrupt has waited long enough."""

import contextlib
import time

__all__ = ["Pace"]


class Pace:
    """Cycles to simulate at a time, so that Python looks up every twentieth of a second.

    Attributes
    ----------
    cycles : :class:`int`
        To simulate next.
    """

    seconds = 0.05

    def __init__(self, cycles=64):
        self.cycles = cycles

    @contextlib.contextmanager
    def measured(self, count):
        """Measure a block that simulates some cycles; what comes next is longer or shorter.

        ``count()`` says how many there have been so far: a block may end early.
        """
        start, before = time.perf_counter(), count()
        yield
        took = max(time.perf_counter() - start, 1e-9)
        cycles = count() - before
        self.cycles = max(1, min(2 * max(cycles, 32), int(cycles * self.seconds / took)))
