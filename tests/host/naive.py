"""Programs assembled by hand, one step after the other: what the driver's tests run.

Independent of the compiler, with the interface of its ``Program``.
"""

from dataclasses import dataclass

from makalu.firmware.program import ProgramError
from makalu.rtl.arch import formats
from makalu.rtl.arch.isa import (
    AccessPattern,
    Descriptor,
    DescriptorSide,
    DmaStart,
    Engine,
    Half,
    LoadStationary,
    MatmulMoving,
    Space,
    TensorCopy,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)


@dataclass
class Spec:
    name: str
    shape: tuple
    dtype: object
    kind: str


class NaiveProgram:
    """Steps that run strictly one after the other; each waits for semaphore 0 and adds to it."""

    def __init__(self, config, tensors, name="naive", stats=None):
        self.config, self.kernel = config, name
        self.fingerprint = config.fingerprint
        self.tensors = tensors
        self.stats = stats or {}
        self.inputs = tuple(t.name for t in tensors if t.kind == "input")
        self.outputs = tuple(t.name for t in tensors if t.kind == "output")
        self.steps = []  # functions of (tensor addresses, table allocator) to an instruction

    def add(self, step):
        self.steps.append(step)

    def dma(self, size_log2, src, dst):
        """A copy; ``src`` and ``dst`` are functions of the tensor addresses to a side."""
        self.add((size_log2, src, dst))

    def link(self, base, addresses):
        queues = {}
        tables = []
        count = len(self.steps)
        table = base + 128 * count
        for i, step in enumerate(self.steps):
            if isinstance(step, tuple):
                size_log2, src, dst = step
                tables.append(Descriptor(size_log2, src(addresses), dst(addresses)).encode())
                step = DmaStart(
                    table=table + 128 * (len(tables) - 1), first=0, engines_used=1, queue=0, count=1
                )
            step = step.replace(
                waits=[Wait(0, WaitMode.GE, i)], update=Update(0, UpdateMode.ADD, 1)
            )
            queues.setdefault(step.engine, []).append(step.encode())
        image, starts = b"", {}
        for engine, words in queues.items():
            starts[Engine(engine)] = (base + len(image), len(words))
            image += b"".join(words)
        return image + b"".join(tables), starts

    def where(self, engine, row):
        return f"naive.py:{100 + row}"

    def check_config(self, config):
        if config.fingerprint != self.fingerprint:
            raise ProgramError("another machine")

    @property
    def image_bytes(self):
        return len(self.link(0, {t.name: 0 for t in self.tensors})[0])


def copy_program(config, n, fmt=formats.FP32, out=None):
    """``y = x`` through SBUF, perhaps in another format; one partition."""
    out = out or fmt
    program = NaiveProgram(
        config, [Spec("x", (n,), fmt, "input"), Spec("y", (n,), out, "output")], "copy"
    )
    size, wide = fmt.bytes, out.bytes
    at = config.sbuf_address(0, 0)
    program.dma(
        size.bit_length() - 1,
        lambda t: DescriptorSide(t["x"], ((size, n),)),
        lambda t: DescriptorSide(at, ((size, n),)),
    )
    program.add(
        TensorCopy(
            dst=AccessPattern(out, 0, 1, 512, ((1, n),)), src=AccessPattern(fmt, 0, 1, 0, ((1, n),))
        )
    )
    program.dma(
        wide.bit_length() - 1,
        lambda t: DescriptorSide(at + 512, ((wide, n),)),
        lambda t: DescriptorSide(t["y"], ((wide, n),)),
    )
    return program


def matmul_program(config, a_shape, b_shape, fmts, out):
    """``c = a @ b``, tile by tile, in the order of the design's formula; formats of a and b."""
    (m_all, k_all), n_all = a_shape, b_shape[1]
    program = NaiveProgram(
        config,
        [
            Spec("a", tuple(a_shape), fmts[0], "input"),
            Spec("b", tuple(b_shape), fmts[1], "input"),
            Spec("c", (m_all, n_all), out, "output"),
        ],
        "matmul",
        {"macs": m_all * k_all * n_all},
    )
    a_size, b_size = (fmt.bytes for fmt in fmts)
    wide, rows = out.bytes, config.rows
    limit = config.psum_bank_words
    moving_at = -(-rows * 4 // 64) * 64
    out_at = moving_at + limit * 4
    stride, at = config.sbuf_partition_stride, config.sbuf_address(0, 0)
    whole = ((Half.WHOLE, Half.WHOLE),)
    halves = ((2, 2), (2, 1), (1, 2), (1, 1))
    passes = halves if fmts[0] is fmts[1] is formats.FP32 else whole
    for m0 in range(0, m_all, rows):
        for n0 in range(0, n_all, limit):
            m, n = min(rows, m_all - m0), min(limit, n_all - n0)
            dst = AccessPattern(formats.FP32, 0, m, 0, ((1, n),), Space.PSUM)
            first = True
            for k0 in range(0, k_all, rows):
                k = min(rows, k_all - k0)
                from_a, from_b = (m0 * k_all + k0) * a_size, (k0 * n_all + n0) * b_size
                program.dma(
                    a_size.bit_length() - 1,
                    lambda t, f=from_a, k=k, m=m: DescriptorSide(
                        t["a"] + f, ((a_size, k), (k_all * a_size, m))
                    ),
                    lambda t, k=k, m=m: DescriptorSide(at, ((stride, k), (a_size, m))),
                )
                program.dma(
                    b_size.bit_length() - 1,
                    lambda t, f=from_b, k=k, n=n: DescriptorSide(
                        t["b"] + f, ((b_size, n), (n_all * b_size, k))
                    ),
                    lambda t, k=k, n=n: DescriptorSide(at + moving_at, ((b_size, n), (stride, k))),
                )
                for left, right in passes:
                    program.add(
                        LoadStationary(src=AccessPattern(fmts[0], 0, k, 0, ((1, m),)), half=left)
                    )
                    program.add(
                        MatmulMoving(
                            dst=dst,
                            src=AccessPattern(fmts[1], 0, k, moving_at, ((1, n),)),
                            half=right,
                            accumulate=not first,
                        )
                    )
                    first = False
            program.add(TensorCopy(dst=AccessPattern(out, 0, m, out_at, ((1, n),)), src=dst))
            program.dma(
                wide.bit_length() - 1,
                lambda t, m=m, n=n: DescriptorSide(at + out_at, ((wide, n), (stride, m))),
                lambda t, f=(m0 * n_all + n0) * wide, m=m, n=n: DescriptorSide(
                    t["c"] + f, ((wide, n), (n_all * wide, m))
                ),
            )
    return program
