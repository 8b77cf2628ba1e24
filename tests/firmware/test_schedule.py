"""Dependences and semaphores: whatever the machine reorders, results are those of the kernel text.

Random kernels run on the adversarial machine of ``conftest.py`` and, operation by operation in the
order of the kernel, on numpy.
"""

import cProfile

import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import numpy as np
import pytest
from makalu.firmware.compiler import compile_trace, schedule
from makalu.firmware.kernels.matmul import matmul
from makalu.firmware.nki.tensor import Access
from makalu.firmware.nki.trace import DMA, MATMUL
from makalu.rtl.arch import isa
from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.isa import Engine, UpdateMode, WaitMode


class Eager:
    """Operations of a trace in order, on numpy."""

    def __init__(self, machine, trace, inputs):
        self.compute = machine.compute
        self.data = {}
        for storage in trace.storages:
            if storage.buffer == "hbm":
                raw = np.full(storage.partition_bytes, 0xFF, np.uint8)
                if storage.kind == "input":
                    raw[:] = np.ascontiguousarray(inputs[storage.name]).view(np.uint8).reshape(-1)
            else:
                raw = np.full((storage.shape[0], storage.partition_bytes), 0xFF, np.uint8)
            self.data[storage.index] = raw
        for op in trace.ops:
            self.execute(op)

    def _index(self, access):
        size = access.dtype.bytes
        at = np.array([access.offset])
        for step, count in access.dims:
            at = (np.arange(count)[:, None] * step * size + at).reshape(-1)
        rows = np.arange(access.start, access.start + access.count)
        return rows[:, None], (at[:, None] + np.arange(size)).reshape(-1)

    def read(self, access):
        raw = self.data[access.storage.index][self._index(access)].copy()
        return raw.view(access.dtype.dtype)

    def write(self, access, values):
        raw = np.ascontiguousarray(values, access.dtype.dtype).view(np.uint8)
        self.data[access.storage.index][self._index(access)] = raw

    def _bytes(self, view):
        """Flat byte numbers of a view within its storage, in the order of its elements."""
        free = view.storage.partition_bytes
        at = np.zeros((1,) * view.ndim, np.int64)
        for axis, (n, step) in enumerate(zip(view.shape, view.steps, strict=True)):
            shape = [1] * view.ndim
            shape[axis] = n
            at = at + (np.arange(n) * step).reshape(shape)
        at = at.reshape(-1) + view.offset
        if view.buffer != "hbm":
            at = (at >> 40) * free + (at & (1 << 40) - 1)
        return (at[:, None] + np.arange(view.dtype.bytes)).reshape(-1)

    def execute(self, op):
        if op.kind == DMA:
            (src,) = op.sources
            source = self.data[src.storage.index].reshape(-1)
            self.data[op.dst.storage.index].reshape(-1)[self._bytes(op.dst)] = source[
                self._bytes(src)
            ]
        elif op.kind == MATMUL:
            s, m = (a.dtype.decode(self.read(a)) for a in op.sources)
            product = (s.T @ m).astype(np.float32)
            old = self.read(op.dst) if op.fields["accumulate"] else 0
            self.write(op.dst, product + old)
        else:
            sources = [(a.dtype, self.read(a)) for a in op.sources[: len(op.kind.operands) - 1]]
            fields = {name: op.fields.get(name, 0) for name, _, _ in op.kind.scalars}
            for name, value in fields.items():
                if isinstance(value, Access):
                    fields[name] = self.read(value)
            shape = op.dst.count, op.dst.elements
            self.write(op.dst, self.compute(op.kind, op.dst, shape, sources, fields))


