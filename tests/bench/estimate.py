"""A quick estimate of a program's cycles: queues, engines, DMA bursts and one shared HBM.

No data moves. It is for choosing blockings before running the hardware; the hardware decides.

    python tests/bench/estimate.py SMALL 512 512 512 bf16
"""

import heapq
import sys
import time
from collections import deque

from makalu.firmware.kernels.matmul import matmul
from makalu.firmware.nki import TensorSpec
from makalu.rtl.arch import isa
from makalu.rtl.arch.config import WINDOW_LOG2, named_config
from makalu.rtl.arch.isa import UpdateMode, WaitMode


class Simulation:
    """Processes are generators that yield a delay or a list to be appended to (a condition)."""

    def __init__(self):
        self.now = 0
        self.heap = []
        self.serial = 0

    def at(self, when, process):
        self.serial += 1
        heapq.heappush(self.heap, (when, self.serial, process))

    def step(self, process):
        try:
            what = next(process)
        except StopIteration:
            return
        if isinstance(what, list):
            what.append(process)
        else:
            self.at(self.now + what, process)

    def wake(self, waiting):
        processes, waiting[:] = waiting[:], []
        for process in processes:
            self.at(self.now, process)

    def run(self):
        while self.heap:
            self.now, _, process = heapq.heappop(self.heap)
            self.step(process)
        return self.now


