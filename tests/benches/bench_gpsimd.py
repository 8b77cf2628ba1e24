"""The GpSimd engine on the state buffer, beside the vector engine whose ports it shares."""

import cocotb
import numpy as np
from bench_vector import AREA, P
from bench_vector import Bench as VectorBench
from gpsimd_model import execute
from makalu.rtl.arch.formats import FORMATS, INTEGER_FORMATS
from makalu.rtl.arch.isa import (
    AffineSelect,
    AluOp,
    Compare,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    Rng,
    Update,
    UpdateMode,
)

RANDOM_FORMATS = next(operand.formats for _, operand, _ in Rng.operands)
CORNERS = [0, 1, 31, 0x7F, 0x80, 0xFFFF, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


class Bench(VectorBench):
    """Both engines; their results go to a quarter of the area each."""

    engines = ("", "vector_")
    model = staticmethod(execute)

    def counts(self):
        return [int(self.rng.integers(1, 5)) for _ in range(int(self.rng.integers(1, 4)))]

    def result(self, counts, formats):
        fmt = formats[self.rng.integers(len(formats))]
        return self.pattern(fmt, AREA // 2, counts, 0, P, area=AREA // 4)

    def source(self, counts, formats):
        return self.pattern(formats[self.rng.integers(len(formats))], 0, counts, 0, P)

    def function(self):
        bound = 5 if self.rng.random() < 0.7 else 1 << 31
        names = ("offset", "channel_multiplier", "step0", "step1", "step2", "step3")
        return {name: int(self.rng.integers(-bound, bound)) & 0xFFFFFFFF for name in names}

    def random_place(self, i):
        """Iota, or a selection."""
        rng, counts = self.rng, self.counts()
        common = {
            "dst": self.result(counts, FORMATS),
            "saturate": int(rng.integers(2)),
            "update": Update(i % 8, UpdateMode.ADD, 1 + i),
            **self.function(),
        }
        if rng.random() < 0.4:
            return Iota(**common)
        return AffineSelect(
            src=self.source(counts, FORMATS), compare=list(Compare)[rng.integers(6)],
            value=int(rng.choice([0, 0x3F800000, 0xFF800000, 0x7FC00000, 0xC2F60000])), **common,
        )  # fmt: skip

    def random_words(self, i):
        """Random numbers, of a seed in the instruction or in each partition."""
        pointer = int(self.rng.integers(2))
        number = self.rng.choice(CORNERS) if self.rng.random() < 0.3 else self.rng.integers(1 << 32)
        return Rng(
            dst=self.result(self.counts(), RANDOM_FORMATS), seed_pointer=pointer,
            seed=int(4 * self.rng.integers(AREA // 8) if pointer else number),
            update=Update(i % 8, UpdateMode.ADD, 1 + i), **self.function(),
        )  # fmt: skip

    def random_integers(self, i):
        """Two tensors, or a tensor and scalars."""
        rng, counts = self.rng, self.counts()
        dst, src = self.result(counts, INTEGER_FORMATS), self.source(counts, INTEGER_FORMATS)
        update = Update(i % 8, UpdateMode.ADD, 1 + i)
        ops = [list(AluOp)[k] for k in rng.integers(len(AluOp), size=2)]
        if rng.random() < 0.5:
            other = self.source(counts, INTEGER_FORMATS)
            return IntegerTensorTensor(dst=dst, src0=src, src1=other, op=ops[0], update=update)
        fields = {}
        for k in range(2):
            pointer = int(rng.integers(2))
            number = int(4 * rng.integers(AREA // 8) if pointer else rng.choice(CORNERS))
            fields |= {f"scalar{k}": number, f"scalar{k}_pointer": pointer, f"op{k}": ops[k]}
            fields[f"reverse{k}"] = int(rng.integers(2))
        return IntegerTensorScalar(dst=dst, src=src, update=update, **fields)

    def corners(self):
        """Integers of special size, in many places."""
        words = self.bytes.view(np.uint32)
        special = np.array(CORNERS, np.uint32)[self.rng.integers(len(CORNERS), size=words.shape)]
        words[...] = np.where(self.rng.random(words.shape) < 0.5, special, words)

    def moved(self, instruction):
        """An instruction of the vector engine whose results go to the last quarter."""
        dst = self.pattern(
            instruction.dst.dtype, 3 * AREA // 4, [count for _, count in instruction.dst.dims], 0,
            P, area=AREA // 4,
        )  # fmt: skip
        return instruction.replace(dst=dst)


@cocotb.test()
async def test_places(dut):
    bench = Bench(dut, "places")
    await bench.start()
    await bench.execute([bench.random_place(i) for i in range(80)], [])
    assert bench.compared > 1000


@cocotb.test()
async def test_integers(dut):
    bench = Bench(dut, "integers")
    bench.corners()
    await bench.start()
    await bench.execute([bench.random_integers(i) for i in range(80)], [])
    assert bench.compared > 1000


@cocotb.test()
async def test_random_numbers(dut):
    bench = Bench(dut, "random")
    await bench.start()
    await bench.execute([bench.random_words(i) for i in range(80)], [])
    assert bench.compared > 1000


@cocotb.test()
async def test_both_engines_at_once(dut):
    """They take turns at the ports; neither disturbs the other."""
    bench = Bench(dut, "both")
    bench.corners()
    await bench.start()
    ours = [
        (bench.random_place, bench.random_integers, bench.random_words)[int(bench.rng.integers(3))](
            i
        )
        for i in range(60)
    ]
    theirs = [bench.moved((bench.random_operation, bench.random_copy)[i % 2](i)) for i in range(60)]
    await bench.execute(ours, theirs)
    assert bench.compared > 2000
    assert bench.psum_reads > 50
