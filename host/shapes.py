"""Cycles by shape of the product, beside the bound and other projects: ``makalu bench shapes``.

Two measurements of each shape, BF16 operands:

- *in SBUF*: all operands lie in SBUF (:func:`~..firmware.kernels.resident.matmul_in_sbuf`); from
  the issue of the first weight load to the last byte of the result in SBUF. The issue is seen by
  reading a register again and again, so the time is never too short and at most one such access, a
  few cycles, too long. That the operands are there is checked byte by byte.
- *from HBM*: the whole program of :meth:`~.device.Device.matmul`, from the doorbell to the visible
  end, operands and result in HBM.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np

from ..firmware.kernels.matmul import matmul_reference
from ..firmware.kernels.resident import matmul_in_sbuf, resident_bytes
from ..firmware.nki import TensorSpec
from ..rtl.arch.config import named_config
from ..rtl.arch.formats import BF16, FP32
from ..rtl.arch.isa import Engine, TensorCopy
from ..rtl.arch.registers import address_of, counter_address
from .errors import DeviceError, MakaluError, UsageError
from .report import label

__all__ = [
    "PEERS", "SHAPES", "bound", "chosen_shapes", "heading", "in_sbuf", "legend", "lines_of",
    "measure", "textbook",
]  # fmt: skip

SHAPES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (2048, 2048, 2048), (128, 768, 768), (128, 3072, 768), (13, 64, 64), (100, 130, 70),
    (1, 512, 512), (128, 1, 128),
)  # fmt: skip
"""M, K, N: cubes, two of a small language model, and thin ones."""

MOST = {4: 64, 16: 512}
"""Largest edge that is measured without being asked for, by rows of the array."""

_ABOVE = 0.05
"""Share above the bound from which on a reason is given."""

_PIPELINE = 64
"""Cycles within which an element that entered the vector engine lies in SBUF, and more."""

_CHECKED = 64
"""Rows of a large product whose bits are compared with the reference."""


# Bounds -------------------------------------------------------------------------------------------


def textbook(m, k, n, rows):
    """Cycles of a square weight-stationary array whose weights are double buffered.

    One row of weights loads per cycle, M moves, and each row is a cycle behind the one above:
    ``R + (F - 1) max(M, R) + M + (R + C - 2)`` with F pairs of tiles of K and N.
    """
    folds = ceil(k / rows) * ceil(n / rows)
    return rows + (folds - 1) * max(m, rows) + m + 2 * rows - 2


def bound(m, k, n, rows):
    """The same for this array, whichever operand stays: four weights per row load in a cycle, and
    from the first column to its last sum in PSUM it takes ``2 R + R / 4 + 11`` cycles.
    """
    return min(stationary_bound(m, k, n, rows), stationary_bound(n, k, m, rows))


def stationary_bound(stays, k, moves, rows):
    """:func:`bound` where the operand with ``stays`` rows is stationary."""
    folds = ceil(k / rows) * ceil(stays / rows)
    load, fill = ceil(min(stays, rows) / 4), 2 * rows + rows // 4 + 11
    return load + (folds - 1) * max(moves, load) + moves + fill


# Peers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """What another project takes for a shape.

    Parameters
    ----------
    name, source : :class:`str`
        The source says what was measured, and how.
    cycles : dict
        Rows of the array to M, K, N to cycles.
    """

    name: str
    source: str
    cycles: dict


def _cubes(*cycles):
    return {(edge,) * 3: c for edge, c in zip((64, 128, 256, 512), cycles, strict=False) if c}


_WS_THIN = {(1, 512, 512): 6127, (128, 1, 128): 509, (100, 130, 70): 963}

PEERS = (
    Peer(
        "SCALE-Sim WS",
        "SCALE-Sim 3.0.0, weight-stationary; a model of cycles, operands on chip, no values",
        {
            128: {**_cubes(445, 509, 2551, 14303), **_WS_THIN},
            16: _cubes(1759, 11135, 77311, 571391),
        },
    ),
    Peer(
        "SCALE-Sim OS",
        "SCALE-Sim 3.0.0, output-stationary; likewise",
        {128: {**_cubes(317, 381, 2039, 12255), (128, 1, 128): 254, (1, 512, 512): 3063}},
    ),
    Peer(
        "ONNXim",
        "ONNXim, weight-stationary, FP16, one core with 1.2 TB/s of DRAM; a model, no values",
        {
            128: {
                **_cubes(659, 867, 1894, 9317), (1024, 1024, 1024): 67172,
                (128, 768, 768): 5989, (128, 1, 128): 740, (1, 512, 512): 2728,
            }
        },
    ),
    Peer(
        "STONNE",
        "STONNE, TPU, output-stationary; a model per PE that checks its values",
        {128: _cubes(None, 387, 2060), 16: _cubes(1584, 10432, 74496)},
    ),
    Peer(
        "tiny-xpu",
        "tiny-xpu, int8 RTL of the array alone, driven by us, all values right; 100x130x70 was "
        "measured as 100x70x130, as many folds",
        {
            128: {**_cubes(None, 512, 2560, 14336), (1, 512, 512): 6160, (100, 130, 70): 968},
            16: _cubes(1792, 11264, 77824, 573440),
        },
    ),
)  # fmt: skip

REDMULE = {
    (64, 64, 64): 0.873, (128, 128, 128): 0.967, (13, 64, 64): 0.514, (100, 130, 70): 0.779,
}  # fmt: skip
REDMULE_SOURCE = (
    "RedMulE RTL, 4 x 12 FP16 FMAs, operands in its memory, trigger to wake-up; utilisation, "
    "since the array is another"
)
OTHERS = "The other projects were run by this one, on shapes of the same M, K and N:"


# Measuring ----------------------------------------------------------------------------------------


def chosen_shapes(config, texts=(), largest=None):
    """M, K, N of what is asked for: a list of shapes, or all whose edges are not too long.

    Raises
    ------
    :exc:`UsageError`
        If none is left.
    """
    if texts:
        return list(texts)
    largest = MOST.get(named_config(config).rows) if largest is None else largest
    chosen = [shape for shape in SHAPES if largest is None or max(shape) <= largest]
    if not chosen:
        raise UsageError(f"no shape has all edges up to {largest}; the smallest is 13x64x64")
    return chosen


class _Watched:
    """A machine whose :meth:`run` notes when the first weights are loaded and the last result lies
    in SBUF; everything else is the machine's.

    Attributes
    ----------
    window : :class:`int`, cycles
    at_start : dict
        What the tensor engine's queue had waited before, by counter.
    late : :class:`bool`
        Whether operands were still missing then.
    """

    WAITS = ("queue_pe_wait_semaphore", "queue_pe_wait_fetch", "queue_pe_wait_engine")

    def __init__(self, machine, program):
        self.machine = machine
        copies = [
            program.instruction(Engine.DVE, row) for row in range(len(program.queues[Engine.DVE]))
        ]
        assert all(isinstance(copy, TensorCopy) for copy in copies)
        self.elements = sum(copy.dst.elements for copy in copies)
        last = copies[-1].dst
        end = last.offset + last.elements * last.dtype.bytes
        self.last = (
            last.start_partition + last.num_partitions - 1,
            slice(end - last.dtype.bytes, end),
        )
        self.operands = [
            program.instruction(Engine.PE, row).src for row in range(len(program.queues[Engine.PE]))
        ]
        self.window, self.at_start, self.late = 0, {}, False

    def __getattr__(self, name):
        return getattr(self.machine, name)

    def _low(self, name):
        return self.machine.reg_read(counter_address(name))

    def _until(self, reached):
        """Look again and again; the cycle in which the look before began."""
        before, looks = self.machine.cycles, 0
        while True:
            now = self.machine.cycles
            if reached():
                return before
            before, looks = now, looks + 1
            if looks % 64 == 0 and not self.machine.reg_read(address_of("status")) & 1:
                return None

    def run(self, max_cycles=None, progress=None):
        """Run to the end."""
        del max_cycles, progress
        machine = self.machine
        start = self._until(lambda: self._low("queue_pe_issued"))
        if start is None:
            return
        partition, place = self.last
        sbuf = machine.sbuf_read()
        patterns = {str(pattern): pattern for pattern in self.operands}
        there = {name: _bytes_of(sbuf, pattern) for name, pattern in patterns.items()}
        sbuf[partition, place] = 0xFF  # which no result is
        machine.sbuf_write(sbuf)
        self.at_start = {name: self._low(name) for name in self.WAITS}
        if self._until(lambda: self._low("dve_elements") >= self.elements) is None:
            return
        for _ in range(_PIPELINE):
            if (machine.sbuf_read()[partition, place] != 0xFF).any():
                self.window = machine.cycles - start
                break
            machine.step(1)
        machine.run()
        after = machine.sbuf_read()
        self.late = any(
            not np.array_equal(there[name], _bytes_of(after, pattern))
            for name, pattern in patterns.items()
        )


def _bytes_of(sbuf, pattern):
    """Bytes that a contiguous access pattern covers."""
    first, size = pattern.offset, pattern.elements * pattern.dtype.bytes
    begin = pattern.start_partition
    return sbuf[begin : begin + pattern.num_partitions, first : first + size].copy()


def in_sbuf(device, a, b):
    """Multiply operands that lie in SBUF, into SBUF.

    Returns
    -------
    found : dict
        ``cycles`` from the first weights to the last result, and what the array waited for; or
        ``why_not``.
    product : array or ``None``

    Raises
    ------
    :exc:`MakaluError`
        If the run was not what it should be: operands late, or the last result never seen.
    """
    (m, k), n, rows = a.shape, b.shape[1], device.config.rows
    out = None
    for fmt in (FP32, BF16):
        if resident_bytes(m, k, n, BF16, fmt, rows) <= device.config.sbuf_bytes:
            out = fmt
            break
    if out is None:
        needed = resident_bytes(m, k, n, BF16, BF16, rows)
        return {"why_not": f"needs {needed:,} of {device.config.sbuf_bytes:,} bytes of SBUF"}, None
    program = matmul_in_sbuf.compile(
        device.config, TensorSpec((m, k), BF16), TensorSpec((k, n), BF16), out
    )
    loaded, runner = device.load(program), device._runner
    watched = _Watched(runner.machine, program)
    runner.machine, progress, device.progress = watched, device.progress, None
    try:
        product = loaded.execute({"a": a, "b": b})["c"]
    finally:
        runner.machine, device.progress = watched.machine, progress
        loaded.unload()
    if not watched.window:
        raise MakaluError("the last result was not seen to arrive in SBUF")
    if watched.late:
        raise MakaluError("operands were still loading when the array began")
    counters = dict(device.last_run.counters)
    for name, before in watched.at_start.items():
        counters[name] -= before
    cycles = watched.window
    names = ("queue_pe_wait_semaphore", "queue_pe_wait_fetch", *_PE_WAITS)
    waits = {name: counters[name] for name in names if counters[name]}
    return {
        "cycles": cycles,
        "columns": counters["pe_columns"],
        "waits": waits,
        "out": out.name,
        "instructions": device.last_run.instructions,
    }, product


_PE_WAITS = ("pe_wait_weights", "pe_wait_psum", "pe_wait_interval", "pe_wait_sbuf")


def _from_hbm(device, a, b):
    product = device.matmul(a, b)
    report = device.last_run
    waits = {
        name: cycles
        for name, cycles in report.stalls.items()
        if name in ("dma_wait_read", "dma_wait_sbuf", *_PE_WAITS) or name.startswith("queue_pe")
    }
    waits.pop("queue_pe_wait_engine", None)  # it does not wait: it works
    return {
        "cycles": report.cycles,
        "columns": report.counters["pe_columns"],
        "waits": waits,
        "hbm_bytes": report.hbm_bytes_read + report.hbm_bytes_written,
        "runs": report.runs,
    }, product


def measure(device, shape, rng=None):
    """Measure one shape on an open device.

    Returns
    -------
    dict
        ``shape``, ``bound``, ``textbook``, ``macs``; ``in_sbuf`` and ``from_hbm``, each with
        ``cycles``, ``pe_utilization``, ``above`` (share above the bound), ``waits`` (cycles by
        cause) and ``reasons`` (text, where far above the bound), or with ``why_not``, or with
        ``failed`` if the core stopped; ``peers``
        (cycles by name) and ``redmule`` (utilisation or ``None``).

    Raises
    ------
    :exc:`MakaluError`
        If a product has wrong bits.
    """
    m, k, n = shape
    rng = np.random.default_rng(0) if rng is None else rng
    rows = device.config.rows
    a, b = BF16.encode(rng.standard_normal((m, k))), BF16.encode(rng.standard_normal((k, n)))
    least, macs = bound(m, k, n, rows), m * k * n
    row: dict = {
        "shape": [m, k, n], "macs": macs, "bound": least, "textbook": textbook(m, k, n, rows),
    }  # fmt: skip
    part = slice(0, _CHECKED)
    reference = matmul_reference(a[part], b, rows)
    for name, run in (("in_sbuf", in_sbuf), ("from_hbm", _from_hbm)):
        try:
            found: dict
            found, product = run(device, a, b)
        except DeviceError as error:
            device.reset()
            row[name] = {"failed": str(error).strip().partition("\n")[0].rstrip(":")}
            continue
        if product is not None:
            fmt = BF16 if found.get("out") == BF16.name else FP32
            wanted = reference if fmt is FP32 else fmt.encode(reference)
            if product[part].tobytes() != wanted.tobytes():
                raise MakaluError(f"{m} x {k} x {n}, {name}: wrong bits")
            found["pe_utilization"] = macs / (found["cycles"] * rows * rows)
            found["above"] = found["cycles"] / least - 1
            found["reasons"] = _reasons(name, found, row, rows, _bandwidth(device))
        row[name] = found
    row["peers"] = {
        peer.name: peer.cycles[rows][m, k, n]
        for peer in PEERS
        if (m, k, n) in peer.cycles.get(rows, {})
    }
    row["redmule"] = REDMULE.get((m, k, n))
    return row


def _bandwidth(device):
    """Of HBM, in bytes per cycle."""
    chosen = device.hbm.bytes_per_cycle
    return device.config.rows if chosen is None else chosen


def _reasons(name, found, row, rows, bandwidth):
    """What cost the cycles above the bound, largest first; nothing if they are few."""
    if found["above"] <= _ABOVE:
        return []
    m, k, n = row["shape"]
    cycles = found["cycles"]
    parts = []
    ours = stationary_bound(m, k, n, rows)
    if ours > (1 + _ABOVE) * row["bound"]:
        parts.append((ours - row["bound"], "a is stationary, the bound is that of b stationary"))
    for cause, waited in found["waits"].items():
        parts.append((waited, label(cause)))
    if name == "in_sbuf":
        waited = sum(c for cause, c in found["waits"].items() if cause != "pe_wait_sbuf")
        left = cycles - found["columns"] - waited
        parts.append((left, "fill, drain, copy of sums to SBUF"))
    else:
        parts.append((found["hbm_bytes"] / bandwidth, "HBM moves data"))
    parts.sort(reverse=True)
    return [f"{text} {c / cycles:.0%}" for c, text in parts if c >= 0.02 * cycles][:4]


# Text ---------------------------------------------------------------------------------------------


def heading(device):
    """What stands above the rows."""
    config, hbm = device.config, device.hbm
    peers = [peer for peer in PEERS if config.rows in peer.cycles]
    upper = f"{'':14}{'bound':>18}{'operands in SBUF':>27}{'from HBM to HBM':>28}"
    lower = (
        f"{'M x K x N':14}{'here':>9}{'textbook':>9}"
        f"{'cycles':>11}{'PE':>8}{'above':>8}{'cycles':>12}{'PE':>8}{'above':>8}"
    )
    for peer in peers:
        first, _, second = peer.name.partition(" ")
        upper += f"{first:>11}"
        lower += f"{second:>11}"
    title = (
        f"{config.name} ({config.rows} x {config.cols}) on {device.backend}, bfloat16, "
        f"HBM {_bandwidth(device)} bytes per cycle, latency {hbm.latency_cycles}"
    )
    return [
        title,
        "",
        f"{upper}{'RedMulE':>9}",
        f"{lower}{'PE':>9}",
    ]


def lines_of(row, rows):
    """One shape as text: its row, and the reasons below."""
    text = f"{'x'.join(map(str, row['shape'])):14}{row['bound']:>9,}{row['textbook']:>9,}"
    notes = []
    for name, title, width in (("in_sbuf", "in SBUF", 11), ("from_hbm", "from HBM", 12)):
        found = row[name]
        if "why_not" in found or "failed" in found:
            text += f"{'-':>{width}}{'-':>8}{'-':>8}"
            why = f"FAILED: {found['failed']}" if "failed" in found else found["why_not"]
            notes.append(f"    {title}: {why}")
            continue
        text += (
            f"{found['cycles']:>{width},}{found['pe_utilization']:>8.1%}{found['above']:>+8.1%}"
            if found["above"] < 10
            else f"{found['cycles']:>{width},}{found['pe_utilization']:>8.1%}"
            f"{found['above'] + 1:>7.0f}x"
        )
        if found.get("out") == BF16.name:
            notes.append(f"    {title}: the result is bfloat16; float32 would not fit")
        if found["reasons"]:
            notes.append(f"    {title}: {'; '.join(found['reasons'])}")
    for peer in PEERS:
        if rows in peer.cycles:
            cycles = row["peers"].get(peer.name)
            text += f"{'-' if cycles is None else format(cycles, ','):>11}"
    text += f"{'-' if row['redmule'] is None else format(row['redmule'], '.1%'):>9}"
    return [text, *notes]


def legend(rows):
    """What the columns mean and where the peers' figures come from."""
    text = f"""
PE: MACs / (cycles x processing elements). Above: cycles over the bound "here".
Bounds, with R = {rows}, weights double buffered, F pairs of tiles of the operand that stays:
  here: R / 4 + (F - 1) max(N, R / 4) + N + (2 R + R / 4 + 11), where N moves and M stays (M / 4
    where M < R); or the other way round, whichever is less
  textbook: R + (F - 1) max(M, R) + M + (2 R - 2), where M moves and N stays
In SBUF: first weight load issued to last byte of the result in SBUF.
From HBM: doorbell to visible end, fetching of instructions included.
Shares below a row are of its cycles; what they count may happen at the same time.

{OTHERS}"""
    lines = text.splitlines()
    lines += [f"{peer.name}: {peer.source}." for peer in PEERS if rows in peer.cycles]
    return [*lines, f"RedMulE: {REDMULE_SOURCE}."]


def to_dict(device_facts, rows):
    """Everything, ready for JSON."""
    return {
        **device_facts,
        "rows": rows,
        "sources": {**{peer.name: peer.source for peer in PEERS}, "RedMulE": REDMULE_SOURCE},
    }
