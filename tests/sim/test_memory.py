# amaranth: UnusedElaboratable=no
"""The HBM of the simulations against numpy: bursts on all ports, latency, bandwidth, errors."""

from dataclasses import replace

import numpy as np
import pytest
from makalu.rtl.arch.config import SMALL, TINY, HbmConfig
from makalu.sim.harness import simulate
from makalu.sim.memory import BURSTS, MIN_LATENCY, Hbm

INCR = 1


class Reader:
    """Issues read bursts as fast as they are taken; records cycles and data of every beat."""

    def __init__(self, port, bursts, pause=None):
        self.port, self.bursts, self.pause = port, bursts, pause
        self.accepted, self.beats = [], []

    @property
    def wanted(self):
        return sum(burst["len"] + 1 for burst in self.bursts)

    async def addresses(self, ctx):
        port, cycle = self.port, 0
        for burst in self.bursts:
            ctx.set(port.araddr, burst["addr"])
            ctx.set(port.arlen, burst["len"])
            ctx.set(port.arsize, burst.get("size", 3))
            ctx.set(port.arburst, burst.get("burst", INCR))
            ctx.set(port.arid, burst.get("id", 0))
            ctx.set(port.arvalid, 1)
            while True:
                _, _, ready = await ctx.tick().sample(port.arready)
                cycle += 1
                if ready:
                    self.accepted.append(cycle - 1)
                    break
        ctx.set(port.arvalid, 0)

    async def data(self, ctx):
        port, cycle = self.port, 0
        while len(self.beats) < self.wanted:
            ready = self.pause is None or self.pause.random() < 0.5
            ctx.set(port.rready, ready)
            _, _, valid, *beat = await ctx.tick().sample(
                port.rvalid, port.rdata, port.rresp, port.rlast, port.rid
            )
            if valid and ready:
                self.beats.append((cycle, *beat))
            cycle += 1
        ctx.set(port.rready, 0)

    @property
    def testbenches(self):
        return self.addresses, self.data


class Writer:
    """Issues write bursts; addresses, data and responses on their own."""

    def __init__(self, port, bursts, pause=None):
        self.port, self.bursts, self.pause = port, bursts, pause
        self.finished, self.responses = [], []

    async def addresses(self, ctx):
        port = self.port
        for burst in self.bursts:
            ctx.set(port.awaddr, burst["addr"])
            ctx.set(port.awlen, burst["len"])
            ctx.set(port.awsize, burst.get("size", 3))
            ctx.set(port.awburst, burst.get("burst", INCR))
            ctx.set(port.awid, burst.get("id", 0))
            ctx.set(port.awvalid, 1)
            await ctx.tick().until(port.awready)
        ctx.set(port.awvalid, 0)

    async def data(self, ctx):
        port, cycle = self.port, 0
        for burst in self.bursts:
            for i, (word, strobe) in enumerate(zip(burst["data"], burst["strobe"], strict=True)):
                while self.pause is not None and self.pause.random() < 0.4:
                    await ctx.tick()
                    cycle += 1
                ctx.set(port.wdata, int(word))
                ctx.set(port.wstrb, int(strobe))
                ctx.set(port.wlast, burst.get("wlast", i == burst["len"]))
                ctx.set(port.wvalid, 1)
                while True:
                    _, _, ready = await ctx.tick().sample(port.wready)
                    cycle += 1
                    if ready:
                        break
                ctx.set(port.wvalid, 0)
            self.finished.append(cycle - 1)

    async def answers(self, ctx):
        port, cycle = self.port, 0
        while len(self.responses) < len(self.bursts):
            ready = self.pause is None or self.pause.random() < 0.5
            ctx.set(port.bready, ready)
            _, _, valid, *answer = await ctx.tick().sample(port.bvalid, port.bresp, port.bid)
            if valid and ready:
                self.responses.append((cycle, *answer))
            cycle += 1
        ctx.set(port.bready, 0)

    @property
    def testbenches(self):
        return self.addresses, self.data, self.answers


def run(dut, *drivers, max_cycles=20_000):
    simulate(dut, *(t for driver in drivers for t in driver.testbenches), max_cycles=max_cycles)


def words(rng, count):
    return rng.integers(0, 1 << 64, count, dtype=np.uint64)


def fill(dut, rng):
    contents = words(rng, dut.words)
    dut.data.init = [int(word) for word in contents]
    return contents


