"""``nki.isa``: what a kernel asks of the engines. Destination first, as in NKI 0.6.

Every function checks its operands against the machine that is being traced for, and records one
operation. Errors name the tensors, the limit and the kernel's line.
"""

import enum
import math
import numbers

import numpy as np

from ...rtl.arch import formats as _formats
from ...rtl.arch import isa as _isa
from ...rtl.arch.isa import AluOp, Function
from . import operations as _operations
from . import trace as _trace
from .tensor import Access, NkiTensor
from .written import Written

__all__ = [
    "activation", "activation_reduce", "affine_select", "bn_aggr", "bn_stats", "dma_copy",
    "dma_transpose", "dropout", "engine", "get_nc_version", "gpsimd_engine", "iota",
    "matmul_perf_mode", "max8", "memset", "nc_find_index8", "nc_match_replace8", "nc_matmul",
    "nc_stream_shuffle", "nc_transpose", "nc_version", "reciprocal", "reduce_cmd", "rng",
    "scalar_engine", "scalar_tensor_tensor", "set_rng_seed", "tensor_copy",
    "tensor_copy_predicated", "tensor_engine", "tensor_partition_reduce", "tensor_reduce",
    "tensor_scalar", "tensor_scalar_reduce", "tensor_tensor", "tensor_tensor_scan",
    "unknown_engine", "vector_engine",
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


class reduce_cmd(enum.Enum):
    """What an instruction does to the accumulators of its engine; here there are none."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


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


def _access(trace, what, view, buffers, inner=0):
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
    found = None if inner else view._access
    if found is None:
        try:
            found = view.access(inner)
        except ValueError as error:
            raise trace.error(f"{what}: {error}") from None
        problem = _misplaced(found, trace.config)
        if problem:
            view._access = None
            raise trace.error(f"{what} = {view}: {problem}")
    return found


def _misplaced(access, config):
    """What is wrong with the place of an access, if anything."""
    start, count, total = access.start, access.count, config.partitions
    step = total if 2 * count > total else total // 2 if 4 * count > total else total // 4
    if start % step:
        starts = ", ".join(str(i) for i in range(0, total, step))
        return f"{count} partitions may start at {starts}, not at {start}"
    if access.storage.buffer == "psum" and access.dtype.bytes != 4:
        return "PSUM is read as numbers of 4 bytes"
    return ""


_SBUF, _PSUM, _CHIP = ("sbuf",), ("psum",), ("sbuf", "psum")
_ADDS = {value: {"accumulate": value} for value in (False, True)}


def _record(trace, cls, dst, sources, **fields):
    """Record an instruction; fields that are accesses are scalars in SBUF, which it reads."""
    scalars = tuple(value for value in fields.values() if type(value) is Access)
    trace.ops.append(_trace.Op(cls, dst, (*sources, *scalars), fields, trace.location()))


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
    trace.ops.append(_trace.Op(_trace.MATMUL, d, (s, m), _ADDS[accumulate], trace.location()))


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


def _check_engine(trace, what, wanted, *offered):
    if wanted not in (engine.unknown, None, *offered):
        names = " or ".join(map(str, offered))
        raise trace.error(f"{what}: runs on {names} here, not on {wanted}; leave engine out")


def _destination(trace, what, dst):
    found = _access(trace, f"{what} dst", dst, _SBUF)
    _writable(trace, what, dst)
    return found


def _sources(trace, what, dst, d, **views):
    """Accesses of sources that dst must agree with, element by element."""
    found = []
    for name, view in views.items():
        s = _access(trace, f"{what} {name}", view, _CHIP)
        if d.count != s.count or d.elements != s.elements:
            raise trace.error(
                f"{what}: dst {dst} and {name} {view} must have the same partitions and elements"
            )
        found.append(s)
    if len(found) > 1 and all(s.storage.buffer == "psum" for s in found):
        raise trace.error(
            f"{what}: {' and '.join(map(str, views.values()))} are both in psum, of which an "
            "instruction reads one; copy the other to SBUF with nisa.tensor_copy first"
        )
    return found


def _operation(trace, what, op, table):
    """Code of an operation, by the ``nl`` function that names it."""
    named = op.names if isinstance(op, _operations.Operation) else None
    for code, known in table.items():
        if named is known:
            return code
    known = ", ".join(sorted(map(repr, table.values())))
    raise trace.error(f"{what}: {op!r} is not an operation of it; there are {known}")


def _check_kind(trace, what, ops, views):
    """Whether the operations are bitwise; all must be, and formats must suit them."""
    bitwise = {op in _isa.BITWISE_OPS for op in ops}
    names = ", ".join(repr(_operations.ALU[AluOp(op)]) for op in ops)
    if len(bitwise) > 1:
        raise trace.error(
            f"{what}: {names} must be all bitwise or all arithmetic; use two instructions"
        )
    if bitwise == {False}:
        return False
    if any(view.dtype.is_float for view in views) or len({v.dtype.bytes for v in views}) > 1:
        raise trace.error(
            f"{what}: {names} takes and gives bits, so {' and '.join(map(str, views))} must be "
            "integers of one width; .view(nl.uint32) gives the bits of float32"
        )
    return True


def _scalar(trace, what, value, like, bits=False, tiles=True):
    """A number's bits, or (``tiles``) the access of a tile with one number for each partition."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, NkiTensor) or not tiles:
        if not isinstance(value, numbers.Real):
            kinds = "a number or a tile [P, 1]" if tiles else "a number"
            raise trace.error(f"{what} must be {kinds}, not {value!r}")
        if not bits:
            return int(_formats.FP32.encode(value).view("uint32"))
        if not isinstance(value, numbers.Integral) or not -(1 << 31) <= int(value) < 1 << 32:
            raise trace.error(f"{what} = {value} must be an integer of 32 bits")
        return int(value) & 0xFFFFFFFF
    found = _access(trace, what, value, _SBUF)
    if found.elements != 1:
        raise trace.error(
            f"{what} = {value} must have one element for each partition, not {found.elements}"
        )
    allowed = (_formats.INT32, _formats.UINT32) if bits else (_formats.FP32,)
    if found.dtype not in allowed:
        names = " or ".join(fmt.name for fmt in allowed)
        raise trace.error(
            f"{what} = {value} must be {names}: scalars in SBUF are not converted; use "
            "nisa.tensor_copy first"
        )
    if (found.start, found.count) != (like.start, like.count):
        raise trace.error(
            f"{what} = {value} lies on partitions {found.start}:{found.start + found.count}, but "
            f"must lie on those of the data, {like.start}:{like.start + like.count}"
        )
    return found


def _scalar_fields(name, value):
    return {name: value, f"{name}_pointer": int(type(value) is Access)}


def tensor_copy(dst, src, engine=engine.unknown, name=None, *, saturate=False):
    """Copy a tile on chip and convert its number format, on the vector engine.

    Equal formats copy bits; others go through float32 and round to nearest even. ``saturate`` (an
    extension of this core) clamps floating-point overflow to the largest finite value.
    ``engine=nisa.engine.scalar`` makes it an :func:`activation` with ``nl.copy``, in which equal
    formats go through float32 too: integers beyond 24 bits round, and a NaN loses its payload.
    """
    del name
    trace = _trace.current()
    _check_engine(trace, "tensor_copy", engine, vector_engine, scalar_engine)
    if engine is scalar_engine:
        activation(dst, _operations.copy, src, saturate=saturate)
        return
    d = _destination(trace, "tensor_copy", dst)
    sources = _sources(trace, "tensor_copy", dst, d, src=src)
    _record(trace, _isa.TensorCopy, d, sources, saturate=bool(saturate))


def memset(dst, value, engine=engine.unknown, name=None):
    """Fill an SBUF tile with a number, on the vector engine."""
    del name
    trace = _trace.current()
    _check_engine(trace, "memset", engine, vector_engine)
    d = _destination(trace, "memset", dst)
    code = d.dtype.encode(value)
    _record(trace, _isa.Memset, d, (), value=int.from_bytes(code.tobytes(), "little"))


def _check_integers(trace, what, saturate, *views):
    """What an instruction of the GpSimd engine on integers asks of its tiles."""
    for view in views:
        if _tensor(trace, what, view).dtype.is_float:
            raise trace.error(
                f"{what}: the GpSimd engine computes with integers, so {view} must be one; leave "
                "engine out for the float32 arithmetic of the vector engine"
            )
        if view.buffer == "psum":
            raise trace.error(
                f"{what}: the GpSimd engine does not reach PSUM, where {view} is; copy it to SBUF "
                "with nisa.tensor_copy first"
            )
    if saturate:
        raise trace.error(f"{what}: integers of the GpSimd engine wrap around, saturate=False")


def tensor_tensor(dst, data1, data2, op, engine=engine.unknown, name=None, *, saturate=False):
    """``dst = data1 op data2``, element by element, on the vector engine.

    Arithmetic is that of float32 whatever the formats, so integers beyond 24 bits round. Bitwise
    operations take integers of one width. One of the sources may be in PSUM.

    ``engine=nisa.engine.gpsimd`` computes with integers in SBUF instead, exact modulo 2**32; the
    order of numbers, and what a right shift fills in, are those of data1's format.
    """
    del name
    trace = _trace.current()
    _check_engine(trace, "tensor_tensor", engine, vector_engine, gpsimd_engine)
    code = _operation(trace, "tensor_tensor op", op, _operations.ALU)
    if engine is gpsimd_engine:
        _check_integers(trace, "tensor_tensor", saturate, dst, data1, data2)
        d = _destination(trace, "tensor_tensor", dst)
        sources = _sources(trace, "tensor_tensor", dst, d, data1=data1, data2=data2)
        _record(trace, _isa.IntegerTensorTensor, d, sources, op=code)
        return
    d = _destination(trace, "tensor_tensor", dst)
    sources = _sources(trace, "tensor_tensor", dst, d, data1=data1, data2=data2)
    _check_kind(trace, "tensor_tensor", [code], [dst, data1, data2])
    _record(trace, _isa.TensorTensor, d, sources, op=code, saturate=bool(saturate))


def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=engine.unknown,
    name=None,
    *,
    saturate=False,
):
    """``dst = (data op0 operand0) op1 operand1``, element by element, on the vector engine.

    Parameters
    ----------
    operand0, operand1 : number or SBUF tile ``[P, 1]`` float32
        A tile has a number for each partition, and lies on the partitions of data.
    reverse0, reverse1 : :class:`bool`
        Exchange the two sides of the operation.

    Both operations are bitwise (then a scalar tile is int32 or uint32), or neither is.
    ``engine=nisa.engine.gpsimd`` computes with integers, as in :func:`tensor_tensor`; scalars are
    integers then.
    """
    del name
    trace, what = _trace.current(), "tensor_scalar"
    _check_engine(trace, what, engine, vector_engine, gpsimd_engine)
    on_integers = engine is gpsimd_engine
    if on_integers:
        _check_integers(trace, what, saturate, dst, data)
    codes = [_operation(trace, f"{what} op0", op0, _operations.ALU)]
    if op1 is not None:
        codes.append(_operation(trace, f"{what} op1", op1, _operations.ALU))
    elif operand1 is not None:
        raise trace.error(f"{what}: operand1 = {operand1} needs op1")
    d = _destination(trace, what, dst)
    (s,) = sources = _sources(trace, what, dst, d, data=data)
    bits = on_integers or _check_kind(trace, what, codes, [dst, data])
    scalar0 = _scalar(trace, f"{what} operand0", operand0, s, bits)
    scalar1 = 0 if op1 is None else _scalar(trace, f"{what} operand1", operand1, s, bits)
    cls, more = _isa.IntegerTensorScalar, {}
    if not on_integers:
        cls, more = _isa.TensorScalar, {"saturate": bool(saturate)}
    _record(
        trace, cls, d, sources, op0=codes[0],
        op1=AluOp.BYPASS if op1 is None else codes[1], reverse0=bool(reverse0),
        reverse1=op1 is not None and bool(reverse1), **more,
        **_scalar_fields("scalar0", scalar0), **_scalar_fields("scalar1", scalar1),
    )  # fmt: skip


