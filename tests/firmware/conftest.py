"""An adversarial machine for compiled programs.

:class:`Machine` executes a linked program with every engine delayed at random: reads as late and
writes as early as the rules of the hardware allow, in any order that the semaphores do not forbid.
A missing wait becomes a wrong result. Arithmetic is exact for small integers only, and knows a few
operations.
"""

import numpy as np
import pytest
from makalu.rtl.arch import formats, isa
from makalu.rtl.arch.config import SBUF_WINDOW, WINDOW_LOG2
from makalu.rtl.arch.isa import AluOp, Compare, Engine, Function, Half, UpdateMode, WaitMode
from makalu.rtl.arch.mixing import fraction, mix


class Deadlock(AssertionError):
    """Nothing can move."""


class Machine:
    """One core that reorders whatever may be reordered."""

    def __init__(self, config, seed=0, hbm_bytes=1 << 20):
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.hbm = np.full(hbm_bytes, 0xFF, np.uint8)
        self.sbuf = np.full((config.partitions, config.sbuf_bytes), 0xFF, np.uint8)
        self.psum = np.full((config.partitions, config.psum_bytes), 0xFF, np.uint8)
        self.semaphores = [0] * config.semaphores
        self.steps = 0

    # Memory ---------------------------------------------------------------------------------------

    def _memory(self, ap):
        return self.psum if ap.space == isa.Space.PSUM else self.sbuf

    def _index(self, ap):
        size = ap.dtype.bytes
        offsets = ap.element_offsets()
        assert offsets.min(initial=0) >= 0
        assert offsets.max(initial=0) + size <= self._memory(ap).shape[1], f"{ap} leaves its memory"
        rows = np.arange(ap.start_partition, ap.start_partition + ap.num_partitions)
        assert rows.max(initial=0) < self.config.partitions
        columns = (offsets[:, None] + np.arange(size)).reshape(-1)
        return rows[:, None], columns[None, :]

    def read(self, ap):
        """Raw elements ``[partitions, elements]``."""
        return self._memory(ap)[self._index(ap)].copy().view(ap.dtype.dtype)

    def write(self, ap, values):
        """Raw elements into memory."""
        self._memory(ap)[self._index(ap)] = np.ascontiguousarray(values, ap.dtype.dtype).view(
            np.uint8
        )

    def _bytes_at(self, addresses, size):
        """(memory as flat bytes, indices) of DMA element addresses."""
        window, at = addresses >> WINDOW_LOG2, addresses & (1 << WINDOW_LOG2) - 1
        lanes = np.arange(size)
        if len(addresses) and window[0] == SBUF_WINDOW:
            part, offset = (
                at // self.config.sbuf_partition_stride,
                at % self.config.sbuf_partition_stride,
            )
            assert (offset % size == 0).all()
            assert (part < self.config.partitions).all()
            assert (offset + size <= self.config.sbuf_bytes).all()
            return self.sbuf.reshape(-1), (part * self.config.sbuf_bytes + offset)[:, None] + lanes
        assert (window == 0).all()
        assert len(at) == 0 or at.max() + size <= len(self.hbm)
        return self.hbm, at[:, None] + lanes

    # Running --------------------------------------------------------------------------------------

    def run(self, program, inputs):
        """Place and run a program on arrays by name; returns outputs by name."""
        at, addresses = 256, {}
        for info in program.tensors:
            addresses[info.name] = at
            at += info.nbytes + 64 + int(self.rng.integers(0, 7))
        base = -(-at // 128) * 128
        image, entry = program.link(base, addresses)
        assert base + len(image) <= len(self.hbm), f"needs {base + len(image)} bytes of HBM"
        self.hbm[base : base + len(image)] = np.frombuffer(image, np.uint8)
        for name in program.inputs:
            info = program.tensor(name)
            raw = np.ascontiguousarray(inputs[name], info.dtype.dtype).view(np.uint8).reshape(-1)
            self.hbm[addresses[name] : addresses[name] + info.nbytes] = raw
        before = self.hbm.copy()
        self.execute(entry)
        touched = np.ones(len(self.hbm), bool)
        for info in program.tensors:
            if info.kind != "input":
                touched[addresses[info.name] : addresses[info.name] + info.nbytes] = False
        assert (self.hbm == before)[touched].all(), "wrote outside its outputs"
        out = {}
        for name in program.outputs:
            info = program.tensor(name)
            raw = self.hbm[addresses[name] : addresses[name] + info.nbytes]
            out[name] = raw.copy().view(info.dtype.dtype).reshape(info.shape)
        return out

    def execute(self, entry):
        """Run the queues; ``entry`` maps an engine to (address, count)."""
        self.queues = {}
        for engine, (address, count) in entry.items():
            words = self.hbm[address : address + 128 * count].reshape(count, 128)
            self.queues[engine] = [isa.decode(word.tobytes()) for word in words]
        self.heads = dict.fromkeys(self.queues, 0)
        self.weights = self.shadow = None
        self.loading = None
        self.pe = []  # in flight: [instruction, data or None, weights]
        # In flight: [instruction, data or None]
        self.simple = {engine: [] for engine in (Engine.DVE, Engine.ACT, Engine.POOL)}
        self.dma = {}  # (engine, queue) -> [[job, descriptor, data or None], ...]
        agents = [
            *((self._issue, q) for q in self.queues),
            (self._load_weights, None), (self._pe_read, None), (self._pe_write, None),
            *((action, e) for e in self.simple for action in (self._read, self._write)),
            *((self._dma_read, e) for e in range(self.config.dma_engines)),
            *((self._dma_write, e) for e in range(self.config.dma_engines)),
        ]  # fmt: skip
        while True:
            if self.steps % 50 == 0:  # who is slow changes now and then
                speed = np.exp(self.rng.normal(0, 2.5, len(agents)))
                # Whoever comes first by a race of exponential clocks moves.
                races = self.rng.exponential(1, (50, len(agents))) / speed
                orders = np.argsort(races, axis=1).tolist()
            for at in orders[self.steps % 50]:
                action, argument = agents[at]
                if action(argument):
                    self.steps += 1
                    break
            else:
                break
        stuck = [
            str(self.queues[q][head])
            for q, head in self.heads.items()
            if head < len(self.queues[q])
        ]
        working = self.pe, self.loading, *self.simple.values(), *self.dma.values()
        if stuck or any(working):
            raise Deadlock("\n".join(stuck))

    def _complete(self, update):
        if update.mode == UpdateMode.ADD:
            self.semaphores[update.semaphore] += update.value
        elif update.mode == UpdateMode.SET:
            self.semaphores[update.semaphore] = update.value

    def _issue(self, queue):
        head = self.heads[queue]
        if head >= len(self.queues[queue]):
            return False
        ins = self.queues[queue][head]
        for wait in ins.waits:
            seen = self.semaphores[wait.semaphore]
            if wait.mode == WaitMode.GE and seen < wait.value:
                return False
            if wait.mode == WaitMode.EQ and seen != wait.value:
                return False
        if isinstance(ins, isa.EventSemaphore):
            self._complete(ins.update)
        elif isinstance(ins, isa.LoadStationary):
            if self.loading is not None or self.shadow is not None:
                return False
            self.loading = ins
        elif isinstance(ins, isa.MatmulMoving):
            if self.loading is not None or len(self.pe) >= 3:
                return False
            if self.shadow is not None:
                self.weights, self.shadow = self.shadow, None
            self.pe.append([ins, None, self.weights])
        elif not isinstance(ins, isa.DmaStart):
            if len(self.simple[queue]) >= 2:
                return False
            self.simple[queue].append([ins, None])
        else:
            assert ins.first + ins.engines_used <= self.config.dma_engines
            assert ins.engines_used
            assert ins.table % 128 == 0
            for i in range(ins.engines_used):
                jobs = self.dma.setdefault(ins.first + i, {}).setdefault(ins.queue, [])
                if ins.count == 0:
                    self._complete(ins.update)
                for j in range(ins.count):
                    at = ins.table + (i * ins.count + j) * 128
                    descriptor = isa.Descriptor.decode(self.hbm[at : at + 128].tobytes())
                    last = ins.update if j == ins.count - 1 else isa.Update()
                    jobs.append([descriptor, last, None])
        self.heads[queue] = head + 1
        return True

    def _load_weights(self, _):
        ins = self.loading
        if ins is None:
            return False
        self.shadow = ins.src, _part(self.read(ins.src), ins.src.dtype, ins.half)
        self.loading = None
        self._complete(ins.update)
        return True

    def _pe_read(self, _):
        for entry in self.pe:
            if entry[1] is None:
                ins = entry[0]
                ap, weights = entry[2]
                assert ap.start_partition == ins.src.start_partition
                moving = _part(self.read(ins.src), ins.src.dtype, ins.half)
                assert weights.shape[1] == ins.dst.num_partitions
                entry[1] = (weights.T @ moving).astype(np.float32)
                return True
        return False

    def _pe_write(self, _):
        if not self.pe or self.pe[0][1] is None:
            return False
        ins, data, _ = self.pe.pop(0)
        self.write(ins.dst, data + self.read(ins.dst) if ins.accumulate else data)
        self._complete(ins.update)
        return True

    def _read(self, engine):
        for entry in self.simple[engine]:
            if entry[1] is None:
                ins = entry[0]
                operands = [ins.values[name] for name, item, _ in ins.operands if not item.writes]
                sources = [(ap.dtype, self.read(ap)) for ap in operands]
                fields = {name: int(ins.values[name]) for name, _, _ in ins.scalars}
                for name, item, _ in ins.scalars:
                    if item.pointer and fields[item.pointer]:
                        ap = operands[0] if operands else ins.dst
                        fields[name] = self.read(
                            isa.AccessPattern(
                                formats.FP32, ap.start_partition, ap.num_partitions, fields[name],
                                ((0, 1),),
                            )
                        )  # fmt: skip
                shape = ins.dst.num_partitions, ins.dst.elements
                entry[1] = compute(type(ins), ins.dst, shape, sources, fields)
                return True
        return False

    def _write(self, engine):
        flying = self.simple[engine]
        if not flying or flying[0][1] is None:
            return False
        ins, data = flying.pop(0)
        self.write(ins.dst, data)
        self._complete(ins.update)
        return True

    def _dma_read(self, engine):
        queues = self.dma.get(engine, {})
        names = [q for q, jobs in queues.items() if any(job[2] is None for job in jobs[:3])]
        if not names:
            return False
        job = next(j for j in queues[self.rng.choice(names)] if j[2] is None)
        size = 1 << job[0].size_log2
        memory, index = self._bytes_at(job[0].src.addresses(size), size)
        job[2] = memory[index]
        return True

    def _dma_write(self, engine):
        queues = self.dma.get(engine, {})
        names = [q for q, jobs in queues.items() if jobs and jobs[0][2] is not None]
        if not names:
            return False
        descriptor, update, data = queues[self.rng.choice(names)].pop(0)
        self.dma[engine] = {q: jobs for q, jobs in queues.items() if jobs}
        size = 1 << descriptor.size_log2
        memory, index = self._bytes_at(descriptor.dst.addresses(size), size)
        memory[index] = data
        self._complete(update)
        return True


def _part(values, fmt, half):
    exact = fmt.decode(values)
    if half == Half.WHOLE:
        return exact
    hi = (values.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32).astype(np.float64)
    return hi if half == Half.HI else exact - hi


_ALU = {
    AluOp.BYPASS: lambda a, b: a, AluOp.ADD: np.add, AluOp.SUBTRACT: np.subtract,
    AluOp.MULTIPLY: np.multiply, AluOp.MAX: np.maximum, AluOp.MIN: np.minimum,
    AluOp.BITWISE_AND: np.bitwise_and,
}  # fmt: skip
_COMPARE = {
    Compare.EQUAL: np.equal, Compare.NOT_EQUAL: np.not_equal, Compare.LESS: np.less,
    Compare.GREATER_EQUAL: np.greater_equal, Compare.GREATER: np.greater,
    Compare.LESS_EQUAL: np.less_equal,
}  # fmt: skip
_FUNCTIONS = {
    Function.COPY: lambda x: x, Function.ABS: np.abs, Function.RELU: lambda x: np.maximum(x, 0),
}  # fmt: skip


def places(dims, partitions, fields):
    """The affine function of the GpSimd engine, ``[partitions, elements]``."""

    def number(name):
        return int(np.uint32(fields[name]).view(np.int32))

    at = np.array([number("offset")])
    for i, (_, count) in enumerate(dims):
        at = (np.arange(count)[:, None] * number(f"step{i}") + at).reshape(-1)
    return np.arange(partitions)[:, None] * number("channel_multiplier") + at


def compute(cls, dst, shape, sources, fields):
    """Codes that an instruction of the vector, scalar or GpSimd engine writes.

    ``sources`` are (format, codes), ``fields`` numbers by name; where a pointer flag is set an
    array with a number for each partition.
    """
    dtype = dst.dtype
    if cls is isa.Memset:
        raw = np.frombuffer(fields["value"].to_bytes(4, "little")[: dtype.bytes], dtype.dtype)
        return np.broadcast_to(raw, shape)
    if cls is isa.TensorCopy and sources[0][0] is dtype:
        return sources[0][1]
    if cls is isa.Iota:
        return dtype.encode(places(dst.dims, shape[0], fields).astype(np.float64))
    if cls is isa.Rng:
        seed = fields["seed"]
        if isinstance(seed, np.ndarray):
            seed = seed.view(np.uint32)
        words = mix(places(dst.dims, shape[0], fields).astype(np.uint32), seed)
        return fraction(words) if dtype.is_float else words.astype(dtype.dtype)
    x, *others = (fmt.decode(codes) for fmt, codes in sources)

    def number(name):
        value = fields[name]
        if isinstance(value, np.ndarray):
            return value.astype(np.float64)
        return float(np.uint32(value).view(np.float32))

    def whole(name):
        value = fields[name]
        if isinstance(value, np.ndarray):
            return value.view(np.int32).astype(np.int64)
        return int(np.uint32(value).view(np.int32))

    def step(op, a, b, reverse):
        return _ALU[AluOp(op)](b, a) if reverse else _ALU[AluOp(op)](a, b)

    if cls is isa.TensorTensor:
        x = step(fields["op"], x, others[0], False)
    elif cls is isa.TensorScalar:
        x = step(fields["op0"], x, number("scalar0"), fields["reverse0"])
        x = step(fields["op1"], x, number("scalar1"), fields["reverse1"])
    elif cls is isa.ScalarTensorTensor:
        x = step(fields["op0"], x, number("scalar0"), fields["reverse0"])
        x = step(fields["op1"], x, others[0], fields["reverse1"])
    elif cls is isa.TensorReduce:
        rows = x.reshape(*shape, -1)
        x = _ALU[AluOp(fields["op"])].reduce(rows, axis=2)
        x = -x if fields["negate"] else x
    elif cls is isa.Activation:
        x = _FUNCTIONS[Function(fields["function"])](x * number("scale") + number("bias"))
    elif cls is isa.AffineSelect:
        holds = _COMPARE[fields["compare"]](places(dst.dims, shape[0], fields), 0)
        x = np.where(holds, x, number("value"))
    elif cls in (isa.IntegerTensorTensor, isa.IntegerTensorScalar):
        x = x.astype(np.int64)
        if cls is isa.IntegerTensorTensor:
            x = step(fields["op"], x, others[0].astype(np.int64), False)
        else:
            x = step(fields["op0"], x, whole("scalar0"), fields["reverse0"])
            x = step(fields["op1"], x, whole("scalar1"), fields["reverse1"])
        return x.astype(dtype.dtype)
    else:
        assert cls is isa.TensorCopy, cls
    with np.errstate(all="ignore"):
        return dtype.encode(x, saturate=bool(fields["saturate"]))


Machine.compute = staticmethod(compute)


@pytest.fixture
def machine():
    """The class :class:`Machine`."""
    return Machine
