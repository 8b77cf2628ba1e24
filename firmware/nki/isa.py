"""``nki.isa``: what a kernel asks of the engines. Destination first, as in NKI 0.6.

Every function checks its operands against the machine that is being traced for, and records one
operation. Errors name the tensors, the limit and the kernel's line.
"""

import enum

from ...rtl.arch import formats as _formats
from . import trace as _trace
from .tensor import NkiTensor
from .written import Written

__all__ = [
    "dma_copy", "engine", "get_nc_version", "gpsimd_engine", "matmul_perf_mode", "memset",
    "nc_matmul", "nc_version", "scalar_engine", "tensor_copy", "tensor_engine", "unknown_engine",
    "vector_engine",
]  # fmt: skip


class engine(enum.Enum):
    """Engines by the names of ``nki.isa``."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


unknown_engine, tensor_engine, vector_engine = engine.unknown, engine.tensor, engine.vector
scalar_engine, gpsimd_engine = engine.scalar, engine.gpsimd


class matmul_perf_mode(enum.Enum):
    """Modes of :func:`nc_matmul`."""

    none = "none"
    double_row = "double_row"


class nc_version(enum.IntEnum):
    """Generations of the machine."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


def get_nc_version():
    """The generation whose rules this machine keeps."""
    return nc_version.gen2


_FOUR_BYTE = (_formats.FP32, _formats.TF32)


def _tensor(trace, what, value):
    if not isinstance(value, NkiTensor):
        raise trace.error(f"{what} must be a tensor, not {value!r}")
    return value


def _access(trace, what, view, buffers):
    """Check an engine operand and return its access pattern."""
    if not isinstance(view, NkiTensor):
        raise trace.error(f"{what} must be a tensor, not {view!r}")
    if view.storage.buffer not in buffers:
        hint = {
            "hbm": "load it into SBUF with nisa.dma_copy first",
            "psum": "copy it to SBUF with nisa.tensor_copy first",
            "sbuf": "allocate it with buffer=nl.psum",
        }[view.storage.buffer]
        if view.storage.buffer == "psum" and what.endswith("dst"):
            hint = "allocate it with buffer=nl.sbuf"
            if what == "memset dst":
                hint = "nl.zeros(..., buffer=nl.psum) makes a tile of zeros"
        raise trace.error(f"{what} = {view} must be in {' or '.join(buffers)}; {hint}")
    found = view._access
    if found is None:
        try:
            found = view.access()
        except ValueError as error:
            raise trace.error(f"{what}: {error}") from None
        start, count, total = found.start, found.count, trace.config.partitions
        step = total if 2 * count > total else total // 2 if 4 * count > total else total // 4
        if start % step:
            view._access = None
            raise trace.error(
                f"{what} = {view}: {count} partitions may start at "
                f"{', '.join(str(i) for i in range(0, total, step))}, not at {start}"
            )
    return found