def _int32(trace, what, value):
    if not isinstance(value, numbers.Integral) or not -(1 << 31) <= int(value) < 1 << 31:
        raise trace.error(f"{what} = {value!r} must be an integer of 32 bits with a sign")
    return int(value) & 0xFFFFFFFF


def _affine(trace, what, dst, d, pattern, offset, channel_multiplier):
    """Access of dst whose dimensions are those of a pattern too, and the fields of the function."""
    try:
        outer_first = [(step, int(count)) for step, count in pattern]
    except (TypeError, ValueError):
        raise trace.error(
            f"{what}: pattern must be a list of [step, count], outermost first, not {pattern!r}"
        ) from None
    if not 1 <= len(outer_first) <= 4:
        raise trace.error(f"{what}: pattern {pattern} must have 1 to 4 dimensions")
    elements = math.prod(count for _, count in outer_first)
    if elements != d.elements or elements < 1:
        raise trace.error(
            f"{what}: pattern {pattern} has {elements} elements, but dst {dst} has {d.elements}"
        )
    steps = [[_int32(trace, f"{what} step", step), n] for step, n in reversed(outer_first) if n > 1]
    places = [[step, n] for step, n in d.dims if n > 1]
    dims, found = [], []
    while steps:
        (step, n), (place, m) = steps[0], places[0]
        common = min(n, m)
        if n % common or m % common:
            raise trace.error(
                f"{what}: the dimensions of pattern {pattern} do not fit those of dst {dst}; "
                "use a tile of its own"
            )
        dims.append((place, common))
        found.append(step)
        for left in (steps, places):
            left[0] = [left[0][0] * common, left[0][1] // common]
            if left[0][1] == 1:
                left.pop(0)
    if len(dims) > 4:
        raise trace.error(
            f"{what}: pattern {pattern} and dst {dst} together need {len(dims)} dimensions; 4 fit"
        )
    dims = tuple(dims) or ((0, 1),)
    access = Access(d.storage, d.dtype, d.start, d.count, d.offset, dims, d.dims)
    fields = {f"step{i}": step & 0xFFFFFFFF for i, step in enumerate(found)}
    fields["offset"] = _int32(trace, f"{what} offset", offset)
    fields["channel_multiplier"] = _int32(trace, f"{what} channel_multiplier", channel_multiplier)
    return access, fields


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None, *, saturate=False):
    """Fill an SBUF tile with an affine function of the place, on the GpSimd engine.

    Element ``[w, z, y, x]`` of the ``p``-th partition becomes ``offset + channel_multiplier * p +
    step_w * w + step_z * z + step_y * y + step_x * x``, an int32, converted to dst's format.

    Parameters
    ----------
    dst : SBUF tile
    pattern : list of ``[step, count]``
        One to four, outermost first. Their counts multiply to the elements per partition of dst.
    offset, channel_multiplier : :class:`int`
    """
    del name
    trace = _trace.current()
    d = _destination(trace, "iota", dst)
    d, fields = _affine(trace, "iota", dst, d, pattern, offset, channel_multiplier)
    _record(trace, _isa.Iota, d, (), saturate=bool(saturate), **fields)