def random_kernel(seed, config=TINY, operations=40):
    """A kernel of random loads, fills, arithmetic, matmuls and stores on parts of a few tiles."""
    rng = np.random.default_rng(seed)
    rows, bank = config.partitions, config.psum_bank_words
    width = int(rng.integers(6, 25))
    quads = [0, rows // 4, rows // 2, 3 * rows // 4]

    def span(limit):
        first = int(rng.integers(0, limit))
        return first, int(rng.integers(first + 1, limit + 1))

    def partitions():
        start = quads[int(rng.integers(4))]
        most = {0: rows, rows // 2: rows // 2}.get(start, rows // 4)
        return start, start + int(rng.integers(1, most + 1))

    @nki.jit
    def kernel(a, b):
        out = nl.ndarray((rows * 3, width), nl.float32, buffer=nl.shared_hbm)
        spare = nl.ndarray((rows, width), nl.float32, buffer=nl.hbm)
        tiles, sums = [], []

        def tile():
            fresh = nl.ndarray((rows, width), nl.float32, buffer=nl.sbuf, name="t")
            nisa.dma_copy(fresh, a[:rows])
            if len(tiles) == 3:
                tiles.pop(int(rng.integers(3)))
            tiles.append(fresh)

        def psum():
            fresh = nl.ndarray((rows, bank), nl.float32, buffer=nl.psum, name="p")
            s, m = narrow[:, :rows], narrow[:, :bank]
            nisa.nc_matmul(fresh, s, m, accumulate=False)
            if len(sums) == 3:
                sums.pop(int(rng.integers(3)))
            sums.append(fresh)

        narrow = nl.ndarray((rows, max(width, rows, bank)), nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(narrow, 1)
        nisa.dma_copy(out, a)
        nisa.dma_copy(spare, b[:rows])
        tile()
        psum()
        for _ in range(operations):
            pick = tiles[int(rng.integers(len(tiles)))]
            total = sums[int(rng.integers(len(sums)))]
            (p0, p1), (f0, f1) = partitions(), span(width)
            kind = int(rng.integers(19))
            part = pick[p0:p1, f0:f1]
            column, source = int(rng.integers(width)), tiles[int(rng.integers(len(tiles)))]
            other, scalar = source[p0:p1, f0:f1], source[p0:p1, column : column + 1]
            op = (nl.add, nl.subtract, nl.maximum)[int(rng.integers(3))]
            if kind == 0:
                tile()
            elif kind == 1:
                psum()
            elif kind == 2:
                row = int(rng.integers(0, 2 * rows))
                nisa.dma_copy(pick[p0:p1, f0:f1], (a, b)[row % 2][row : row + p1 - p0, f0:f1])
            elif kind == 3:
                row = int(rng.integers(0, 2 * rows))
                nisa.dma_copy(out[row : row + p1 - p0, f0:f1], pick[p0:p1, f0:f1])
            elif kind == 4:
                nisa.dma_copy(spare[: p1 - p0, f0:f1], pick[p0:p1, f0:f1])
            elif kind == 5:
                nisa.dma_copy(pick[p0:p1, f0:f1], spare[p0:p1, f0:f1])
            elif kind == 6:
                nisa.memset(pick[p0:p1, f0:f1], int(rng.integers(-3, 4)))
            elif kind == 7:
                nisa.tensor_copy(narrow[p0:p1, f0:f1], pick[p0:p1, f0:f1])
            elif kind == 8:
                nisa.tensor_copy(part, other)
            elif kind == 9:
                high = min(width, bank)
                nisa.tensor_copy(pick[p0:p1, :high], total[p0:p1, :high])
            elif kind == 10:
                nisa.tensor_tensor(part, part, other, op)
            elif kind == 11:
                nisa.tensor_scalar(part, part, op, scalar, bool(rng.integers(2)), nl.multiply, -1)
            elif kind == 12:
                high = min(width, bank)
                data = pick[p0:p1, :high]
                nisa.scalar_tensor_tensor(
                    data, data, nl.subtract, scalar, op, total[p0:p1, :high]
                )  # fmt: skip
            elif kind == 13:
                function = (nl.copy, nl.abs, nl.relu)[int(rng.integers(3))]
                nisa.activation(part, function, other, bias=scalar if rng.integers(2) else 1)
                if source is not pick:
                    nisa.tensor_reduce(scalar, nl.maximum, part, 1, negate=True)
            elif kind == 14:
                pattern, lead = [[int(rng.integers(-2, 3)), f1 - f0]], int(rng.integers(-4, 5))
                multiplier = int(rng.integers(-1, 2))
                if rng.integers(3):
                    chosen = (nl.greater_equal, nl.equal, nl.less)[int(rng.integers(3))]
                    nisa.affine_select(part, pattern, lead, multiplier, other, 2, chosen)
                else:
                    nisa.iota(part, pattern, lead, multiplier)
            elif kind == 15:
                # The bits of positive numbers are ordered as the numbers are.
                nisa.tensor_tensor(
                    *(view.view(nl.int32) for view in (part, part, other)),
                    (nl.maximum, nl.minimum)[int(rng.integers(2))], nisa.engine.gpsimd,
                )  # fmt: skip
            elif kind == 16:
                nisa.tensor_scalar(
                    part.view(nl.int32), other.view(nl.int32), nl.minimum, scalar.view(nl.int32),
                    op1=nl.maximum, operand1=0, engine=nisa.engine.gpsimd,
                )  # fmt: skip
            elif kind == 17:
                # Small numbers: what computes with them is exact for these only.
                if rng.integers(2):
                    nisa.set_rng_seed(source[:1, column : column + 1].view(nl.uint32))
                elif rng.integers(2):
                    nisa.set_rng_seed(int(rng.integers(100)))
                nisa.rng(part.view(nl.uint32))
                nisa.tensor_scalar(
                    part.view(nl.int32), part.view(nl.int32), nl.bitwise_and, 3,
                    engine=nisa.engine.gpsimd,
                )  # fmt: skip
                nisa.tensor_copy(part, part.view(nl.int32))
            else:
                n0, n1 = span(bank)
                m0, m1 = span(rows)
                nisa.nc_matmul(
                    total[: m1 - m0, n0:n1], narrow[p0:p1, m0:m1], narrow[p0:p1, n0:n1],
                    accumulate=bool(rng.integers(2)),
                )  # fmt: skip
        for i, source in enumerate(tiles):
            nisa.dma_copy(out[i * rows : (i + 1) * rows], source)
        return out, spare

    inputs = {
        name: rng.integers(-3, 4, (3 * rows, width)).astype(np.float32) for name in ("a", "b")
    }
    return kernel.trace(config, inputs["a"], inputs["b"]), inputs


def run(machine, trace, inputs, seed, config=TINY, program=None):
    core = machine(config, seed=seed)
    if program is None:
        program = compile_trace(trace)
    return core.run(program, inputs)


def expected(machine, trace, inputs):
    eager = Eager(machine, trace, inputs)
    return {s.name: eager.data[s.index].view(s.dtype.dtype).reshape(s.shape) for s in trace.outputs}


@pytest.mark.parametrize("seed", range(24))
def test_random_kernels_under_random_interleavings(machine, seed):
    trace, inputs = random_kernel(seed)
    want = expected(machine, trace, inputs)
    program = compile_trace(trace)
    for order in range(3):
        got = run(machine, trace, inputs, 1000 * seed + order, program=program)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"order {order}, {name}")


@pytest.mark.parametrize("seed", range(3))
def test_random_kernels_on_a_wider_machine(machine, seed):
    trace, inputs = random_kernel(100 + seed, SMALL, operations=60)
    want = expected(machine, trace, inputs)
    got = run(machine, trace, inputs, seed, SMALL)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def test_few_semaphores_suffice(machine):
    from dataclasses import replace

    config = replace(TINY, semaphores=8)
    trace, inputs = random_kernel(7, config)
    want = expected(machine, trace, inputs)
    for seed in range(4):
        got = run(machine, trace, inputs, seed, config)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)


def without_wait(program, engine, row, part):
    """The program with one wait removed."""
    from copy import copy

    changed = copy(program)
    words = {e: w.copy() for e, w in program.queues.items()}
    ins = program.instruction(engine, row)
    waits = tuple(w for i, w in enumerate(ins.waits) if i != part)
    words[engine][row] = np.frombuffer(ins.replace(waits=waits).encode(), np.uint8)
    changed.queues = words
    return changed


def test_the_machine_notices_missing_waits(machine):
    """Two in five single waits, when removed, give wrong numbers within two dozen runs."""
    trace, inputs = random_kernel(3)
    want = expected(machine, trace, inputs)
    program = compile_trace(trace)
    waits = [
        (engine, row, part)
        for engine in Engine
        for row in range(len(program.queues[engine]))
        for part in range(len(program.instruction(engine, row).waits))
    ]
    assert len(waits) > 20
    waits = waits[::2]
    noticed = 0
    for place in waits:
        broken = without_wait(program, *place)
        for seed in range(24):
            try:
                got = run(machine, trace, inputs, seed, program=broken)
            except AssertionError:
                noticed += 1
                break
            if any((got[name] != array).any() for name, array in want.items()):
                noticed += 1
                break
    assert noticed > 0.4 * len(waits), f"{noticed} of {len(waits)}"


def test_waits_look_back_only():
    """Every wait names a value that instructions before it in the kernel produce."""
    trace, _ = random_kernel(11)
    program = compile_trace(trace)
    totals = {}
    for engine in Engine:
        for row in range(len(program.queues[engine])):
            ins = program.instruction(engine, row)
            if ins.update.mode == UpdateMode.ADD:
                add = ins.update.value * getattr(ins, "engines_used", 1)
                totals[ins.update.semaphore] = totals.get(ins.update.semaphore, 0) + add
    for engine in Engine:
        for row in range(len(program.queues[engine])):
            for wait in program.instruction(engine, row).waits:
                assert wait.mode == WaitMode.GE
                assert 0 < wait.value <= totals[wait.semaphore]


def waits_of(kernel, *args, config=TINY):
    program = kernel.compile(config, *args)
    return {
        engine: [program.instruction(engine, row) for row in range(len(program.queues[engine]))]
        for engine in Engine
    }


def test_matmuls_wait_only_for_the_part_they_read():
    """K tiles of one big tile arrive one by one; each matmul waits for its own."""

    @nki.jit
    def kernel(a, b):
        out = nl.ndarray((4, 16), nl.float32, buffer=nl.shared_hbm)
        s = nl.ndarray((4, 3, 4), a.dtype, buffer=nl.sbuf)
        m = nl.ndarray((4, 3, 16), a.dtype, buffer=nl.sbuf)
        sums = nl.ndarray((4, 16), nl.float32, buffer=nl.psum)
        for k in range(3):
            nisa.dma_copy(s[:, k], a[4 * k : 4 * k + 4])
            nisa.dma_copy(m[:, k], b[4 * k : 4 * k + 4])
        for k in range(3):
            nisa.nc_matmul(sums, s[:, k], m[:, k])
        result = nl.ndarray((4, 16), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(result, sums)
        nisa.dma_copy(out, result)
        return out

    queues = waits_of(kernel, nki.TensorSpec((12, 4), "bf16"), nki.TensorSpec((12, 16), "bf16"))
    loads = [ins.update.semaphore for ins in queues[Engine.SP]]
    assert len(set(loads)) == 6
    pe = queues[Engine.PE]
    assert [[w.semaphore for w in ins.waits] for ins in pe] == [[slot] for slot in loads]
    # Nobody reads what the first matmuls wrote but the last one's reader.
    assert [ins.update.mode for ins in pe].count(UpdateMode.ADD) == 1
    assert pe[-1].update.mode == UpdateMode.ADD


def test_weights_are_loaded_once_while_they_stay():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 16), nl.float32, buffer=nl.shared_hbm)
        t = nl.ndarray((4, 32), a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(t, a)
        sums = nl.ndarray((4, 16), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(sums, t[:, :4], t[:, :16])
        nisa.nc_matmul(sums, t[:, :4], t[:, 16:])  # same weights
        nisa.nc_matmul(sums, t[:, 4:8], t[:, 16:])  # others
        nisa.nc_matmul(sums, t[:, :4], t[:, :16])  # again
        nisa.memset(t[:, :4], 1)
        nisa.nc_matmul(sums, t[:, :4], t[:, :16])  # same place, rewritten
        result = nl.ndarray((4, 16), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(result, sums)
        nisa.dma_copy(out, result)
        return out

    queues = waits_of(kernel, nki.TensorSpec((4, 32), "fp16"))
    kinds = [type(ins).__name__[0] for ins in queues[Engine.PE]]
    assert "".join(kinds) == "LMMLMLMLM"


def test_fp32_makes_four_passes_in_order():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
        t = nl.ndarray((4, 4), a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(t, a)
        sums = nl.ndarray((4, 4), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(sums, t, t)
        result = nl.ndarray((4, 4), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(result, sums)
        nisa.dma_copy(out, result)
        return out

    pe = waits_of(kernel, nki.TensorSpec((4, 4), "fp32"))[Engine.PE]
    found = [
        (type(i).__name__[0], isa.Half(i.half).name, getattr(i, "accumulate", None)) for i in pe
    ]
    assert found == [
        ("L", "LO", None), ("M", "LO", 0), ("M", "HI", 1),
        ("L", "HI", None), ("M", "LO", 1), ("M", "HI", 1),
    ]  # fmt: skip


def test_more_than_two_waits_spill_into_wait_instructions():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 8), a.dtype, buffer=nl.shared_hbm)
        parts = nl.ndarray((4, 8), a.dtype, buffer=nl.sbuf)
        for i in range(4):
            nisa.dma_copy(parts[:, 2 * i : 2 * i + 2], a[:, 2 * i : 2 * i + 2])
        copy = nl.ndarray((4, 8), a.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(copy, parts)
        nisa.dma_copy(out, copy)
        return out

    dve = waits_of(kernel, nki.TensorSpec((4, 8), "fp32"))[Engine.DVE]
    assert [type(i).__name__ for i in dve] == ["EventSemaphore", "TensorCopy"]
    assert sorted(len(i.waits) for i in dve) == [2, 2]


def test_work_of_compiling_grows_with_the_kernel_and_no_faster():
    def calls(m):
        spec = nki.TensorSpec((m, 256), "bf16"), nki.TensorSpec((256, 256), "bf16")
        trace = matmul.trace(SMALL, *spec)
        profile = cProfile.Profile()
        profile.runcall(compile_trace, trace)
        return sum(entry.callcount for entry in profile.getstats())

    short, long = calls(512), calls(2048)
    assert long < 5 * short, f"4 times the kernel took {long / short:.1f} times as many calls"


def overlapping(copy):
    @nki.jit
    def kernel():
        out = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((4, 8), nl.float32, buffer=nl.sbuf)
        nisa.memset(tile, 1)
        copy(tile)
        nisa.dma_copy(out, tile)
        return out

    return kernel


def test_overlapping_copies_are_refused():
    for copy in (nisa.tensor_copy, nisa.dma_copy):
        with pytest.raises(nki.KernelError, match=r"source and destination overlap"):
            overlapping(lambda t, copy=copy: copy(t[:, 1:4], t[:, 0:3])).compile(TINY)
        overlapping(lambda t, copy=copy: copy(t[:, 4:8], t[:, 0:4])).compile(TINY)
    overlapping(lambda t: nisa.tensor_copy(t.view(nl.int32), t)).compile(TINY)
    with pytest.raises(nki.KernelError, match=r"source and destination overlap"):
        overlapping(lambda t: nisa.tensor_copy(t.view(nl.int16)[:, ::2], t)).compile(TINY)
    overlapping(lambda t: nisa.tensor_copy(t, t)).compile(TINY)  # in place


def test_semaphores_do_not_overlap():
    for config in (TINY, SMALL):
        semaphores = schedule.Semaphores(config)
        loads = {semaphores.slot(schedule.LOAD, i) for i in range(200)}
        stores = {semaphores.slot(schedule.STORE, i) for i in range(200)}
        assert not loads & stores
        assert min(loads | stores) >= schedule.FIRST_SLOT
        assert max(loads | stores) < semaphores.count <= config.semaphores