_SBUF, _PSUM, _CHIP = ("sbuf",), ("psum",), ("sbuf", "psum")


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=matmul_perf_mode.none,
    name=None,
):
    """``dst (+)= stationary.T @ moving`` on the tensor engine.

    Parameters
    ----------
    dst : PSUM tile ``[M, N]`` float32, within one bank, from partition 0
    stationary : SBUF tile ``[K, M]``
        K at most ``nl.tile_size.pmax``, M at most ``nl.tile_size.gemm_stationary_fmax``.
    moving : SBUF tile ``[K, N]``
        N at most ``nl.tile_size.gemm_moving_fmax``.
    accumulate : :class:`bool` or ``None``
        ``None`` overwrites where no matmul has written dst, and accumulates where one has. A dst
        that was written in part is refused, unless :func:`~.language.nl.zeros` made it: then the
        rest counts from zero.

    The onezero hints are accepted; results do not depend on them.
    """
    del is_stationary_onezero, is_moving_onezero, name
    trace = _trace.current()
    if is_transpose or tile_position or tile_size or perf_mode is not matmul_perf_mode.none:
        raise trace.error(
            "nc_matmul: is_transpose, tile_position, tile_size and perf_mode are not available here"
        )
    d = _access(trace, "nc_matmul dst", dst, _PSUM)
    s = _access(trace, "nc_matmul stationary", stationary, _SBUF)
    m = _access(trace, "nc_matmul moving", moving, _SBUF)
    config = trace.config
    if s.count != m.count or s.start != m.start:
        raise trace.error(
            f"nc_matmul: stationary {stationary} and moving {moving} must lie on the same "
            f"partitions (K), not {s.start}:{s.start + s.count} and {m.start}:{m.start + m.count}"
        )
    if s.elements > config.cols:
        raise trace.error(
            f"nc_matmul: stationary {stationary} has {s.elements} columns, but the array of "
            f"{config.name} has {config.cols} (nl.tile_size.gemm_stationary_fmax)"
        )
    if m.elements > config.psum_bank_words:
        raise trace.error(
            f"nc_matmul: moving {moving} has {m.elements} columns, but at most "
            f"{config.psum_bank_words} fit a PSUM bank of {config.name} "
            "(nl.tile_size.gemm_moving_fmax)"
        )
    if d.count != s.elements or d.elements != m.elements:
        raise trace.error(
            f"nc_matmul: dst {dst} must have shape [M, N] = [{s.elements}, {m.elements}] for "
            f"stationary {stationary} and moving {moving}"
        )
    if d.start:
        raise trace.error(f"nc_matmul: dst {dst} must start at partition 0, not {d.start}")
    if d.dtype is not _formats.FP32:
        raise trace.error(f"nc_matmul: dst {dst} must be float32")
    for what, a in (("stationary", s), ("moving", m)):
        if not a.dtype.is_float:
            raise trace.error(f"nc_matmul: {what} {a.storage} must be a floating-point format")
    if (s.dtype in _FOUR_BYTE) != (m.dtype in _FOUR_BYTE):
        raise trace.error(
            f"nc_matmul: float32 and tf32 multiply only with each other, not stationary "
            f"{stationary} with moving {moving}; convert one with nisa.tensor_copy"
        )
    region, storage = (d.count, d.offset, d.dims), d.storage
    if storage.written is None:
        storage.written = Written(storage)
    if region in storage.written.regions:
        accumulate = accumulate is None or bool(accumulate)
    else:
        accumulate = _first_matmul(trace, dst, d, accumulate)
        storage.written.regions.add(region)
    trace.ops.append(_trace.Op(_trace.MATMUL, d, s, m, accumulate, trace.location()))


def _first_matmul(trace, dst, access, accumulate):
    """Whether the first matmul to exactly this region adds to it; its elements are written then."""
    _writable(trace, "nc_matmul", dst)
    storage = dst.storage
    cells = storage.written.cells(access)
    if not cells.any():
        if accumulate and not storage.zeros:
            raise trace.error(
                f"nc_matmul: accumulate=True, but no matmul has written dst {dst} before; "
                "use accumulate=None, or allocate it with nl.zeros"
            )
        accumulate = False
    elif cells.all() or storage.zeros:
        accumulate = accumulate is None or bool(accumulate)
    elif accumulate is None or accumulate:
        raise trace.error(
            f"nc_matmul: part of dst {dst} was written by an earlier matmul and part was not "
            f"({storage.written.missing(access)}), so there is no sum to add to; say "
            "accumulate=False to overwrite all of it, or allocate it with nl.zeros"
        )
    cells[...] = True
    return bool(accumulate)


def _same_shape(trace, what, dst, src):
    if dst.shape != src.shape:
        raise trace.error(f"{what}: dst {dst} and src {src} must have the same shape")


def _writable(trace, what, dst):
    for n, step in zip(dst.shape, dst.steps, strict=True):
        if n > 1 and step == 0:
            raise trace.error(f"{what}: dst {dst} is a broadcast view; it can only be read")