def _places(config):
    """Random numbers that a seed has for each partition: the same on machines of up to 128."""
    return (1 << 32) // max(128, config.partitions)


def rng(dst, engine=engine.unknown, name=None):
    """Fill an SBUF tile with random bits, 32 for each element, on the GpSimd engine.

    An integer takes the low bits. float32, ours, becomes a multiple of 2**-24 from 0 to below 1.
    The numbers depend on the seed (:func:`set_rng_seed`, 0 before) and on how many were made of it
    so far: the same kernel makes the same ones, on every machine that its tiles fit. An element has
    its number by its index in dst, whatever lies between its elements.

    Parameters
    ----------
    dst : SBUF tile of an integer format or float32

    Raises
    ------
    :exc:`~.tensor.KernelError`
        After 2**25 numbers of a seed for a partition.
    """
    del name
    trace = _trace.current()
    places = _places(trace.config)
    _check_engine(trace, "rng", engine, gpsimd_engine)
    d = _destination(trace, "rng", dst)
    (operand,) = (operand for _, operand, _ in _isa.Rng.operands)
    if d.dtype not in operand.formats:
        raise trace.error(
            f"rng: dst {dst} must be of an integer format, or float32 for numbers from 0 to 1, "
            "which nisa.tensor_copy converts"
        )
    if trace.drawn + d.elements > places:
        raise trace.error(
            f"rng: dst {dst} needs {d.elements} numbers for each partition, but of {places} of a "
            f"seed {trace.drawn} are taken; set another one with nisa.set_rng_seed"
        )
    seed, own = trace.seed, ()
    if isinstance(seed, NkiTensor):
        seed = _access(trace, "rng seed", seed[d.start : d.start + d.count], _SBUF)
        own = (seed,)
    steps, step = {}, 1
    for i, (_, count) in enumerate(d.dims):
        steps[f"step{i}"] = step
        step *= count
    _record(
        trace, _isa.Rng, d, (), offset=trace.drawn, channel_multiplier=places, seed=seed,
        seed_pointer=len(own), **steps,
    )  # fmt: skip
    trace.drawn += d.elements


def set_rng_seed(src_seeds, name=None):
    """Begin the random numbers of a seed. :func:`rng` continues them from then on.

    Parameters
    ----------
    src_seeds : SBUF tile ``[1, 1]`` of int32 or uint32, or :class:`int`
        A tile is read when the kernel runs: one program does for all seeds. Numbers of 32 bits are
        ours.
    """
    del name
    trace, what = _trace.current(), "set_rng_seed"
    if isinstance(src_seeds, NkiTensor):
        if src_seeds.size != 1 or src_seeds.dtype not in (_formats.INT32, _formats.UINT32):
            raise trace.error(
                f"{what}: src_seeds {src_seeds} must be a tile [1, 1] of int32 or uint32"
            )
        _access(trace, f"{what} src_seeds", src_seeds, _SBUF)
        partitions = trace.config.partitions
        seeds = trace.allocate((partitions, 1), src_seeds.dtype, "sbuf", name=f"{src_seeds.name}s")
        dma_copy(seeds, src_seeds.reshape(1, 1).broadcast_to((partitions, 1)))
        trace.seed = seeds
    else:
        trace.seed = _scalar(trace, f"{what} src_seeds", src_seeds, None, bits=True)
    trace.drawn = 0


_OF_WIDTH = {1: _formats.INT8, 2: _formats.INT16, 4: _formats.INT32}


