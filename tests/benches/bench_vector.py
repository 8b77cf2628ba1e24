"""The vector engine on the state buffer: copies, casts, fills, arithmetic, against numpy."""

from collections import deque
from dataclasses import replace

import cocotb
import numpy as np
from makalu.rtl.arch.config import TINY as CONFIG
from makalu.rtl.arch.formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    INT8,
    INT16,
    INT32,
    INTEGER_FORMATS,
    UINT16,
    UINT32,
)
from makalu.rtl.arch.isa import (
    BITWISE_OPS,
    AccessPattern,
    AluOp,
    CopyPredicated,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    ReduceOp,
    ScalarTensorTensor,
    Space,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
    Update,
    UpdateMode,
)
from makalu.rtl.interfaces import (
    SBUF_READ_CYCLES,
    DmaReadData,
    Issue,
    SbufBeat,
    SbufReadRequest,
)
from makalu.rtl.interfaces import Update as UpdatePayload
from pins import begin, cycle, generator, pack, settle, unpack
from vector_model import execute

P = CONFIG.partitions
AREA = 512  # bytes of each partition: sources below the middle, destinations above
BANKS, WORDS = CONFIG.psum_banks, CONFIG.psum_bank_words


class Bench:
    """Engines, state buffer, and a PSUM in Python.

    Attributes
    ----------
    engines : tuple of :class:`str`
        What the names of the ports of each engine begin with.
    """

    engines = ("",)
    model = staticmethod(execute)

    def __init__(self, dut, name):
        self.dut, self.rng = dut, generator(name)
        self.bytes = self.rng.integers(0, 256, (P, AREA), np.uint8)
        self.psum = self.rng.integers(0, 256, (P, CONFIG.psum_bytes), np.uint8)
        self.psum_words = self.psum.view("<u4").reshape(P, BANKS, WORDS)
        self.updates = {name: [] for name in self.engines}
        self.psum_reads, self.compared = 0, 0
        self.pipe = deque([None] * SBUF_READ_CYCLES)

    def get(self, name):
        return int(getattr(self.dut, name).value)

    def put(self, name, value):
        getattr(self.dut, name).value = value

    async def start(self):
        inputs = {f"psum_read__data__{p}": 0 for p in range(P)}
        for port in (*(f"{name}instructions" for name in self.engines), "dma_write", "dma_read"):
            inputs |= {f"{port}__valid": 0, f"{port}__payload": 0}
        inputs |= {f"{name}update__ready": 0 for name in self.engines}
        await begin(self.dut, psum_busy_others=0, **inputs)
        for p in range(P):
            for offset in range(0, AREA, 8):
                raw = int.from_bytes(self.bytes[p, offset : offset + 8].tobytes(), "little")
                beat = {"partition": p, "offset": offset, "data": raw, "strobe": 255}
                await self.send("dma_write", pack(SbufBeat(CONFIG), beat))

    async def step(self):
        """One cycle: PSUM, updates."""
        self.pipe.append(None)
        if self.get("psum_read__valid"):
            bank, word = self.get("psum_read__bank"), self.get("psum_read__word")
            assert self.get("psum_busy") >> bank & 1, "a bank is read that is not held"
            self.pipe[-1] = self.psum_words[:, bank, word]
            self.psum_reads += 1
        answer = self.pipe.popleft()
        if answer is not None:
            for p in range(P):
                self.put(f"psum_read__data__{p}", int(answer[p]))
        for name in self.engines:
            ready = int(self.rng.random() < 0.7)
            self.put(f"{name}update__ready", ready)
            if ready and self.get(f"{name}update__valid"):
                fields = unpack(UpdatePayload, self.get(f"{name}update__payload"))
                self.updates[name].append((fields["semaphore"], fields["mode"], fields["value"]))
        await cycle(self.dut)

    async def send(self, port, bits):
        self.put(f"{port}__payload", bits)
        self.put(f"{port}__valid", 1)
        for _ in range(3000):
            await settle()
            taken = self.get(f"{port}__ready")
            await self.step()
            if taken:
                break
        else:
            raise AssertionError(f"{port} is never taken")
        self.put(f"{port}__valid", 0)

    async def memory(self):
        """Read the state buffer back through its DMA port."""
        out = np.zeros_like(self.bytes)
        for p in range(P):
            for offset in range(0, AREA, 8):
                request = {"partition": p, "offset": offset}
                await self.send("dma_read", pack(SbufReadRequest(CONFIG), request))
                for _ in range(10):
                    answer = unpack(DmaReadData, self.get("dma_read_data"))
                    if answer["valid"]:
                        break
                    await self.step()
                assert answer["valid"]
                out[p, offset : offset + 8] = list(answer["data"].to_bytes(8, "little"))
        return out

    async def feed(self, programs):
        """Issue programs, one for each engine, side by side."""
        waiting = dict(zip(self.engines, map(deque, programs), strict=True))
        for _ in range(20000):
            for name, program in waiting.items():
                self.put(f"{name}instructions__valid", int(bool(program)))
                if program:
                    word = int.from_bytes(program[0].encode(), "little")
                    payload = pack(Issue, {"word": word, "pc": len(program)})
                    self.put(f"{name}instructions__payload", payload)
            await settle()
            taken = [name for name in self.engines if self.get(f"{name}instructions__ready")]
            await self.step()
            for name in taken:
                if waiting[name]:
                    waiting[name].popleft()
            if not any(waiting.values()):
                break
        else:
            raise AssertionError("instructions are never taken")
        for name in self.engines:
            self.put(f"{name}instructions__valid", 0)

    async def execute(self, *programs):
        """Run, then compare all bytes and the updates."""
        await self.feed(programs)
        for _ in range(6000):
            await settle()
            if not any(self.get(f"{name}busy") for name in self.engines):
                break
            await self.step()
        else:
            raise AssertionError("an engine does not finish")
        await self.step()
        want = self.bytes.copy()
        for name, program in zip(self.engines, programs, strict=True):
            expected = []
            for instruction in program:
                self.model(instruction, want, self.psum)
                self.compared += instruction.dst.num_partitions * instruction.dst.elements
                update = instruction.update
                if update.mode != UpdateMode.NONE:
                    expected.append((update.semaphore, int(update.mode), update.value))
            assert self.updates[name] == expected
        np.testing.assert_array_equal(await self.memory(), want)
        assert (want != self.bytes).any()

    def pattern(self, fmt, low, counts, start, partitions, space=Space.SBUF, area=AREA // 2):
        """A random pattern over ``counts`` in ``area`` bytes from ``low`` on, or in PSUM."""
        rng, size = self.rng, fmt.bytes
        room = area // size
        while True:
            steps = [int(s) for s in rng.integers(-6, 7, size=len(counts))]
            if space == Space.SBUF and rng.random() < 0.4:
                steps[0] = 1
            spans = [s * (c - 1) for s, c in zip(steps, counts, strict=True)]
            below, above = -sum(min(0, s) for s in spans), sum(max(0, s) for s in spans)
            if below + above < room:
                break
        first = int(rng.integers(below, room - above))
        dims = tuple(zip(steps, counts, strict=True))
        return AccessPattern(fmt, start, partitions, low + first * size, dims, space)

    def random_copy(self, i, space=Space.SBUF):
        rng = self.rng
        src = (FP32, INT32)[i % 2] if space == Space.PSUM else FORMATS[rng.integers(len(FORMATS))]
        dst = src if rng.random() < 0.3 else FORMATS[rng.integers(len(FORMATS))]
        counts = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4)))]
        return TensorCopy(
            dst=self.pattern(dst, AREA // 2, counts, 0, P),
            src=self.pattern(src, 0, counts, 0, P, space),
            saturate=int(rng.integers(2)),
            update=Update(i % 8, UpdateMode.ADD, 1 + i),
        )

    def random_operation(self, i):
        """Two tensors, or a tensor and scalars, or rows, or all of these; one source from PSUM."""
        rng = self.rng
        counts = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4)))]
        spaces = ((Space.SBUF, Space.SBUF), (Space.PSUM, Space.SBUF), (Space.SBUF, Space.PSUM))
        src, other = (
            self.pattern(
                FP32 if space == Space.PSUM else FORMATS[rng.integers(len(FORMATS))],
                0, counts, 0, P, space,
            )
            for space in spaces[i % 3]
        )  # fmt: skip
        among = [op for op in AluOp if op not in BITWISE_OPS]
        if rng.random() < 0.3:
            among = [AluOp.BYPASS, *BITWISE_OPS]
        ops = [among[k] for k in rng.integers(len(among), size=2)]
        pointers, reverse = rng.integers(2, size=(2, 2)).tolist()
        scalars = [
            int(4 * rng.integers(AREA // 8) if pointer else rng.integers(1 << 32))
            for pointer in pointers
        ]
        kind, inner = int(rng.integers(4)), int(rng.integers(len(counts)))
        fmt = FORMATS[rng.integers(len(FORMATS))]
        outer = counts[inner + 1 :] or [1]
        common = {
            "dst": self.pattern(fmt, AREA // 2, outer if kind == 3 else counts, 0, P),
            "saturate": int(rng.integers(2)),
            "update": Update(i % 8, UpdateMode.ADD, 1 + i),
        }
        first = {
            "op0": ops[0], "reverse0": reverse[0], "scalar0": scalars[0],
            "scalar0_pointer": pointers[0], "op1": ops[1], "reverse1": reverse[1],
        }  # fmt: skip
        if kind == 0:
            return TensorTensor(src0=src, src1=other, op=ops[0], **common)
        if kind == 1:
            second = {"scalar1": scalars[1], "scalar1_pointer": pointers[1]}
            return TensorScalar(src=src, **first, **second, **common)
        if kind == 2:
            return ScalarTensorTensor(src0=src, src1=other, **first, **common)
        op = list(ReduceOp)[rng.integers(len(ReduceOp))]
        return TensorReduce(src=src, op=op, inner=inner, negate=reverse[0], **common)

    def random_row(self, i):
        """A scan, a copy of chosen elements, or one on eight numbers; one source from PSUM."""
        rng, kind = self.rng, i % 5
        counts = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4)))]
        eight = [[8], [2, 4], [4, 2]][rng.integers(3)]
        spaces = ((Space.SBUF, Space.SBUF), (Space.PSUM, Space.SBUF), (Space.SBUF, Space.PSUM))

        def operand(space, shape, among=FORMATS):
            if space == Space.PSUM:
                among = [fmt for fmt in among if fmt.bytes == 4]
            return self.pattern(among[rng.integers(len(among))], 0, shape, 0, P, space)

        src_space, other_space = spaces[i % 3]
        src = operand(src_space, counts)
        result = (UINT16, UINT32) if kind == 3 else FORMATS
        fmt = result[rng.integers(len(result))]
        common = {
            "dst": self.pattern(fmt, AREA // 2, eight if kind in (2, 3) else counts, 0, P),
            "update": Update(i % 8, UpdateMode.ADD, 1 + i),
        }
        reverse = rng.integers(2, size=2).tolist()
        if kind != 3:
            common["saturate"] = int(rng.integers(2))
        if kind == 0:
            ops = [int(op) for op in rng.integers(int(AluOp.BITWISE_AND), size=2)]
            return TensorTensorScan(
                src0=src, src1=operand(other_space, counts), op0=ops[0], op1=ops[1],
                reverse0=reverse[0], reverse1=reverse[1], initial=int(rng.integers(1 << 32)),
                **common,
            )  # fmt: skip
        if kind == 1:
            predicate = operand(other_space, counts, INTEGER_FORMATS)
            return CopyPredicated(src=src, predicate=predicate, reverse=reverse[0], **common)
        if kind == 2:
            return Max8(src=src, **common)
        vals = operand(other_space, eight)
        if src_space == Space.SBUF and rng.random() < 0.5:
            vals = replace(src, dims=((0, 8),))  # an element that is there
        if kind == 3:
            return FindIndex8(src=src, vals=vals, **common)
        return MatchReplace8(src=src, vals=vals, value=int(rng.integers(1 << 32)), **common)


@cocotb.test()
async def test_random_copies_and_casts(dut):
    bench = Bench(dut, "copies")
    await bench.start()
    await bench.execute([bench.random_copy(i) for i in range(60)])
    assert bench.compared > 1000


@cocotb.test()
async def test_copies_from_psum(dut):
    bench = Bench(dut, "psum")
    await bench.start()
    await bench.execute([bench.random_copy(i, Space.PSUM) for i in range(30)])
    assert bench.psum_reads > 150


@cocotb.test()
async def test_fills_between_copies(dut):
    bench = Bench(dut, "fills")
    await bench.start()
    program = []
    for i, fmt in enumerate((INT8, BF16, FP32, INT16, FP16) * 4):
        dst = bench.pattern(fmt, AREA // 2, [int(bench.rng.integers(1, 9))], 0, P)
        value = int(bench.rng.integers(1 << 32))
        program.append(Memset(dst=dst, value=value, update=Update(i, UpdateMode.SET, i)))
        program.append(bench.random_copy(i))
    await bench.execute(program)
    assert bench.compared > 500


@cocotb.test()
async def test_arithmetic(dut):
    """Any bits: every operation, also on what is no number."""
    bench = Bench(dut, "arithmetic")
    await bench.start()
    await bench.execute([bench.random_operation(i) for i in range(80)])
    assert bench.compared > 1000
    assert bench.psum_reads > 150


@cocotb.test()
async def test_arithmetic_with_ordinary_numbers(dut):
    """Sums are rounded, products underflow, comparisons find equals."""
    bench = Bench(dut, "numbers")
    for memory in (bench.bytes, bench.psum):
        words = memory.view(np.uint32)
        scale = 2.0 ** bench.rng.choice([0, 0, 0, 23, -75], words.shape)
        words[...] = np.float32(bench.rng.integers(-8, 9, words.shape) * scale).view(np.uint32)
    await bench.start()
    await bench.execute([bench.random_operation(i) for i in range(80)])
    assert bench.compared > 1000


@cocotb.test()
async def test_scans_choices_and_eight_numbers(dut):
    """On numbers of which many are equal."""
    bench = Bench(dut, "rows")
    for memory in (bench.bytes, bench.psum):
        words = memory.view(np.uint32)
        words[...] = np.float32(bench.rng.integers(-3, 4, words.shape)).view(np.uint32)
    await bench.start()
    await bench.execute([bench.random_row(i) for i in range(75)])
    assert bench.compared > 500
    assert bench.psum_reads > 100