def tensor_copy(dst, src, engine=engine.unknown, name=None, *, saturate=False):
    """Copy a tile on chip and convert its number format, on the vector engine.

    Equal formats copy bits; others go through float32 and round to nearest even. ``saturate`` (an
    extension of this core) clamps floating-point overflow to the largest finite value.
    """
    del name
    trace = _trace.current()
    _check_engine(trace, "tensor_copy", engine)
    d = _access(trace, "tensor_copy dst", dst, _SBUF)
    s = _access(trace, "tensor_copy src", src, _CHIP)
    _writable(trace, "tensor_copy", dst)
    if d.count != s.count or d.elements != s.elements:
        raise trace.error(
            f"tensor_copy: dst {dst} and src {src} must have the same partitions and elements"
        )
    trace.ops.append(_trace.Op(_trace.COPY, d, s, None, bool(saturate), trace.location()))


def memset(dst, value, engine=engine.unknown, name=None):
    """Fill an SBUF tile with a number, on the vector engine."""
    del name
    trace = _trace.current()
    _check_engine(trace, "memset", engine)
    d = _access(trace, "memset dst", dst, _SBUF)
    _writable(trace, "memset", dst)
    code = d.dtype.encode(value)
    bits = int.from_bytes(code.tobytes(), "little")
    trace.ops.append(_trace.Op(_trace.MEMSET, d, None, None, bits, trace.location()))


def _check_engine(trace, what, wanted):
    if wanted not in (engine.unknown, engine.vector, None):
        raise trace.error(f"{what}: runs on engine.vector here, not on {wanted}")


def dma_copy(
    dst,
    src,
    oob_mode=None,
    dge_mode=None,
    engine=engine.unknown,
    name=None,
):
    """Copy between HBM and SBUF (any two of them) with the DMA engines.

    dst and src have the same shape; either may be any view, so that
    ``dma_copy(tile, matrix.permute(1, 0))`` transposes on the way. The DMA engines of this core
    move bytes: where the number formats differ, the vector engine converts, through a tile of its
    own in SBUF.
    """
    del oob_mode, dge_mode, engine, name
    trace = _trace.current()
    for what, view in (("dst", dst), ("src", src)):
        if _tensor(trace, f"dma_copy {what}", view).buffer == "psum":
            raise trace.error(
                f"dma_copy {what} = {view}: DMA does not reach PSUM; "
                "go through SBUF with nisa.tensor_copy"
            )
    _same_shape(trace, "dma_copy", dst, src)
    _writable(trace, "dma_copy", dst)
    if dst.storage.kind == "input":
        raise trace.error(
            f"dma_copy dst = {dst} is an argument of the kernel; write to a tensor of its own, "
            "nl.ndarray(shape, dtype, buffer=nl.shared_hbm)"
        )
    after = None
    if dst.dtype is not src.dtype and {dst.dtype, src.dtype} != set(_FOUR_BYTE):
        if src.buffer == "sbuf":
            tile = _conversion_tile(trace, src, dst.dtype)
            tensor_copy(tile, src)
            src = tile
        elif dst.buffer == "sbuf":
            after, dst = dst, _conversion_tile(trace, dst, src.dtype)
        else:
            raise trace.error(
                f"dma_copy: dst {dst} and src {src} must have the same number format; "
                "convert with nisa.tensor_copy in SBUF"
            )
    trace.ops.append(_trace.Op(_trace.DMA, dst, src, None, None, trace.location()))
    if after is not None:
        tensor_copy(after, dst)


def _conversion_tile(trace, like, dtype):
    """A tile in SBUF of the shape of ``like``, which an engine can walk."""
    _access(trace, "dma_copy with conversion", like, _SBUF)
    return trace.allocate(like.shape, dtype, "sbuf", name=f"{like.name}_as_{dtype.name}")