def dropout(dst, data, prob, name=None):
    """Replace elements by zeros, each with a probability: ``dst = data`` or 0.

    Kept elements are the bits of data, and are not scaled. Three instructions here: :func:`rng`
    makes a number from 0 to 1 for each element, the vector engine compares it with prob and clears
    the bits where it is less. So 0 keeps all and 1 none, and what data holds does not matter.

    Parameters
    ----------
    dst : SBUF tile
    data : tile of the shape and format of dst
    prob : number from 0 to 1, or SBUF tile ``[P, 1]``
        The probability of a zero; a tile has one for each partition of data.
    """
    del name
    trace, what = _trace.current(), "dropout"
    d = _destination(trace, what, dst)
    (s,) = _sources(trace, what, dst, d, data=data)
    _same_shape(trace, what, dst, data)
    if d.dtype is not s.dtype:
        raise trace.error(
            f"{what}: dst {dst} and data {data} must have the same number format; convert with "
            "nisa.tensor_copy"
        )
    if isinstance(prob, NkiTensor):
        prob = _probabilities(trace, what, prob, s)
    elif not isinstance(prob, numbers.Real) or not 0 <= float(prob) <= 1:
        raise trace.error(f"{what}: prob = {prob!r} must be a number from 0 to 1, or a tile [P, 1]")
    uniform = trace.allocate(data.shape, _formats.FP32, "sbuf", name=f"{data.name}_uniform")
    rng(uniform)
    # -1, all bits, where the element stays.
    width = _OF_WIDTH[d.dtype.bytes]
    mask = uniform.view(width) if d.dtype.bytes == 4 else None
    if mask is None:
        mask = trace.allocate(data.shape, width, "sbuf", name=f"{data.name}_mask")
    tensor_scalar(
        mask, uniform, _operations.greater_equal, prob, op1=_operations.multiply, operand1=-1.0
    )
    tensor_tensor(dst.view(width), data.view(width), mask, _operations.bitwise_and)


def _probabilities(trace, what, prob, like):
    """A tile of float32 from partition 0 on, with the probabilities of the partitions of data."""
    found = _access(trace, f"{what} prob", prob, _SBUF)
    if found.elements != 1 or found.count != like.count or not found.dtype.is_float:
        raise trace.error(
            f"{what}: prob {prob} must have one number of a floating-point format for each "
            f"partition of data, [{like.count}, 1]"
        )
    if found.start == 0 and found.dtype is _formats.FP32:
        return prob
    tile = trace.allocate((like.count, 1), _formats.FP32, "sbuf", name=f"{prob.name}_as_float32")
    tensor_copy(tile, prob.reshape(like.count, 1))
    return tile


def affine_select(
    dst,
    pattern,
    offset,
    channel_multiplier,
    on_true_tile,
    on_false_value,
    cmp_op=_operations.equal,
    name=None,
    *,
    saturate=False,
):
    """Where an affine function of the place compares true with 0 a tile, else a number.

    On the GpSimd engine; the function is that of :func:`iota`.

    Parameters
    ----------
    dst, on_true_tile : SBUF tiles of one shape
    on_false_value : number
        Converted from float32.
    cmp_op : ``nl.equal``, ``nl.not_equal``, ``nl.greater_equal``, ``nl.greater``,
        ``nl.less_equal`` or ``nl.less``
    """
    del name
    trace, what = _trace.current(), "affine_select"
    table = {code: _operations.ALU[AluOp(code)] for code in _isa.Compare}
    compare = _operation(trace, f"{what} cmp_op", cmp_op, table)
    d = _destination(trace, what, dst)
    _access(trace, f"{what} on_true_tile", on_true_tile, _SBUF)
    (s,) = _sources(trace, what, dst, d, on_true_tile=on_true_tile)
    value = on_false_value
    if isinstance(value, NkiTensor):
        raise trace.error(f"{what} on_false_value = {value} must be a number")
    d, fields = _affine(trace, what, dst, d, pattern, offset, channel_multiplier)
    _record(
        trace, _isa.AffineSelect, d, (s,), compare=compare,
        value=_scalar(trace, f"{what} on_false_value", value, s), saturate=bool(saturate), **fields,
    )  # fmt: skip


def scalar_tensor_tensor(
    dst,
    data,
    op0,
    operand0,
    op1,
    operand1,
    reverse0=False,
    reverse1=False,
    name=None,
    *,
    saturate=False,
):
    """``dst = (data op0 operand0) op1 operand1``, on the vector engine.

    operand0 is a number or a tile ``[P, 1]`` as in :func:`tensor_scalar`, operand1 a tile like
    data. One of data and operand1 may be in PSUM.
    """
    del name
    trace, what = _trace.current(), "scalar_tensor_tensor"
    codes = [
        _operation(trace, f"{what} op{i}", op, _operations.ALU) for i, op in enumerate((op0, op1))
    ]
    d = _destination(trace, what, dst)
    sources = _sources(trace, what, dst, d, data=data, operand1=operand1)
    bits = _check_kind(trace, what, codes, [dst, data, operand1])
    scalar = _scalar(trace, f"{what} operand0", operand0, sources[0], bits)
    _record(
        trace, _isa.ScalarTensorTensor, d, sources, op0=codes[0], op1=codes[1],
        reverse0=bool(reverse0), reverse1=bool(reverse1), saturate=bool(saturate),
        **_scalar_fields("scalar0", scalar),
    )  # fmt: skip


def tensor_tensor_scan(
    dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None, *,
    saturate=False,
):  # fmt: skip
    """``r[i] = (data0[i] op0 r[i - 1]) op1 data1[i]`` along the free axes, on the vector engine.

    dst is all of ``r``; what goes on from element to element is float32, whatever dst's format.

    Parameters
    ----------
    data0, data1 : tiles of the shape of dst, one of them may be in PSUM
    initial : number or SBUF tile ``[P, 1]`` float32
        ``r[-1]``.
    reverse0, reverse1 : :class:`bool`
        Exchange the two sides of the operation.
    """
    del name
    trace, what = _trace.current(), "tensor_tensor_scan"
    codes = [
        _operation(trace, f"{what} op{i}", op, _operations.ALU) for i, op in enumerate((op0, op1))
    ]
    d = _destination(trace, what, dst)
    sources = _sources(trace, what, dst, d, data0=data0, data1=data1)
    bits = _check_kind(trace, what, codes, [dst, data0, data1])
    first = _scalar(trace, f"{what} initial", initial, sources[0], bits)
    _record(
        trace, _isa.TensorTensorScan, d, sources, op0=codes[0], op1=codes[1],
        reverse0=bool(reverse0), reverse1=bool(reverse1), saturate=bool(saturate),
        **_scalar_fields("initial", first),
    )  # fmt: skip


