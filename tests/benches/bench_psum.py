"""PSUM against binary32 addition in numpy: rippling commands, reads of other banks on all ports."""

import cocotb
import numpy as np
from makalu.rtl.arch.config import TINY as CONFIG
from makalu.rtl.interfaces import PSUM_READ_PORTS, SBUF_READ_CYCLES
from makalu.rtl.memory.psum import PSUM_RAW_CYCLES, PsumCommand
from pins import add, begin, cycle, generator, pack, random_sums

P, BANKS, WORDS = CONFIG.partitions, CONFIG.psum_banks, CONFIG.psum_bank_words
WRITE_CYCLES = CONFIG.cols // 4 + PSUM_RAW_CYCLES


class Bench:
    def __init__(self, dut):
        self.dut = dut
        self.t = 0
        self.sums, self.due, self.compared = {}, {}, 0

    async def start(self):
        reads = {
            f"read__{i}__{name}": 0
            for i in range(PSUM_READ_PORTS)
            for name in ("valid", "bank", "word")
        }
        await begin(self.dut, command=0, sums=0, **reads)

    async def step(self, command=None, sums=None, reads=None):
        """One cycle; ``reads`` maps ports to a place and what must be answered."""
        dut = self.dut
        for i, expected in self.due.pop(self.t, {}).items():
            got = [int(getattr(dut, f"read__{i}__data__{p}").value) for p in range(P)]
            message = f"cycle {self.t}, port {i}"
            np.testing.assert_array_equal(np.array(got, np.uint32), expected, err_msg=message)
            self.compared += P
        dut.command.value = pack(PsumCommand(CONFIG), {"valid": 1, **command}) if command else 0
        if command:
            for p in range(P):
                self.sums.setdefault(self.t + 1 + p // 4, {})[p] = int(sums[p])
        now = self.sums.pop(self.t, {})
        dut.sums.value = sum(now.get(p, 0xDEADBEEF) << 32 * p for p in range(P))
        for i in range(PSUM_READ_PORTS):
            place, want = (reads or {}).get(i, (None, None))
            getattr(dut, f"read__{i}__valid").value = int(place is not None)
            if place is not None:
                getattr(dut, f"read__{i}__bank").value = place[0]
                getattr(dut, f"read__{i}__word").value = place[1]
                self.due.setdefault(self.t + SBUF_READ_CYCLES, {})[i] = want
        await cycle(dut)
        self.t += 1

    async def idle(self, cycles):
        for _ in range(cycles):
            await self.step()


@cocotb.test()
async def test_random_commands_beside_random_reads(dut):
    bench = Bench(dut)
    await bench.start()
    rng = generator("traffic")
    model = np.zeros((P, BANKS, WORDS), np.uint32)
    recent = []
    written = set()
    pairs = 0
    for _ in range(2500):
        command = sums = None
        reads = {}
        if rng.random() < 0.7:
            where = int(rng.integers(BANKS)), int(rng.integers(min(WORDS, 5)))
            accumulate = int(rng.random() < 0.7)
            if not (accumulate and where in recent[-(PSUM_RAW_CYCLES - 1) :]):
                columns, sums = int(rng.integers(P + 1)), random_sums(rng, P)
                command = dict(
                    zip(("bank", "word"), where, strict=True),
                    accumulate=accumulate,
                    columns=columns,
                )
                cell = model[(slice(columns), *where)]
                cell[:] = add(cell, sums[:columns]) if accumulate else sums[:columns]
                written.add(where)
        recent.append((command["bank"], command["word"]) if command else None)
        busy = {where[0] for where in recent[-WRITE_CYCLES - 2 :] if where}
        for i in map(int, rng.permutation(PSUM_READ_PORTS)):
            quiet = [where for where in sorted(written) if where[0] not in busy]
            if quiet and rng.random() < 0.7:
                place = quiet[rng.integers(len(quiet))]
                reads[i] = place, model[(slice(None), *place)].copy()
                busy.add(place[0])
                pairs += len(reads) > 1
        await bench.step(command, sums, reads)
    await bench.idle(WRITE_CYCLES + 2)
    for n, where in enumerate(sorted(written)):
        await bench.step(reads={n % PSUM_READ_PORTS: (where, model[(slice(None), *where)])})
    await bench.idle(SBUF_READ_CYCLES + 1)
    assert bench.compared > 400, bench.compared
    assert pairs > 100, pairs


@cocotb.test()
async def test_every_word_of_every_bank_is_its_own(dut):
    bench = Bench(dut)
    await bench.start()
    rng = generator("words")
    places = [(b, w) for b in range(BANKS) for w in range(WORDS)]
    model = {where: random_sums(rng, P) for where in places}
    for bank, word in places:
        command = {"bank": bank, "word": word, "accumulate": 0, "columns": P}
        await bench.step(command, model[bank, word])
    await bench.idle(WRITE_CYCLES)
    for bank, word in places:
        # Every port another bank.
        reads = [((bank + i) % BANKS, word) for i in range(PSUM_READ_PORTS)]
        await bench.step(reads={i: (where, model[where]) for i, where in enumerate(reads)})
    await bench.idle(SBUF_READ_CYCLES + 1)
    assert bench.compared == PSUM_READ_PORTS * BANKS * WORDS * P


@cocotb.test()
async def test_accumulates_at_the_shortest_distance_and_reads_at_once(dut):
    bench = Bench(dut)
    await bench.start()
    rng = generator("chain")
    total = None
    for i in range(80):
        sums = random_sums(rng, P)
        total = sums if i % 8 == 0 else add(total, sums)
        command = {"bank": 1, "word": 2, "accumulate": int(i % 8 != 0), "columns": P}
        await bench.step(command, sums)
        await bench.idle(PSUM_RAW_CYCLES - 1)
        if i % 4 == 3:
            await bench.idle(WRITE_CYCLES - PSUM_RAW_CYCLES)
            await bench.step(reads={i // 4 % PSUM_READ_PORTS: ((1, 2), total)})
    await bench.idle(SBUF_READ_CYCLES + 1)
    assert bench.compared == 20 * P


@cocotb.test()
async def test_a_reset_drops_what_is_under_way_and_keeps_the_rest(dut):
    bench = Bench(dut)
    await bench.start()
    rng = generator("reset")
    first = random_sums(rng, P)
    command = {"bank": 3 % BANKS, "word": 1, "accumulate": 0, "columns": P}
    await bench.step(command, first)
    await bench.idle(WRITE_CYCLES)
    await bench.step(command, random_sums(rng, P))
    dut.command.value = 0
    dut.rst.value = 1
    await cycle(dut)
    await cycle(dut)
    dut.rst.value = 0
    await bench.idle(WRITE_CYCLES)
    await bench.step(reads={0: ((3 % BANKS, 1), first)})
    await bench.idle(SBUF_READ_CYCLES + 1)
    assert bench.compared == P