class Core:
    """Timing of one core."""

    def __init__(self, config, program, bandwidth=None, latency=200):
        self.config, self.sim = config, Simulation()
        self.bandwidth = bandwidth or config.rows
        self.latency = latency
        self.hbm_free = 0.0
        self.hbm_busy = 0.0
        self.semaphores = [0] * config.semaphores
        self.changed = [[] for _ in range(config.semaphores)]
        base = 1 << 20
        at, addresses = base + program.image_bytes, {}
        for info in program.tensors:
            at = -(-at // 256) * 256
            addresses[info.name] = at
            at += info.nbytes
        image, entry = program.link(base, addresses)
        self.image, self.base = image, base
        self.busy = dict.fromkeys(("pe", "dve"), 0)
        self.stall = {}
        self.last_wave = 0
        self.first_wave = None
        # tensor engine
        self.shadow_free, self.shadow_changed = True, []
        self.weights_ready = 0
        self.pe_free = 0
        self.dve_free = 0
        self.engines = [Dma(self, e) for e in range(config.dma_engines)]
        self.windows = []  # per queue: [instructions left to ask for, room, arrivals, waiting]
        self.fetch_idle = []
        for engine, (address, count) in entry.items():
            if count:
                window = [count, config.queue_depth, deque(), []]
                self.windows.append(window)
                self.sim.at(0, self.queue(engine, address, count, window))
        self.sim.at(0, self.fetch())

    def hbm(self, size, urgent=False):
        """When the data of a request made now has passed the memory.

        Ports are served in turn: an instruction fetch (``urgent``) waits for no backlog of DMA.
        """
        cost = max(size, 32) / self.bandwidth
        start = max(self.sim.now, self.hbm_free)
        self.hbm_free = start + cost
        self.hbm_busy += cost
        return self.sim.now + 2 * cost if urgent else self.hbm_free

    def update(self, update):
        if update.mode == UpdateMode.ADD:
            self.semaphores[update.semaphore] += update.value
            self.sim.wake(self.changed[update.semaphore])

    def later(self, when, update):
        if update.mode == UpdateMode.NONE:
            return

        def process():
            self.update(update)
            yield from ()

        self.sim.at(when, process())

    def fetch(self):
        """Instructions for all queues in turn, one per 16 cycles of the bus."""
        while any(window[0] for window in self.windows):
            asked = False
            for window in self.windows:
                if window[0] and window[1]:
                    window[0] -= 1
                    window[1] -= 1
                    window[2].append(self.hbm(128, urgent=True) + self.latency)
                    self.sim.wake(window[3])
                    asked = True
                    yield 16
            if not asked:
                yield self.fetch_idle

    def queue(self, engine, address, count, window):
        sim = self.sim
        for row in range(count):
            while not window[2]:
                yield window[3]
            ready = window[2].popleft()
            window[1] += 1
            sim.wake(self.fetch_idle)
            if ready > sim.now:
                key = engine.name, "fetch"
                self.stall[key] = self.stall.get(key, 0) + ready - sim.now
                yield ready - sim.now
            at = address - self.base + row * 128
            ins = isa.decode(self.image[at : at + 128])
            began = sim.now
            for wait in ins.waits:
                if wait.mode == WaitMode.NONE:
                    continue
                while self.semaphores[wait.semaphore] < wait.value:
                    yield self.changed[wait.semaphore]
            if sim.now > began:
                key = engine.name, "semaphore"
                self.stall[key] = self.stall.get(key, 0) + sim.now - began
            yield 2
            if isinstance(ins, isa.EventSemaphore):
                self.update(ins.update)
            elif isinstance(ins, isa.LoadStationary):
                while not self.shadow_free:
                    yield self.shadow_changed
                self.shadow_free = False
                self.weights_ready = sim.now + -(-ins.src.elements // 4) + 3
                self.later(self.weights_ready, ins.update)
            elif isinstance(ins, isa.MatmulMoving):
                start = max(sim.now, self.weights_ready, self.pe_free)
                if start > sim.now:
                    yield start - sim.now
                self.first_wave = self.first_wave or start
                self.shadow_free = True
                sim.wake(self.shadow_changed)
                n = max(ins.src.elements, 6)
                self.pe_free = start + n
                self.busy["pe"] += ins.src.elements
                end = start + n + 2 * self.config.rows + self.config.cols // 4 + 12
                self.last_wave = end
                self.later(end, ins.update)
            elif isinstance(ins, isa.TensorCopy | isa.Memset):
                start = max(sim.now, self.dve_free)
                if start > sim.now:
                    yield start - sim.now
                self.dve_free = start + ins.dst.elements
                self.busy["dve"] += ins.dst.elements
                self.later(self.dve_free + 10, ins.update)
            else:
                for i in range(ins.engines_used):
                    dma = self.engines[ins.first + i]
                    while len(dma.jobs[ins.queue]) >= 4:
                        yield dma.room
                    table = ins.table + i * ins.count * 128
                    for j in range(ins.count):
                        at = table + 128 * j - self.base
                        d = isa.Descriptor.decode(self.image[at : at + 128])
                        there = self.hbm(128) + self.latency
                        update = ins.update if j == ins.count - 1 else None
                        dma.jobs[ins.queue].append((d, update, there))
                    sim.wake(dma.work)

    def run(self):
        return self.sim.run()


def runs_of(side, size):
    """(bytes in a run, number of runs)."""
    run, dims = size, list(side.dims)
    while dims and (dims[0][0] == run or dims[0][1] == 1):
        run *= dims.pop(0)[1]
    n = 1
    for _, count in dims:
        n *= count
    return run, n


class Dma:
    """One DMA engine: loads and stores stream independently."""

    def __init__(self, core, index):
        self.core, self.index = core, index
        self.jobs = [deque() for _ in range(core.config.dma_queues)]
        self.work, self.room = [], []
        for q in range(core.config.dma_queues):
            core.sim.at(0, self.process(q))
        self.read_port = self.write_port = 0.0

    def process(self, q):
        core, sim = self.core, self.core.sim
        capacity = core.config.dma_bursts * core.config.dma_burst_bytes
        idle = True
        while True:
            if not self.jobs[q]:
                idle = True
                yield self.work
                continue
            d, update, there = self.jobs[q].popleft()
            sim.wake(self.room)
            # Planning takes 30 cycles, behind the data of the descriptor before.
            yield max(there - sim.now, 0) + (30 if idle else 10)
            idle = False
            if d.src.elements == 0:
                if update:
                    core.update(update)
                continue
            size = 1 << d.size_log2
            load = d.src.address >> WINDOW_LOG2 == 0
            run, n = runs_of(d.src if load else d.dst, size)
            burst = core.config.dma_burst_bytes
            pieces = [burst] * (run // burst) + ([run % burst] if run % burst else [])
            flight = deque()
            held = 0
            end = sim.now
            for _ in range(n):
                for piece in pieces:
                    if load:
                        while held + piece > capacity or len(flight) >= 64:
                            when, freed = flight.popleft()
                            held -= freed
                            if when > sim.now:
                                yield when - sim.now
                        arrival = core.hbm(piece) + core.latency
                        self.read_port = max(self.read_port + -(-piece // 8), arrival)
                        end = self.read_port
                        flight.append((end, piece))
                        held += piece
                        yield 1
                    else:
                        start = max(self.write_port, sim.now)
                        self.write_port = start + -(-piece // 8)
                        if self.write_port > sim.now:
                            yield self.write_port - sim.now
                        done = core.hbm(piece)
                        end = done + core.latency
                        # the bus takes no more than the memory does
                        self.write_port = max(self.write_port, done - 64)
            if update:
                core.later(end + 5, update)


def estimate(config, program):
    """(cycles, utilisation, core)."""
    core = Core(config, program)
    cycles = core.run()
    return cycles, program.stats["passes"] / (cycles * config.rows * config.cols), core


def main():
    config = named_config(sys.argv[1])
    m, k, n = map(int, sys.argv[2:5])
    dtype = sys.argv[5] if len(sys.argv) > 5 else "bf16"
    began = time.time()
    program = matmul.compile(config, TensorSpec((m, k), dtype), TensorSpec((k, n), dtype))
    compiled = time.time()
    cycles, utilisation, core = estimate(config, program)
    print(
        f"{config.name} {m}x{k}x{n} {dtype}: {cycles:.0f} cycles, utilisation {utilisation:.4f}, "
        f"first wave {core.first_wave:.0f}, after last wave {cycles - core.last_wave:.0f}, "
        f"HBM busy {core.hbm_busy / cycles:.3f}, compile {compiled - began:.1f} s, "
        f"estimate {time.time() - compiled:.1f} s"
    )
    print({f"{a} {b}": round(v) for (a, b), v in core.stall.items()})
    print(program.stats)


if __name__ == "__main__":
    main()