def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None, *, saturate=False):
    """Copy the elements of src whose predicate is not zero; leave those of dst elsewhere.

    On the vector engine. Formats are converted as by :func:`tensor_copy`.

    Parameters
    ----------
    dst : SBUF tile
        Written before: elements keep what they hold.
    src : tile of the shape of dst, or number
    predicate : tile of integers of the shape of dst
        One of src and predicate may be in PSUM.
    reverse_pred : :class:`bool`
        Copy where the predicate is zero.
    """
    del name
    trace, what = _trace.current(), "tensor_copy_predicated"
    d = _destination(trace, what, dst)
    if not isinstance(src, NkiTensor):
        if not isinstance(src, numbers.Real):
            raise trace.error(f"{what} src must be a tile or a number, not {src!r}")
        shape = (*dst.shape[:1], *(1 for _ in dst.shape[1:]))
        number = trace.allocate(shape, dst.dtype, "sbuf", name=f"{dst.name}_number")
        # On the partitions of dst: a tile of its own begins at partition 0.
        memset(number, src)
        src = number.broadcast_to(dst.shape)
    sources = _sources(trace, what, dst, d, src=src, predicate=predicate)
    if predicate.dtype.is_float:
        raise trace.error(
            f"{what}: predicate {predicate} must be of integers; nl.not_equal(x, 0, "
            "dtype=nl.uint8) makes one"
        )
    _record(
        trace, _isa.CopyPredicated, d, (*sources, d), reverse=bool(reverse_pred),
        saturate=bool(saturate),
    )  # fmt: skip


def tensor_scalar_reduce(
    dst, data, op0, operand0, reduce_op, reduce_res, reverse0=False, name=None, *, saturate=False
):
    """:func:`tensor_scalar` with one operation, and the reduction of dst over all free axes.

    Two instructions here: the vector engine has no accumulators, so what is reduced into
    reduce_res are the numbers in dst, rounded to its format.

    Parameters
    ----------
    reduce_op : operation of :func:`tensor_reduce`
    reduce_res : SBUF tile ``[P, 1]``
    """
    del name
    tensor_scalar(dst, data, op0, operand0, reverse0, saturate=saturate)
    tensor_reduce(reduce_res, reduce_op, dst, tuple(range(1, dst.ndim)))


def free_axes(trace, what, data, axis):
    """Check that ``axis`` names the last axes of a tile; return them, ascending."""
    _tensor(trace, f"{what} data", data)
    axes = [axis] if isinstance(axis, numbers.Integral) else list(axis)
    axes = sorted(int(i) + data.ndim if i < 0 else int(i) for i in axes)
    if not axes or axes != list(range(data.ndim - len(axes), data.ndim)) or axes[0] < 1:
        raise trace.error(
            f"{what}: axis = {axis} of {data} must be its last axes, without gaps: "
            f"{', '.join(str(tuple(range(i, data.ndim))) for i in range(data.ndim - 1, 0, -1))}; "
            "no engine reduces over partitions, but nc_matmul with a column of ones does"
        )
    return axes


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None, *, saturate=False):
    """Reduce the last axes of data to one element of dst each, on the vector engine.

    Elements are taken in order, innermost axis first. Those of even number are combined one by
    one, so are those of odd number, and the result is ``even op odd``; each step rounds to float32.

    Parameters
    ----------
    axis : :class:`int` or sequence of :class:`int`
        The last axes of data, without gaps; not the partition axis.
    negate : :class:`bool`
        Invert the sign of the results.
    keepdims : :class:`bool`
        dst has the reduced axes too, each of one element. Without, a dst that would lose its free
        axis keeps one: ``[P, 1]``.
    """
    del name
    trace, what = _trace.current(), "tensor_reduce"
    code = _operation(trace, f"{what} op", op, _operations.REDUCTIONS)
    axes = free_axes(trace, what, data, axis)
    d = _destination(trace, what, dst)
    s = _access(trace, f"{what} data", data, _CHIP, inner=len(axes))
    kept = list(data.shape[: axes[0]])
    shapes = [[*kept, *(1 for _ in axes)]]
    if not keepdims:
        shapes.insert(0, kept if len(kept) > 1 else [*kept, 1])
    if list(dst.shape) not in shapes or d.count != s.count:
        raise trace.error(
            f"{what}: dst {dst} must have shape {shapes[0]} for axis {axis} of data {data}"
        )
    if _check_kind(trace, what, [code], [dst, data]) and negate:
        raise trace.error(f"{what}: negate goes with arithmetic, not with {op!r}")
    _record(
        trace, _isa.TensorReduce, d, (s,), op=code, inner=s.inner - 1, negate=bool(negate),
        saturate=bool(saturate),
    )  # fmt: skip


_INDICES = (_formats.UINT16, _formats.UINT32)


def _eight(trace, what, **views):
    """Accesses of tiles ``[P, 8]``."""
    found = []
    for name, view in views.items():
        access = _access(trace, f"{what} {name}", view, _SBUF if name == "dst" else _CHIP)
        if access.elements != _isa.EIGHT:
            raise trace.error(
                f"{what}: {name} {view} must have {_isa.EIGHT} elements per partition"
            )
        found.append(access)
    return found


def _searched(trace, what, name, view, *others):
    """Access of the tile that is looked through, on the partitions of the others."""
    found = _access(trace, f"{what} {name}", view, _CHIP)
    least, most = _isa.EIGHT, _isa.EIGHT_LIMIT
    if not least <= found.elements <= most:
        raise trace.error(
            f"{what}: {name} {view} must have {least} to {most} elements per partition"
        )
    for other in others:
        if other.count != found.count:
            raise trace.error(
                f"{what}: {name} {view} has {found.count} partitions, another operand {other.count}"
            )
        if other.storage.buffer == found.storage.buffer == "psum":
            raise trace.error(
                f"{what}: {name} {view} and vals are both in psum, of which an instruction reads "
                "one; copy vals to SBUF with nisa.tensor_copy first"
            )
    return found


