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
    def measured(self, cycles):
        """Measure a block that simulates some cycles; what comes next is longer or shorter."""
        start = time.perf_counter()
        yield
        took = max(time.perf_counter() - start, 1e-9)
        self.cycles = max(1, min(2 * max(cycles, 32), int(cycles * self.seconds / took)))
