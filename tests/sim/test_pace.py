"""How long compiled code is left alone."""

import time

from makalu.sim.pace import Pace


class Clock:
    """Cycles that have passed, in slices of a pace."""

    def __init__(self, most=1 << 30):
        self.pace, self.cycles, self.most = Pace(), 0, most

    def run(self, seconds_per_cycle):
        cycles = min(self.pace.cycles, self.most)
        with self.pace.measured(lambda: self.cycles):
            self.cycles += cycles
            time.sleep(cycles * seconds_per_cycle)


def test_slices_grow_until_they_last_long_enough_and_shrink():
    clock = Clock()
    for _ in range(30):
        clock.run(1e-5)
    assert 500 <= clock.pace.cycles <= 5100
    clock.run(1e-4)
    assert clock.pace.cycles <= 510


def test_many_short_runs_do_not_make_slices_long():
    """A run that ends before its slice does says nothing about longer ones."""
    clock = Clock(most=100)
    for _ in range(2000):
        clock.run(0)
    assert clock.pace.cycles <= 200
