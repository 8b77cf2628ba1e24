"""Cycles of the instructions of the core, by closed forms, beside AWS's published ones.

:func:`interval` says how long an engine is taken by an instruction, :func:`latency` when an idle
engine is done with it, for engines that nobody else disturbs. Both are held to the RTL by
``tests/rtl/engines/test_timing.py``. ``python -m makalu.sim.timing`` writes ``timing.md`` beside
this file; a test fails when it is stale.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..rtl.arch import formats
from ..rtl.arch.config import TRN
from ..rtl.arch.isa import (
    EIGHT,
    AccessPattern,
    Activation,
    AffineSelect,
    AluOp,
    Compare,
    CopyPredicated,
    Engine,
    FindIndex8,
    Function,
    Iota,
    LoadStationary,
    MatchReplace8,
    MatmulMoving,
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
)

__all__ = ["PAGE", "elements", "interval", "latency", "page"]

PAGE = Path(__file__).with_name("timing.md")

WORD_BYTES = 16
BANKS = 2
SCAN_CYCLES = 8
"""From an element of a scan to the next one."""
PSUM_ADD_CYCLES = 6
"""Least interval of matmuls: latency of the adder at PSUM."""
WEIGHTS_PER_CYCLE = 4
MIN_II = 64
"""AWS's least issue interval [ISA226]."""


@dataclass(frozen=True)
class _Engine:
    """What is constant for an engine whose lanes take an element per cycle.

    ``first``: from the cycle in which an idle engine takes an instruction to the first read;
    ``first_psum``: the same with a source in PSUM; ``through``: from a read to its write;
    ``scalar_ports``: ports on which scalars are read.
    """

    first: int
    first_psum: int
    through: int
    scalar_ports: int


_ENGINES = {
    Engine.DVE: _Engine(first=2, first_psum=4, through=17, scalar_ports=2),
    Engine.POOL: _Engine(first=2, first_psum=4, through=17, scalar_ports=2),
    Engine.ACT: _Engine(first=3, first_psum=4, through=47, scalar_ports=1),
}


def _operands(instruction):
    return [(operand, instruction.values[name]) for name, operand, _ in instruction.operands]


def _sources(instruction):
    return [ap for operand, ap in _operands(instruction) if not operand.writes]


def _is_empty(instruction):
    return any(not (ap.elements and ap.num_partitions) for _, ap in _operands(instruction))


def _new_words(ap):
    """Word of each element, and whether it is another one than that of the element before."""
    words = ap.element_offsets() // WORD_BYTES
    new = np.ones(len(words), bool)
    new[1:] = words[1:] != words[:-1]
    return words, new


def _reads(instruction):
    """Cycles in which elements are read, refusals by the other source's bank included."""
    sources = _sources(instruction)
    if isinstance(instruction, Max8 | FindIndex8 | MatchReplace8):
        # The values, the elements, the results: never two sources at once.
        eights = {Max8: 1, FindIndex8: 2, MatchReplace8: 1}[type(instruction)]
        return sources[0].elements + EIGHT * eights
    count = sources[0].elements if sources else instruction.values["dst"].elements
    if isinstance(instruction, TensorTensorScan):
        # A refused read has time in which nothing else is read, but delays its element.
        count = SCAN_CYCLES * (count - 1) + 1
    in_sbuf = [_new_words(ap) for ap in sources if ap.space == Space.SBUF]
    if len(in_sbuf) < 2:
        return count
    (first, new0), (second, new1) = in_sbuf
    return count + int((new0 & new1 & (first % BANKS == second % BANKS)).sum())


