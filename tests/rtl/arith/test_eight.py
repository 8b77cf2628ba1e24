"""The eight numbers of a lane against lists of Python."""

import random
import struct

from makalu.rtl.arith.eight import Eight
from makalu.sim.harness import simulate

ALL_ONES = 0xFFFFFFFF
CODES = [
    0, 0x80000000, 1, 0x80000001, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
    0x7FC00000, 0xFFC00000, 0x40000000, 0x40000001, ALL_ONES,
]  # fmt: skip
NAMES = ("load", "insert", "clear", "match", "flush", "indices", "x", "value", "number", "index")


def rank(code):
    """The number's place in the order of all, as one of Python's integers."""
    (number,) = struct.unpack("<i", struct.pack("<I", code & 0x7FFFFFFF))
    return -number - 1 if code >> 31 else number


def drive(vectors):
    """What ``o`` is in the cycle after each of the vectors, dicts of inputs."""
    dut, seen = Eight(), []

    async def testbench(ctx):
        for vector in vectors:
            for name in NAMES:
                ctx.set(getattr(dut, name), vector.get(name, 0))
            await ctx.tick()
            seen.append(ctx.get(dut.o))

    simulate(dut, testbench)
    return seen


def test_the_waveform_of_the_docstring_is_true():
    lines = Eight.__doc__.split("looked for::\n\n")[1].split("\n\n")[0].rstrip()
    rows = {name: values for name, *values in map(str.split, lines.splitlines())}
    want = rows.pop("o")
    del rows["cycle"]
    cycles = range(len(want))
    vectors = [{n: int(v[t]) for n, v in rows.items() if v[t] != "."} for t in cycles]
    seen = drive(vectors)
    assert [str(seen[t - 1]) for t in cycles if want[t] != "."] == [w for w in want if w != "."]
    assert sum(w != "." for w in want) == 4


def test_random_operations(seed):
    """Searches among loaded numbers and among the greatest ones, flushed in part or whole."""
    rng = random.Random(seed)
    vectors, expected = [], []

    def put(want=None, **inputs):
        vectors.append(inputs)
        expected.append(want)

    for _ in range(400):
        codes = rng.sample(CODES, rng.randint(2, len(CODES)))
        if rng.random() < 0.5:
            numbers = rng.choices(codes, k=8)
            for value in numbers:
                put(load=1, value=value, x=rng.choice(codes))
        else:
            numbers = []
            for i in range(rng.randint(1, 14)):
                x = rng.choice(codes)
                numbers.append(x)
                put(insert=1, clear=int(i == 0), x=x, value=rng.choice(codes))
            numbers = (sorted(numbers, key=rank, reverse=True) + [ALL_ONES] * 8)[:8]
            if rng.random() < 0.5:
                for number in numbers:
                    put(number, flush=1, x=rng.choice(codes))
                continue
            # What an earlier search has found is still marked: load them again.
            for value in numbers:
                put(load=1, value=value)
        found = [None] * 8
        for _ in range(rng.randint(0, 12)):
            x, index, number = rng.choice(codes), rng.randrange(1 << 14), rng.randrange(1 << 32)
            slots = [i for i in range(8) if numbers[i] == x and found[i] is None]
            if slots:
                found[slots[0]] = index
            put(number if slots else x, match=1, x=x, index=index, number=number)
            if rng.random() < 0.2:
                put(x=rng.choice(codes), index=index)  # an empty cycle
        for i in range(rng.randint(0, 8)):
            indices = rng.randrange(2)
            where = ALL_ONES if found[i] is None else found[i]
            put(where if indices else numbers[i], flush=1, indices=indices, x=rng.choice(codes))
    for cycle, (got, want) in enumerate(zip(drive(vectors), expected, strict=True)):
        assert want is None or got == want, f"cycle {cycle}: {got:#x}, not {want:#x}"
    assert sum(want is not None for want in expected) > 1000
