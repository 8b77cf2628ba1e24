"""``nki.language``: number formats, buffers, tensors, ranges and tile sizes."""

from ...rtl.arch import formats as _formats
from . import operations as _operations
from . import trace as _trace
from .operations import *  # noqa: F403
from .tensor import KernelError, NkiTensor

__all__ = [
    *_operations.__all__, "affine_range", "bfloat16", "broadcast_to", "dropout", "ds", "empty_like",
    "float16", "float32", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "full",
    "hbm", "int16", "int32", "int8", "load", "load_transpose2d", "ndarray", "num_programs", "ones",
    "private_hbm", "program_id", "program_ndim", "psum", "rand", "random_seed", "sbuf",
    "sequential_range", "shared_hbm", "shared_identity_matrix", "static_range", "store", "tfloat32",
    "tile_size", "uint16", "uint32", "uint8", "zeros", "zeros_like",
]  # fmt: skip

float32 = _formats.FP32
tfloat32 = _formats.TF32
bfloat16 = _formats.BF16
float16 = _formats.FP16
float8_e4m3 = _formats.FP8_E4M3
float8_e4m3fn = _formats.FP8_E4M3FN
float8_e5m2 = _formats.FP8_E5M2
float8_e3m4 = _formats.FP8_E3M4
int8, uint8 = _formats.INT8, _formats.UINT8
int16, uint16 = _formats.INT16, _formats.UINT16
int32, uint32 = _formats.INT32, _formats.UINT32


class _Buffer:
    """Where a tensor lies."""

    def __init__(self, name, space):
        self.name = name
        self.space = space

    def __repr__(self):
        return f"nl.{self.name}"


sbuf = _Buffer("sbuf", "sbuf")
psum = _Buffer("psum", "psum")
hbm = _Buffer("hbm", "hbm")
private_hbm = _Buffer("private_hbm", "hbm")
shared_hbm = _Buffer("shared_hbm", "hbm")


class _TileSize:
    """Tile sizes of the machine that is being traced for (TRN outside a kernel)."""

    @property
    def pmax(self):
        """Partitions."""
        return _trace.current_config().partitions

    @property
    def psum_fmax(self):
        """Binary32 elements of one PSUM bank."""
        return _trace.current_config().psum_bank_words

    psum_bank_fmax = psum_fmax

    @property
    def gemm_stationary_fmax(self):
        """Columns of a stationary tile."""
        return _trace.current_config().cols

    @property
    def gemm_moving_fmax(self):
        """Columns of a moving tile."""
        return _trace.current_config().psum_bank_words

    @property
    def psum_num_banks(self):
        """PSUM banks."""
        return _trace.current_config().psum_banks

    @property
    def psum_min_align(self):
        """Bytes."""
        return 4

    @property
    def sbuf_min_align(self):
        """Bytes."""
        return 1

    @property
    def total_available_sbuf_size(self):
        """Bytes in a partition of SBUF."""
        return _trace.current_config().sbuf_bytes

    sbuf_fmax_bytes = total_available_sbuf_size


tile_size = _TileSize()


def ndarray(shape, dtype, buffer=None, name=""):
    """A new tensor without defined contents, in SBUF unless ``buffer`` says otherwise.

    In SBUF and PSUM the first axis is the partition axis. A PSUM tile is one bank wide at most.
    Write before you read: a kernel that reads elements that it has not written does not compile.

    Raises
    ------
    :exc:`~.tensor.KernelError`
        If the tile does not fit its memory, or PSUM is asked for another format than float32.
    """
    trace = _trace.current()
    buffer = sbuf if buffer is None else buffer
    if not isinstance(buffer, _Buffer):
        raise trace.error(f"buffer {buffer!r} must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm")
    try:
        fmt = _formats.format_of(dtype)
    except TypeError as error:
        raise trace.error(str(error)) from None
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    space = buffer.space
    view = trace.allocate(shape, fmt, space, name=name)
    storage, config = view.storage, trace.config

    def fail(message):
        return trace.error(f"{storage}: {message}", storage.location)

    if any(n < 1 for n in shape):
        raise fail("every axis needs at least one element")
    if space == "hbm":
        return view
    if len(shape) < 2:
        raise fail("a tile needs a partition axis and a free axis, e.g. (nl.tile_size.pmax, 512)")
    if shape[0] > config.partitions:
        raise fail(
            f"{shape[0]} partitions, but {config.name} has {config.partitions} "
            "(nl.tile_size.pmax); put the rest on the free axis or loop over tiles"
        )
    if space == "psum":
        if storage.partition_bytes > config.psum_bank_bytes:
            raise fail(
                f"needs {storage.partition_bytes} bytes in each partition, but a PSUM bank of "
                f"{config.name} has {config.psum_bank_bytes} ({config.psum_bank_words} float32, "
                "nl.tile_size.psum_fmax); split the free axis"
            )
        if fmt is not _formats.FP32:
            raise fail("PSUM holds float32; convert with nisa.tensor_copy into an SBUF tile")
    elif storage.partition_bytes > config.sbuf_bytes:
        raise fail(
            f"needs {storage.partition_bytes} bytes in each partition, but SBUF of {config.name} "
            f"has {config.sbuf_bytes}; split the free axis"
        )
    return view