def max8(dst, src, name=None, *, saturate=False):
    """The eight greatest elements of each partition, in descending order, on the vector engine.

    Elements are compared as float32; +0 comes before -0, a positive NaN before infinity, a negative
    one behind everything.

    Parameters
    ----------
    dst : SBUF tile ``[P, 8]``
    src : tile with 8 to 16384 elements per partition
    """
    del name
    trace, what = _trace.current(), "max8"
    (d,) = _eight(trace, what, dst=dst)
    _writable(trace, what, dst)
    s = _searched(trace, what, "src", src, d)
    _record(trace, _isa.Max8, d, (s,), saturate=bool(saturate))


def nc_find_index8(dst, data, vals, name=None):
    """Index of the first element of data that equals each of eight values, on the vector engine.

    Equal are equal bits in float32. Of equal values the first gets the first such element, the
    second the second. A value that is not there gets an index of all ones.

    Parameters
    ----------
    dst : SBUF tile ``[P, 8]`` uint16 or uint32
    data : tile with 8 to 16384 elements per partition
        Numbered in order, the last axis fastest.
    vals : tile ``[P, 8]``
        One of data and vals may be in PSUM.
    """
    del name
    trace, what = _trace.current(), "nc_find_index8"
    d, v = _eight(trace, what, dst=dst, vals=vals)
    _writable(trace, what, dst)
    if dst.dtype not in _INDICES:
        raise trace.error(f"{what}: dst {dst} must be nl.uint16 or nl.uint32")
    s = _searched(trace, what, "data", data, d, v)
    _record(trace, _isa.FindIndex8, d, (s, v))


def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None, *, saturate=False):
    """Copy data with ``imm`` in place of the first element that equals each of eight values.

    On the vector engine. What is equal to what is the same as in :func:`nc_find_index8`.

    Parameters
    ----------
    dst : SBUF tile of the shape of data
        May be data.
    data : tile with 8 to 16384 elements per partition
    vals : tile ``[P, 8]``
        One of data and vals may be in PSUM.
    imm : number
    dst_idx : SBUF tile ``[P, 8]`` uint16 or uint32, or ``None``
        Gets the indices too, by two more instructions here; may be vals.
    """
    del name
    trace, what = _trace.current(), "nc_match_replace8"
    d = _destination(trace, what, dst)
    (v,) = _eight(trace, what, vals=vals)
    s = _searched(trace, what, "data", data, d, v)
    if d.elements != s.elements:
        raise trace.error(f"{what}: dst {dst} and data {data} must have as many elements")
    value = _scalar(trace, f"{what} imm", imm, s, tiles=False)
    where = None
    if dst_idx is not None:
        # Looked for before data or vals may be overwritten, told when they are not needed any more.
        _tensor(trace, f"{what} dst_idx", dst_idx)
        if dst_idx.dtype not in _INDICES or dst_idx.shape != (s.count, _isa.EIGHT):
            raise trace.error(
                f"{what}: dst_idx {dst_idx} must be a tile [{s.count}, {_isa.EIGHT}] of nl.uint16 "
                "or nl.uint32"
            )
        _writable(trace, f"{what} dst_idx", dst_idx)
        where = trace.allocate(dst_idx.shape, dst_idx.dtype, "sbuf", name=f"{data.name}_indices")
        nc_find_index8(where, data, vals)
    _record(
        trace, _isa.MatchReplace8, d, (s, v), value=value, saturate=bool(saturate)
    )  # fmt: skip
    if where is not None:
        tensor_copy(dst_idx, where)


_MINUS_ZERO = 0x80000000  # what can be added to every number without changing it


def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    engine=engine.unknown,
    name=None,
    *,
    alpha=None,
    saturate=False,
):
    """``dst = op(data * scale + bias)``, element by element, on the scalar engine.

    The argument is rounded once. The accumulators of ``reduce_cmd`` do not exist here;
    :func:`activation_reduce` sums.

    Parameters
    ----------
    op : function of ``nki.language``
        ``nl.exp``, ``nl.rsqrt``, ... (``firmware/README.md`` lists them).
    bias, scale : number or SBUF tile ``[P, 1]`` float32
        A tile has a number for each partition, and lies on the partitions of data.
    alpha : number or ``None``
        Slope of ``nl.prelu`` where the argument is negative (an extension of this core).
    """
    del name
    trace, what = _trace.current(), "activation"
    _check_engine(trace, what, engine, scalar_engine)
    if reduce_op is not None or reduce_res is not None or reduce_cmd.name != "idle":
        raise trace.error(
            "activation: the scalar engine has no accumulators here; use nisa.activation_reduce, "
            "or nisa.tensor_reduce on the result"
        )
    function = _operation(trace, "activation op", op, _operations.FUNCTIONS)
    if (function is Function.PRELU) != (alpha is not None):
        raise trace.error("activation: alpha is the slope of nl.prelu, which needs it")
    d = _destination(trace, what, dst)
    (s,) = sources = _sources(trace, what, dst, d, data=data)
    scale = _scalar(trace, f"{what} scale", scale, s)
    bias = _MINUS_ZERO if bias is None else _scalar(trace, f"{what} bias", bias, s)
    _record(
        trace, _isa.Activation, d, sources, function=function, saturate=bool(saturate),
        alpha=0 if alpha is None else _scalar(trace, f"{what} alpha", alpha, s),
        **_scalar_fields("scale", scale), **_scalar_fields("bias", bias),
    )  # fmt: skip


def activation_reduce(
    dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None, *, saturate=False
):
    """:func:`activation`, and the sums of its results over all free axes in ``reduce_res``.

    The scalar engine does not sum here: the vector engine reduces dst, as :func:`tensor_reduce`.
    So what is summed are the numbers in dst, rounded to its format.
    """
    del name
    trace = _trace.current()
    if reduce_op is not _operations.add:
        raise trace.error(f"activation_reduce: reduce_op must be nl.add, not {reduce_op!r}")
    activation(dst, op, data, bias, scale, saturate=saturate)
    tensor_reduce(reduce_res, reduce_op, dst, tuple(range(1, dst.ndim)))


def reciprocal(dst, data, name=None):
    """``dst = 1 / data``, element by element: :func:`activation` with ``nl.reciprocal``.

    No other engine than the scalar engine has reciprocals here.
    """
    del name
    activation(dst, _operations.reciprocal, data)


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
    trace.ops.append(_trace.Op(_trace.DMA, dst, (src,), {}, trace.location()))
    if after is not None:
        tensor_copy(after, dst)


