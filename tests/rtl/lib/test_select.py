"""The arbiter against a pointer that goes round."""

import pytest
from makalu.rtl.lib.select import RoundRobin
from makalu.sim.harness import simulate


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_grants_go_round_and_wait_until_they_are_taken(count, rng):
    dut = RoundRobin(count=count)
    granted = set()

    async def testbench(ctx):
        turn = 0
        for _ in range(300):
            requests = int(rng.integers(1 << count))
            take, hold = int(rng.integers(2)), int(rng.random() < 0.2)
            ctx.set(dut.requests, requests)
            ctx.set(dut.take, take)
            ctx.set(dut.hold, hold)
            asking = [
                (turn + i) % count for i in range(count) if requests >> (turn + i) % count & 1
            ]
            assert ctx.get(dut.grant) == (1 << asking[0] if asking else 0)
            await ctx.tick()
            if asking and take:
                turn = (asking[0] + (not hold)) % count
                granted.add(asking[0])

    simulate(dut, testbench)
    assert granted == set(range(count))