def zeros(shape, dtype, buffer=None, name=""):
    """A new tile of zeros, in SBUF unless ``buffer`` says ``nl.psum``.

    Elements that nothing is written to read as zero. In SBUF the vector engine fills the tile. In
    PSUM a matmul overwrites where it is the first, so that nothing needs filling as long as no
    other elements are read; where some are, a matmul of zeros clears the tile before its first
    use (a row of weights, and as many columns as the tile has).

    Raises
    ------
    :exc:`~.tensor.KernelError`
        In HBM, and where :func:`ndarray` raises it.
    """
    from . import isa

    view = ndarray(shape, dtype, buffer=buffer, name=name)
    if view.buffer == "sbuf":
        isa.memset(view, 0)
    elif view.buffer == "psum":
        view.storage.zeros = True
    else:
        raise _trace.current().error(
            f"{view}: nl.zeros fills SBUF or PSUM; copy zeros from SBUF to HBM"
        )
    return view


def full(shape, fill_value, dtype, buffer=None, name=""):
    """A new SBUF tile of equal numbers."""
    from . import isa

    view = ndarray(shape, dtype, buffer=buffer, name=name)
    isa.memset(view, fill_value)
    return view


def ones(shape, dtype, buffer=None, name=""):
    """A new SBUF tile of ones."""
    return full(shape, 1, dtype, buffer=buffer, name=name)


def empty_like(x, dtype=None, buffer=None, name=""):
    """A new tile of the shape and format of another, without defined contents."""
    return ndarray(x.shape, x.dtype if dtype is None else dtype, buffer=buffer, name=name)


def zeros_like(x, dtype=None, buffer=None, name=""):
    """A new tile of zeros of the shape and format of another."""
    return zeros(x.shape, x.dtype if dtype is None else dtype, buffer=buffer, name=name)


def shared_identity_matrix(n, dtype):
    """An SBUF tile ``[n, n]`` with ones on its diagonal; one for the kernel and each format."""
    from . import isa

    trace = _trace.current()
    if not 1 <= n <= trace.config.partitions:
        raise trace.error(
            f"shared_identity_matrix({n}): it has from 1 to {trace.config.partitions} partitions "
            "(nl.tile_size.pmax)"
        )
    return isa.identity(trace, _formats.format_of(dtype))[:n, :n]


def random_seed(seed):
    """Begin the random numbers of a seed, an integer or a tile: :func:`~.isa.set_rng_seed`."""
    from . import isa

    isa.set_rng_seed(seed)


def rand(shape, dtype=float32, name=""):
    """A new SBUF tile of random numbers from 0 to 1.

    Multiples of 2**-24 below 1, rounded to ``dtype``: in less than 24 bits the greatest are 1.
    """
    from . import isa

    fmt = _formats.format_of(dtype)
    if not fmt.is_float:
        raise _trace.current().error(
            f"rand: numbers from 0 to 1 are no {fmt.name}; nisa.rng fills integers with random bits"
        )
    numbers = ndarray(shape, float32, name=name)
    isa.rng(numbers)
    return numbers if fmt is float32 else _operations.copy(numbers, dtype=fmt)


def dropout(x, rate, dtype=None):
    """``x`` with zeros for elements chosen with probability ``rate``: a new tile.

    ``rate`` is a number, or a tile with one for each partition: :func:`~.isa.dropout`.
    """
    from . import isa

    if not isinstance(x, NkiTensor):
        raise KernelError(f"nl.dropout needs a tile, not {x!r}")
    tile = ndarray(x.shape, x.dtype)
    isa.dropout(tile, x, rate)
    fmt = x.dtype if dtype is None else _formats.format_of(dtype)
    return tile if fmt is x.dtype else _operations.copy(tile, dtype=fmt)


def load(src, dtype=None):
    """A new SBUF tile with the contents of an HBM view."""
    from . import isa

    tile = ndarray(src.shape, src.dtype if dtype is None else dtype, buffer=sbuf)
    isa.dma_copy(tile, src)
    return tile


def load_transpose2d(src, dtype=None):
    """A new SBUF tile with the transpose of an HBM view of two axes."""
    return load(src.permute(1, 0), dtype)


def store(dst, value):
    """Copy an SBUF tile to an HBM view."""
    from . import isa

    isa.dma_copy(dst, value)


def broadcast_to(src, shape):
    """A view of ``src`` with axes of one element repeated."""
    return src.broadcast_to(shape)


def ds(start, size):
    """The slice ``start : start + size``."""
    return slice(start, start + size)


def _range(start, stop=None, step=1):
    return range(start) if stop is None else range(start, stop, step)


affine_range = _range
"""Loop without dependences between iterations; unrolled at trace time."""
sequential_range = _range
"""Loop with dependences between iterations; unrolled at trace time."""
static_range = _range
"""Loop unrolled at trace time."""


def program_id(axis):
    """Instance of the kernel along a grid axis: 0, this core runs one."""
    if axis != 0:
        raise KernelError(f"program_id({axis}): the grid has one axis")
    return 0


def num_programs(axes=0):
    """Instances of the kernel along a grid axis."""
    del axes
    return 1


def program_ndim():
    """Axes of the launch grid: 0, there is none."""
    return 0


NkiTensor = NkiTensor