def _conversion_tile(trace, like, dtype):
    """A tile in SBUF of the shape of ``like``, which an engine can walk."""
    _access(trace, "dma_copy with conversion", like, _SBUF)
    return trace.allocate(like.shape, dtype, "sbuf", name=f"{like.name}_as_{dtype.name}")


def dma_transpose(
    dst, src, axes=None, dge_mode=None, oob_mode=None, engine=engine.unknown, name=None
):
    """Copy with reordered axes: ``dst = src.permute(*axes)``, by default the axes reversed.

    Any formats and any size; the bits are copied. Elements move one by one, which is slow.
    """
    del dge_mode, oob_mode, engine, name
    trace = _trace.current()
    src = _tensor(trace, "dma_transpose src", src)
    dma_copy(dst, src.permute(*(reversed(range(src.ndim)) if axes is None else axes)))


def identity(trace, dtype):
    """A square SBUF tile with ones on its diagonal, as wide as the machine; one for each format."""
    found = trace.constants.get(("identity", dtype))
    if found is None:
        n = trace.config.partitions
        found = trace.allocate((n, n), dtype, "sbuf", name=f"{dtype.name}_identity")
        memset(found, 1)
        affine_select(found, [[-1, n]], 0, 1, found, 0)  # partition - element == 0
        trace.constants["identity", dtype] = found
    return found


def nc_transpose(dst, data, engine=engine.unknown, name=None, *, bits=False):
    """``dst = data.T``: partitions become elements, on the tensor engine.

    A product with the identity matrix, of which the kernel gets one for each format. All finite
    numbers of all floating-point formats come out exact, except that -0 becomes +0. An infinity or
    NaN makes its whole column of data NaN.

    ``bits`` (an extension of this core) copies every bit, of integers too: byte by byte of the
    elements, each a number from 0 to 255 that the vector engine converts before and after the
    product.

    Parameters
    ----------
    dst : PSUM tile ``[F, P]`` float32, or SBUF tile ``[F, P]``
        What is in PSUM here is float32, whatever the format of data. To SBUF the vector engine
        copies from a PSUM tile, and converts. With ``bits`` in SBUF, of the format of data.
    data : SBUF tile ``[P, F]``, of a floating-point format unless ``bits``
        F at most ``nl.tile_size.gemm_stationary_fmax``.
    """
    del name
    trace = _trace.current()
    _check_engine(trace, "nc_transpose", engine, tensor_engine)
    s = _access(trace, "nc_transpose data", data, _SBUF)
    if not s.dtype.is_float and not bits:
        raise trace.error(
            f"nc_transpose: data {data} must be a floating-point format; bits=True copies any"
        )
    d = _access(trace, "nc_transpose dst", dst, _SBUF if bits else _CHIP)
    if bits and d.dtype is not s.dtype:
        raise trace.error(
            f"nc_transpose: dst {dst} must have the format of data {data}, whose bits it gets"
        )
    if d.count != s.elements or d.elements != s.count:
        raise trace.error(
            f"nc_transpose: dst {dst} must have shape [{s.elements}, {s.count}] for data {data}"
        )
    same = slice(s.start, s.start + s.count)
    if bits:
        size = s.dtype.bytes
        try:
            source, result = (x.view(_formats.UINT8) for x in (data, dst))
        except ValueError as error:
            raise trace.error(f"nc_transpose: {error}") from None
        ones = identity(trace, _formats.BF16)[same, same]
        for byte in range(size):
            plane = _beside(trace, data, _formats.BF16, f"{data.storage.name}_byte{byte}")
            turned = trace.allocate(
                (d.count, d.elements), _formats.FP32, "psum", name=f"{plane.name}_transposed"
            )
            tensor_copy(plane, source[..., byte::size])
            nc_matmul(turned, plane, ones, accumulate=False)
            tensor_copy(result[..., byte::size], turned)
        return
    target = dst
    if dst.buffer == "sbuf":
        shape = (d.count, d.elements)
        target = trace.allocate(shape, _formats.FP32, "psum", name=f"{data.name}_transposed")
    nc_matmul(target, data, identity(trace, s.dtype)[same, same], accumulate=False)
    if dst.buffer == "sbuf":
        tensor_copy(dst, target)


# Made of several instructions --------------------------------------------------------------------

STATS = 3
"""Numbers that describe a group of elements: count, mean, count times variance."""

BN_STATS_FMAX = 512
"""Most elements per partition of :func:`bn_stats`."""

KEEP = 255
"""Entry of a mask: leave the partition as it is."""


def _beside(trace, view, dtype, name, columns=None):
    """A tile of the shape of ``view``, or of so many columns, on the same partitions."""
    access = _access(trace, name, view, _CHIP)
    free = view.shape[1:] if columns is None else (columns,)
    shape = (access.start + access.count, *free)
    return trace.allocate(shape, dtype, "sbuf", name=name)[access.start :]


def _matrix(trace, what, name, view, buffers):
    """Check that a tile is ``[P, F]``, where an engine reaches it; return F."""
    _access(trace, f"{what} {name}", view, buffers)
    if view.ndim != 2:
        raise trace.error(f"{what}: {name} {view} must have two axes, [P, F]; reshape it")
    return view.shape[1]


def _described(trace, what, dst, data, columns):
    """Check what ``bn_stats`` and ``bn_aggr`` ask of dst."""
    _destination(trace, what, dst)
    if dst.shape != (data.shape[0], columns) or dst.dtype is not _formats.FP32:
        raise trace.error(
            f"{what}: dst {dst} must be a tile [{data.shape[0]}, {columns}] float32 for data {data}"
        )