def with_engines(count):
    return replace(TINY, name="test", rows=8 * count)


@pytest.mark.parametrize("paused", [False, True], ids=["full_speed", "pauses"])
def test_random_bursts_on_all_ports_agree_with_numpy(rng, paused):
    import random

    engines, region = 3, 512  # words that one port may touch: no races between ports
    config = with_engines(4)
    dut = Hbm(config=config, hbm=HbmConfig(size_bytes=4096 * engines, latency_cycles=9))
    contents = fill(dut, rng)
    before = contents.copy()
    readers, writers, written = [], [], contents.copy()
    for port in range(engines):
        base = region * port
        # The lower half is read while the upper half is written.
        reads = []
        for _ in range(6):
            length = int(rng.integers(1, 17))
            start = int(rng.integers(base, base + region // 2 - length))
            reads.append({"addr": 8 * start + int(rng.integers(8)), "len": length - 1,
                          "id": int(rng.integers(2))})  # fmt: skip
        readers.append(Reader(dut.dma[port], reads, random.Random(port) if paused else None))
        writes = []
        for _ in range(6):
            length = int(rng.integers(1, 17))
            start = int(rng.integers(base + region // 2, base + region - length))
            burst = {
                "addr": 8 * start, "len": length - 1, "id": int(rng.integers(2)),
                "data": words(rng, length), "strobe": rng.integers(0, 256, length),
            }  # fmt: skip
            writes.append(burst)
            for i in range(length):
                mask = sum(0xFF << 8 * b for b in range(8) if int(burst["strobe"][i]) >> b & 1)
                old, new = int(written[start + i]), int(burst["data"][i])
                written[start + i] = old & ~mask | new & mask
        writers.append(Writer(dut.dma[port], writes, random.Random(port) if paused else None))
    fetch = Reader(dut.fetch, [{"addr": 128 * i, "len": 15} for i in range(8)])

    state = {}

    class Peek:
        async def testbench(self, ctx):
            while any(len(w.responses) < len(w.bursts) for w in writers):
                await ctx.tick()
            state["after"] = [ctx.get(dut.data[i]) for i in range(dut.words)]

        testbenches = property(lambda self: (self.testbench,))

    run(dut, *readers, *writers, fetch, Peek())
    for reader in [*readers, fetch]:
        beats = iter(reader.beats)
        for burst in reader.bursts:
            for i in range(burst["len"] + 1):
                _, value, resp, last, rid = next(beats)
                assert value == int(before[burst["addr"] // 8 + i])
                assert (resp, last, rid) == (0, i == burst["len"], burst.get("id", 0))
    for writer in writers:
        assert [r[1:] for r in writer.responses] == [(0, b["id"]) for b in writer.bursts]
    assert state["after"] == [int(w) for w in written]
    assert not np.array_equal(before, written)


@pytest.mark.parametrize("latency", [MIN_LATENCY, 6, 7, 37, 200])
def test_first_beat_and_response_come_after_the_latency(rng, latency):
    dut = Hbm(
        config=with_engines(1),
        hbm=HbmConfig(size_bytes=4096, latency_cycles=latency, bytes_per_cycle=64),
    )
    fill(dut, rng)
    reader = Reader(dut.dma[0], [{"addr": 64, "len": 3}])
    writer = Writer(
        dut.dma[0], [{"addr": 2048, "len": 1, "data": words(rng, 2), "strobe": [255, 255]}]
    )
    run(dut, reader, writer)
    assert reader.beats[0][0] - reader.accepted[0] == latency
    assert [beat[0] - reader.beats[0][0] for beat in reader.beats] == [0, 1, 2, 3]
    assert writer.responses[0][0] - writer.finished[0] == latency


def test_latency_shorter_than_the_pipeline_is_refused():
    with pytest.raises(ValueError, match="latency_cycles must be at least 5, not 4"):
        Hbm(config=TINY, hbm=HbmConfig(latency_cycles=4))


def test_every_port_reads_8_bytes_per_cycle_when_the_bandwidth_allows(rng):
    engines = 4
    dut = Hbm(
        config=with_engines(engines),
        hbm=HbmConfig(size_bytes=1 << 16, latency_cycles=50, bytes_per_cycle=8 * engines),
    )
    readers = [
        Reader(port, [{"addr": 256 * (i + 16 * p), "len": 31} for i in range(4)])
        for p, port in enumerate(dut.dma)
    ]
    run(dut, *readers)
    for reader in readers:
        cycles = [beat[0] for beat in reader.beats]
        assert cycles[-1] - cycles[0] == len(cycles) - 1


def test_a_port_reads_and_writes_a_word_each_in_one_cycle(rng):
    dut = Hbm(
        config=with_engines(1),
        hbm=HbmConfig(size_bytes=1 << 16, latency_cycles=20, bytes_per_cycle=16),
    )
    reader = Reader(dut.dma[0], [{"addr": 256 * i, "len": 31} for i in range(3)])
    writer = Writer(
        dut.dma[0],
        [{"addr": 256 * (8 + i), "len": 31, "data": words(rng, 32), "strobe": [255] * 32}
         for i in range(3)],
    )  # fmt: skip
    run(dut, reader, writer)
    assert reader.beats[-1][0] - reader.beats[0][0] == 3 * 32 - 1
    assert writer.finished[-1] - writer.finished[0] == 2 * 32


def test_single_beats_stream_without_gaps(rng):
    dut = Hbm(
        config=with_engines(1),
        hbm=HbmConfig(size_bytes=4096, latency_cycles=20, bytes_per_cycle=8, min_access_bytes=8),
    )
    reader = Reader(dut.dma[0], [{"addr": 8 * i, "len": 0} for i in range(64)])
    run(dut, reader)
    assert reader.beats[-1][0] - reader.beats[0][0] == 63


@pytest.mark.parametrize("bandwidth", [3, 8, 20])
def test_reads_and_writes_share_the_bandwidth_fairly(rng, bandwidth):
    engines = 4
    dut = Hbm(
        config=with_engines(engines),
        hbm=HbmConfig(size_bytes=1 << 16, latency_cycles=10, bytes_per_cycle=bandwidth),
    )
    readers = [
        Reader(port, [{"addr": 256 * (i + 8 * p), "len": 15} for i in range(2)])
        for p, port in enumerate(dut.dma)
    ]
    writers = [
        Writer(
            port,
            [{"addr": 256 * (32 + i + 8 * p), "len": 15, "data": words(rng, 16),
              "strobe": [255] * 16}
             for i in range(2)],
        )
        for p, port in enumerate(dut.dma[:2])
    ]  # fmt: skip
    run(dut, *readers, *writers)
    moved = 8 * 2 * 16 * (len(readers) + len(writers))
    end = max([r.beats[-1][0] for r in readers] + [w.finished[-1] for w in writers])
    assert moved / bandwidth <= end <= moved / bandwidth * 1.05 + 30
    # Those that only read move the same share up to the end.
    halves = [r.beats[len(r.beats) // 2][0] for r in readers[2:]]
    assert abs(halves[0] - halves[1]) <= 2 * 8 * engines / bandwidth + 2


def test_after_a_pause_port_0_comes_first_whatever_was_before():
    dut = Hbm(
        config=with_engines(2),
        hbm=HbmConfig(size_bytes=4096, latency_cycles=6, bytes_per_cycle=8, min_access_bytes=8),
    )
    logs = []

    async def contest(ctx, beats):
        """Bursts of ``beats`` on both ports at once: ports in the order of their beats."""
        log, left, asks = [], list(beats), [True, True]
        while any(left):
            looks = []
            for port, count, ask in zip(dut.dma, beats, asks, strict=True):
                ctx.set(port.arlen, count - 1)
                ctx.set(port.arsize, 3)
                ctx.set(port.arburst, INCR)
                ctx.set(port.arvalid, ask)
                ctx.set(port.rready, 1)
                looks += [port.arready, port.rvalid]
            _, _, *seen = await ctx.tick().sample(*looks)
            for p in range(2):
                asks[p] = asks[p] and not seen[2 * p]
                if seen[2 * p + 1]:
                    left[p] -= 1
                    log.append(p)
        await ctx.tick().repeat(4)
        return log

    async def test(ctx):
        for before in [(1, 1), (1, 4), (4, 1), (2, 2), (5, 3)]:
            await contest(ctx, before)
            logs.append(await contest(ctx, (8, 8)))

    simulate(dut, test)
    assert logs[0][0] == 0
    assert logs == [logs[0]] * 5


@pytest.mark.parametrize(("minimum", "length"), [(32, 1), (32, 3), (64, 8), (256, 5), (8, 1)])
def test_a_short_access_costs_the_minimum(rng, minimum, length):
    count, bandwidth = 16, 8
    dut = Hbm(
        config=with_engines(1),
        hbm=HbmConfig(
            size_bytes=4096, latency_cycles=10, bytes_per_cycle=bandwidth, min_access_bytes=minimum
        ),
    )
    reader = Reader(dut.dma[0], [{"addr": 64 * i, "len": length - 1} for i in range(count)])
    run(dut, reader)
    firsts = [beat[0] for beat in reader.beats[::length]]
    per_access = max(minimum, 8 * length) / bandwidth
    assert firsts[-1] - firsts[0] == pytest.approx((count - 1) * per_access, abs=2)


def test_the_fetch_goes_ahead_of_data(rng):
    dut = Hbm(
        config=with_engines(2),
        hbm=HbmConfig(size_bytes=1 << 16, latency_cycles=10, bytes_per_cycle=8),
    )
    readers = [Reader(port, [{"addr": 256 * i, "len": 31} for i in range(3)]) for port in dut.dma]
    fetch = Reader(dut.fetch, [{"addr": 128 * i, "len": 15} for i in range(4)])
    run(dut, *readers, fetch)
    assert fetch.beats[-1][0] - fetch.beats[0][0] == 4 * 16 - 1


def test_many_bursts_are_outstanding(rng):
    dut = Hbm(config=SMALL, hbm=HbmConfig(size_bytes=4096, latency_cycles=300))
    reader = Reader(dut.dma[0], [{"addr": 64 * i, "len": 0} for i in range(BURSTS + 8)])
    run(dut, reader)
    # All of the first are accepted before the first answer.
    assert reader.accepted[BURSTS - 1] < reader.beats[0][0]
    assert reader.accepted[BURSTS] >= reader.beats[0][0] - 2


def test_errors_are_answered_and_change_nothing(rng):
    size = 4096 * 3  # not a power of two
    dut = Hbm(config=with_engines(1), hbm=HbmConfig(size_bytes=size, latency_cycles=10))
    contents = fill(dut, rng)
    cases = [
        ({"addr": size, "len": 0}, 3),
        ({"addr": 1 << 39, "len": 3}, 3),
        ({"addr": size - 8, "len": 1}, 3),
        ({"addr": size - 8, "len": 0}, 0),
        ({"addr": 64, "len": 3, "burst": 0}, 2),
        ({"addr": 64, "len": 3, "burst": 2}, 2),
        ({"addr": 64, "len": 1, "size": 2}, 2),
        ({"addr": 68, "len": 0, "size": 2}, 0),
    ]
    reader = Reader(dut.dma[0], [burst for burst, _ in cases])
    writer = Writer(
        dut.dma[0],
        [
            {**burst, "data": words(rng, burst["len"] + 1), "strobe": [255] * (burst["len"] + 1)}
            for burst, resp in cases
            if resp
        ],
    )
    state = {}

    class Peek:
        async def testbench(self, ctx):
            while len(writer.responses) < len(writer.bursts):
                await ctx.tick()
            state["after"] = [ctx.get(dut.data[i]) for i in range(dut.words)]

        testbenches = property(lambda self: (self.testbench,))

    run(dut, reader, writer, Peek())
    beats = iter(reader.beats)
    for burst, resp in cases:
        for i in range(burst["len"] + 1):
            _, value, got, last, _ = next(beats)
            assert got == resp
            assert last == (i == burst["len"])
            assert value == (0 if resp else int(contents[burst["addr"] // 8 + i]))
    assert [r[1] for r in writer.responses] == [resp for _, resp in cases if resp]
    assert state["after"] == [int(word) for word in contents]


def test_a_wrong_wlast_is_reported(rng):
    dut = Hbm(config=with_engines(1), hbm=HbmConfig(size_bytes=4096, latency_cycles=10))
    good = {"addr": 0, "len": 1, "data": [1, 2], "strobe": [255, 255]}
    writer = Writer(dut.dma[0], [good, {**good, "wlast": 0}, good, {**good, "wlast": 1}, good])
    run(dut, writer)
    assert [r[1] for r in writer.responses] == [0, 2, 0, 2, 0]