def _scalars(instruction, ports):
    """Cycles for scalars in SBUF: one for each port, two in one bank one by one."""
    found = [
        instruction.values[name]
        for name, item, _ in instruction.scalars
        if item.pointer and instruction.values[item.pointer]
    ]
    banks = {at // WORD_BYTES % BANKS for at in found}
    return len(found) if ports == 1 or len(banks) < len(found) else min(len(found), 1)


def elements(instruction):
    """Cycles from the first read of an instruction of DVE, ACT or POOL to the last, both counted.

    Parameters
    ----------
    instruction : :class:`~..rtl.arch.isa.Instruction`

    Returns
    -------
    :class:`int`, cycles
        At least 1: an instruction without elements takes a cycle to say so.
    """
    if _is_empty(instruction):
        return 1
    ports = _ENGINES[instruction.engine].scalar_ports
    return _scalars(instruction, ports) + _reads(instruction)


def _from_psum(instruction):
    return not _is_empty(instruction) and any(
        ap.space == Space.PSUM for ap in _sources(instruction)
    )


def interval(instruction, config):
    """Cycles from one such instruction to the next of its kind, in a stream of them.

    Parameters
    ----------
    instruction : :class:`~..rtl.arch.isa.Instruction`
        Of PE, DVE, ACT or POOL. Weights are contiguous and begin at a multiple of four elements;
        a function has the table of the one before.
    config : :class:`~..rtl.arch.config.CoreConfig`

    Returns
    -------
    :class:`int`, cycles

    Raises
    ------
    :exc:`TypeError`
        For an instruction that no engine's lanes or array execute.
    """
    del config
    if isinstance(instruction, MatmulMoving):
        return max(instruction.values["src"].elements, PSUM_ADD_CYCLES)
    if isinstance(instruction, LoadStationary):
        return -(-instruction.values["src"].elements // WEIGHTS_PER_CYCLE)
    if instruction.engine not in _ENGINES:
        raise TypeError(f"{instruction.mnemonic} on {instruction.engine.name} has no interval")
    engine = _ENGINES[instruction.engine]
    least = engine.first_psum if _from_psum(instruction) else engine.first
    return max(elements(instruction), least)


def latency(instruction):
    """Cycles from an idle engine's taking an instruction to its offering the update.

    Parameters
    ----------
    instruction : :class:`~..rtl.arch.isa.Instruction`
        Of DVE, ACT or POOL; a function whose table is in the lanes.

    Returns
    -------
    :class:`int`, cycles

    Raises
    ------
    :exc:`TypeError`
        For an instruction of another engine.
    """
    if instruction.engine not in _ENGINES:
        raise TypeError(f"{instruction.mnemonic} on {instruction.engine.name} has no lanes")
    engine = _ENGINES[instruction.engine]
    first = engine.first_psum if _from_psum(instruction) else engine.first
    return first + elements(instruction) + engine.through


# The page -----------------------------------------------------------------------------------------


def _row(fmt, offset, count, space=Space.SBUF):
    return AccessPattern(fmt, 0, TRN.partitions, offset, ((1, count),), space)


def _cases(n):
    """Rows of the page: what, our instruction, AWS's cycles, why ours is slower where it is."""
    f, b = formats.FP32, formats.BF16
    dst, x, y = _row(f, 0, n), _row(f, 4 * n, n), _row(f, 8 * n + WORD_BYTES, n)
    one = _row(f, 0, 1)
    b_dst, b_x, b_y = _row(b, 0, n), _row(b, 4 * n, n), _row(b, 8 * n + WORD_BYTES, n)
    psum = _row(f, 0, n, Space.PSUM)
    add, multiply = int(AluOp.ADD), int(AluOp.MULTIPLY)
    at_least = max(MIN_II, n)
    lanes = "one element per lane and cycle, whatever its format"
    yield "nc_matmul, BF16", MatmulMoving(dst=psum, src=b_x), max(min(64, 128), n), ""
    stationary = _row(b, 0, 128)
    yield "LoadStationary, 128 columns", LoadStationary(src=stationary), 128 // 4, ""
    yield "activation", Activation(dst=dst, src=x, function=int(Function.EXP)), at_least, ""
    yield (
        "reciprocal (DVE there, ACT here)",
        Activation(dst=dst, src=x, function=int(Function.RECIPROCAL)),
        max(MIN_II, 8 * n),
        "",
    )
    yield "tensor_copy", TensorCopy(dst=dst, src=x), at_least, ""
    yield "tensor_copy, from PSUM", TensorCopy(dst=dst, src=psum), at_least, ""
    yield (
        "tensor_copy_predicated",
        CopyPredicated(dst=dst, src=x, predicate=_row(formats.UINT32, 8 * n + WORD_BYTES, n)),
        max(MIN_II, 2 * n),
        "",
    )
    yield "memset, FP32", Memset(dst=dst), at_least, ""
    yield "memset of zero, BF16", Memset(dst=b_dst), max(MIN_II, n // 2), lanes
    yield (
        "tensor_tensor, FP32",
        TensorTensor(dst=dst, src0=x, src1=y, op=add),
        max(MIN_II, 2 * n),
        "",
    )
    yield (
        "tensor_tensor, FP32, both sources in a bank",
        TensorTensor(dst=dst, src0=x, src1=_row(f, 8 * n, n), op=add),
        max(MIN_II, 2 * n),
        "",
    )
    yield "tensor_tensor, BF16", TensorTensor(dst=b_dst, src0=b_x, src1=b_y, op=add), at_least, ""
    yield "tensor_scalar", TensorScalar(dst=dst, src=x, op0=multiply, op1=add), at_least, ""
    yield (
        "scalar_tensor_tensor, FP32",
        ScalarTensorTensor(dst=dst, src0=x, src1=y, op0=multiply, op1=add),
        max(MIN_II, 2 * n),
        "",
    )
    yield (
        "scalar_tensor_tensor, BF16",
        ScalarTensorTensor(dst=b_dst, src0=b_x, src1=b_y, op0=multiply, op1=int(AluOp.SUBTRACT)),
        at_least,
        "",
    )
    yield "tensor_reduce, FP32", TensorReduce(dst=one, src=x, op=int(ReduceOp.ADD)), at_least, ""
    yield (
        "tensor_reduce, BF16, add",
        TensorReduce(dst=_row(b, 0, 1), src=b_x, op=int(ReduceOp.ADD)),
        max(MIN_II, n // 2),
        lanes,
    )
    yield (
        "tensor_tensor_scan",
        TensorTensorScan(dst=dst, src0=x, src1=y, op0=multiply, op1=add),
        max(MIN_II, 2 * n),
        ("an element waits for both operations of the one before, each of four stages and rounded"),
    )
    held = "eight numbers are read before, or written after, the elements"
    vals = _row(f, 8 * n + WORD_BYTES, 8)
    yield "max8", Max8(dst=_row(f, 0, 8), src=x), at_least, held
    indices = _row(formats.UINT32, 0, 8)
    yield "nc_find_index8", FindIndex8(dst=indices, src=x, vals=vals), at_least, held
    yield "nc_match_replace8", MatchReplace8(dst=dst, src=x, vals=vals), at_least, held
    yield "iota", Iota(dst=dst), 150 + n, ""
    yield "affine_select", AffineSelect(dst=dst, src=x, compare=int(Compare.EQUAL)), 150 + n, ""


def page(sizes=(64, 512)):
    """The page that ``timing.md`` holds."""
    lines = [
        "# Cycles of instructions beside AWS's",
        "",
        "Written by `python -m makalu.sim.timing` from `sim/timing.py`, whose closed forms",
        "`tests/rtl/engines/test_timing.py` holds to the RTL. Issue intervals in cycles of the",
        "executing engine, for `N` elements per partition in contiguous rows; AWS's are the",
        f"formulas of its documents for NKI 2.26, with a least interval of {MIN_II}.",
        "",
        "| instruction | "
        + " | ".join(f"N = {n}: here | AWS" for n in sizes)
        + " | where it is slower here |",
        "|" + " --- |" * (2 + 2 * len(sizes)),
    ]
    for rows in zip(*map(_cases, sizes), strict=True):
        what, _, _, why = rows[0]
        cells = [f"{interval(i, TRN):,} | {theirs:,}" for _, i, theirs, _ in rows]
        slower = any(interval(i, TRN) > theirs for _, i, theirs, _ in rows)
        if slower != bool(why):
            raise AssertionError(f"{what}: slower is {slower}, but the reason is {why!r}")
        lines.append(f"| {what} | {' | '.join(cells)} | {why} |")
    lines += [
        "",
        "Composed here, so that each part counts: `activation_reduce` (activation, then a",
        "reduction on DVE, which runs beside the next activation), `tensor_scalar_reduce` (two",
        "instructions of DVE, 2 N instead of N + 64: there are no accumulators), `nc_transpose` (a",
        "matmul with the identity matrix, as many cycles as partitions), FP32 matmuls (four",
        "passes, as there), `bn_stats` (13 instructions of DVE, 3 N instead of N: the squares",
        "are of differences from the mean, which is known when the row has been read),",
        "`tensor_partition_reduce` and `nc_stream_shuffle` (DMA moves elements from partition to",
        "partition), `dropout` (random numbers on POOL, then two instructions of DVE, on the same",
        "ports of SBUF: 3 N instead of N). `rng`, of which AWS publishes no cycles, has N.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