def bn_stats(dst, data, name=None):
    """Count, mean, and count times variance of the even and of the odd elements, in that order.

    Six instructions of the vector engine for each half (the sum, its product with 1 / count, the
    differences from the mean, their squares, the sum of those), and a copy. All in float32.

    Parameters
    ----------
    dst : SBUF tile ``[P, 6]`` float32
        May be part of data.
    data : tile ``[P, F]``, F at most 512
    """
    del name
    trace, what = _trace.current(), "bn_stats"
    columns = _matrix(trace, what, "data", data, _CHIP)
    if not 1 <= columns <= BN_STATS_FMAX:
        raise trace.error(
            f"{what}: data {data} must have 1 to {BN_STATS_FMAX} elements per partition"
        )
    _described(trace, what, dst, data, 2 * STATS)
    found = _beside(trace, data, _formats.FP32, f"{what}_found", 2 * STATS)
    for half in range(2):
        first = STATS * half
        count, mean, spread = (found[:, i : i + 1] for i in range(first, first + STATS))
        size = (columns + 1 - half) // 2
        memset(count, size)
        if size == 0:
            memset(mean, 0)
            memset(spread, 0)
            continue
        part = data[:, half::2]
        tensor_reduce(mean, _operations.add, part, 1)
        tensor_scalar(mean, mean, _operations.multiply, 1 / size)
        differences = _beside(trace, part, _formats.FP32, f"{what}_differences")
        tensor_scalar(differences, part, _operations.subtract, mean)
        tensor_tensor(differences, differences, differences, _operations.multiply)
        tensor_reduce(spread, _operations.add, differences, 1)
    tensor_copy(dst, found)


def bn_aggr(dst, data, name=None):
    """Mean and variance of all elements of the groups that :func:`bn_stats` has described.

    Twelve instructions, eleven of the vector engine, all in float32.

    Parameters
    ----------
    dst : SBUF tile ``[P, 2]`` float32
        Mean and variance (with the number of elements as divisor). May be part of data.
    data : SBUF tile ``[P, 3 * groups]`` float32
        Count, mean, and count times variance of each group.
    """
    del name
    trace, what = _trace.current(), "bn_aggr"
    columns = _matrix(trace, what, "data", data, _SBUF)
    if columns % STATS or data.dtype is not _formats.FP32:
        raise trace.error(
            f"{what}: data {data} must be float32, a multiple of {STATS} elements per partition"
        )
    _described(trace, what, dst, data, 2)
    counts, means, spreads = (data[:, i::STATS] for i in range(STATS))
    found = _beside(trace, data, _formats.FP32, f"{what}_found", 2)
    mean, variance = found[:, :1], found[:, 1:]
    share = _beside(trace, data, _formats.FP32, f"{what}_share", 1)
    each = _beside(trace, means, _formats.FP32, f"{what}_groups")
    multiply, add = _operations.multiply, _operations.add
    tensor_reduce(share, add, counts, 1)
    reciprocal(share, share)
    tensor_tensor(each, counts, means, multiply)
    tensor_reduce(mean, add, each, 1)
    tensor_scalar(mean, mean, multiply, share)
    tensor_scalar(each, means, _operations.subtract, mean)
    tensor_tensor(each, each, each, multiply)
    tensor_tensor(each, each, counts, multiply)
    tensor_tensor(each, each, spreads, add)
    tensor_reduce(variance, add, each, 1)
    tensor_scalar(variance, variance, multiply, share)
    tensor_copy(dst, found)


def tensor_partition_reduce(dst, op, data, name=None):
    """Reduce over the partitions: ``dst[0, i] = data[0, i] op data[1, i] op ...``.

    DMA turns the tile, :func:`tensor_reduce` reduces (in its order), DMA turns the result.

    Parameters
    ----------
    dst : SBUF tile ``[1, F]``
        May be part of data.
    op : operation of :func:`tensor_reduce`
    data : SBUF tile ``[P, F]``
    """
    del name
    trace, what = _trace.current(), "tensor_partition_reduce"
    columns, partitions = _matrix(trace, what, "data", data, _SBUF), data.shape[0]
    _operation(trace, f"{what} op", op, _operations.REDUCTIONS)
    _destination(trace, what, dst)
    if dst.shape != (1, columns):
        raise trace.error(f"{what}: dst {dst} must have shape [1, {columns}] for data {data}")
    most = trace.config.partitions
    for first in range(0, columns, most):
        part = slice(first, min(first + most, columns))
        size = part.stop - first
        turned = trace.allocate((size, partitions), data.dtype, "sbuf", name=f"{data.name}_turned")
        results = trace.allocate((size, 1), dst.dtype, "sbuf", name=f"{data.name}_reduced")
        dma_transpose(turned, data[:, part])
        tensor_reduce(results, op, turned, 1)
        dma_transpose(dst[:, part], results)


def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    """Exchange rows inside every quarter of the partitions, by DMA: the bits are copied.

    Row ``i`` of a quarter of dst becomes row ``shuffle_mask[i]`` of the same quarter of src.
    Quarters are counted from the first row of the tiles, which may begin at any partition.

    Parameters
    ----------
    dst, src : SBUF tiles of the same shape and format
        May be the same.
    shuffle_mask : sequence of :class:`int`
        One for each row of a quarter; 255 leaves dst's as it is. All rows that are read must be
        src's.
    """
    del name
    trace, what = _trace.current(), "nc_stream_shuffle"
    quarter = trace.config.quadrant
    given = list(shuffle_mask) if np.iterable(shuffle_mask) else []
    mask = [int(e) for e in given if isinstance(e, int | np.integer)]
    if not len(mask) == len(given) == quarter or not {*range(quarter), KEEP}.issuperset(mask):
        raise trace.error(
            f"{what}: shuffle_mask = {shuffle_mask!r} must be {quarter} integers of 0 to "
            f"{quarter - 1}, or {KEEP} to keep"
        )
    for side, view in (("dst", dst), ("src", src)):
        if _tensor(trace, f"{what} {side}", view).buffer != "sbuf":
            raise trace.error(f"{what} {side} {view} must be in sbuf")
    if dst.shape != src.shape or dst.dtype is not src.dtype:
        raise trace.error(f"{what}: dst {dst} and src {src} must have the same shape and format")
    rows = src.shape[0]
    if dst.storage is src.storage:
        copied = trace.allocate(src.shape, src.dtype, "sbuf", name=f"{src.name}_copied")
        dma_copy(copied, src)
        src = copied
    for first in range(0, rows, quarter):
        size = min(quarter, rows - first)
        i = 0
        while i < size:
            # As many as follow one another on both sides.
            end = i + 1
            while end < size and mask[end] == mask[end - 1] + 1 < KEEP:
                end += 1
            if mask[i] != KEEP:
                at = first + mask[i]
                if at + end - i > rows:
                    raise trace.error(
                        f"{what}: shuffle_mask[{i}] = {mask[i]} names row {at} of {src}"
                    )
                dma_copy(dst[first + i : first + end], src[at : at + end - i])
            i = end
