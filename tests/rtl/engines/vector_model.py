"""What the vector engine's instructions mean, in numpy, on the bytes of SBUF and PSUM.

For :mod:`test_vector` and for ``benches/bench_vector.py``; written apart from the golden model.
"""

import numpy as np
from makalu.rtl.arch.isa import Memset, Space


def unsigned(fmt):
    return np.dtype(f"u{fmt.bytes}")


def cast(codes, src, dst, saturate):
    """Codes of ``src`` in ``dst``, through binary32."""
    if src is dst:
        return codes
    with np.errstate(all="ignore"):
        values = src.decode(codes.view(src.dtype)).astype(np.float32)
        out = dst.encode(values.astype(np.float64), saturate=bool(saturate))
        out = np.ascontiguousarray(out).view(unsigned(dst)).copy()
    if dst.is_float:
        nan = np.isnan(values)
        quiet = dst.encode(np.array([np.nan])).view(unsigned(dst))[0]
        sign = 1 << (dst.bits - 1)
        out[nan] = np.where(
            np.signbit(values[nan]), quiet | sign, quiet & ~unsigned(dst).type(sign)
        )
    return out


def gather(memory, ap):
    """Codes ``[partitions, elements]`` that ``ap`` names."""
    rows = memory[ap.start_partition : ap.start_partition + ap.num_partitions]
    at = ap.element_offsets()[:, None] + np.arange(ap.dtype.bytes)
    return np.ascontiguousarray(rows[:, at]).view(unsigned(ap.dtype))[..., 0]


def scatter(memory, ap, codes):
    """Write in order: of elements that overlap the last one stays."""
    for i, at in enumerate(ap.element_offsets()):
        column = np.ascontiguousarray(codes[:, i, None]).view(np.uint8)
        rows = slice(ap.start_partition, ap.start_partition + ap.num_partitions)
        memory[rows, at : at + ap.dtype.bytes] = column


def execute(instruction, sbuf, psum):
    """Carry out an instruction on ``sbuf``, uint8 ``[partitions, bytes]``."""
    dst = instruction.dst
    if isinstance(instruction, Memset):
        code = instruction.value & (1 << dst.dtype.bits) - 1
        codes = np.full((dst.num_partitions, dst.elements), code, unsigned(dst.dtype))
    else:
        src = instruction.src
        memory = psum if src.space == Space.PSUM else sbuf
        codes = cast(gather(memory, src), src.dtype, dst.dtype, instruction.saturate)
    if dst.elements:
        scatter(sbuf, dst, codes)
