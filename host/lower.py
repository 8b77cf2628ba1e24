"""From numpy to programs: what ``matmul`` is asked for, and the exact conversion of operands.

Shapes follow :func:`numpy.matmul`. Operands are rounded at most once, to nearest even, from their
exact value: neither through binary32 (as ``ml_dtypes`` casts binary64) nor, for long integers,
through binary64.
"""

from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from ..rtl.arch.formats import ALIASES, FORMATS, FP32, MATMUL_FORMATS, format_of
from .errors import DtypeError, ShapeError

__all__ = ["MatmulShape", "as_format", "operand_formats", "to_format"]

_DOUBLE_BITS = 53

STACKED_ROWS = 1024
"""Matrices that share the right operand are stacked up to this many rows."""


def _native(array):
    """The array in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _describe(dtype):
    return str(np.dtype(dtype).newbyteorder("="))


def _matmul_names():
    return "fp32, tf32, bf16, fp16, fp8_e4m3, fp8_e4m3fn, fp8_e5m2 or fp8_e3m4"


def as_format(dtype, what, among=FORMATS):
    """The format of ``dtype``, which errors call ``what``.

    Raises
    ------
    :exc:`DtypeError`
        If the core has no such format; the message lists the names of those in ``among``.
    """
    try:
        return format_of(dtype, among)
    except TypeError as error:
        reason = str(error)
    except (ValueError, SyntaxError):  # numpy's, for odd descriptions
        reason = f"not a number format of this core; use one of {', '.join(ALIASES)}"
    raise DtypeError(f"{what}={dtype!r}: {reason}")


def _multiplied(dtype):
    """The format of ``dtype`` if the array multiplies it, else ``None``."""
    try:
        fmt = format_of(dtype)
    except TypeError:
        return None
    return fmt if fmt in MATMUL_FORMATS else None


_INSTEAD = {
    "c": "multiply real and imaginary parts: "
    "(a.real @ b.real - a.imag @ b.imag) + 1j * (a.real @ b.imag + a.imag @ b.real)",
    "O": "make it an array of numbers first, with {}.astype(np.float32)",
    "S": "read the numbers first, with {}.astype(np.float64)",
    "U": "read the numbers first, with {}.astype(np.float64)",
    "M": "subtract a date and divide by a unit such as np.timedelta64(1, 's') first",
    "m": "divide by a unit such as np.timedelta64(1, 's') first",
}
"""What to do with an operand that is not a real number, by the kind of its dtype."""


def _is_small_integer(dtype):
    """Whether it is one of the integers of ``ml_dtypes``, of 1 to 4 bits."""
    try:
        ml_dtypes.iinfo(dtype)
    except ValueError:
        return False
    return True


def _is_small_float(dtype):
    """Whether it is one of the formats of ``ml_dtypes``."""
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def _check_real(array, name):
    dtype = array.dtype
    if dtype.kind in "biuf":
        return
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        if _is_small_float(dtype) or _is_small_integer(dtype):
            return
        instead = "if these are numbers of another format, view them in it: {}.view(format)"
    elif dtype.names:
        instead = f"multiply one of its fields, such as {{}}[{dtype.names[0]!r}]"
    else:
        instead = _INSTEAD.get(dtype.kind, "convert it to one first")
    raise DtypeError(
        f"{name} is {_describe(dtype)}, which is not a real number format and cannot be "
        f"multiplied, with dtype= or without; {instead.format(name)}"
    )


def operand_formats(a, b, dtype):
    """The formats in which ``a`` and ``b`` are multiplied: equal, or two of FP8.

    Raises
    ------
    :exc:`DtypeError`
        If one of them is not made of real numbers, or the tensor engine does not multiply them as
        they are and ``dtype`` does not choose a format.
    """
    for name, array in (("a", a), ("b", b)):
        _check_real(array, name)
    if dtype is not None:
        fmt = as_format(dtype, "dtype", MATMUL_FORMATS)
        if fmt not in MATMUL_FORMATS:
            raise DtypeError(
                f"dtype={dtype!r}: the tensor engine does not multiply {fmt.name}; "
                f"use {_matmul_names()}"
            )
        return fmt, fmt
    fmts = []
    for name, array in (("a", a), ("b", b)):
        fmt = _multiplied(array.dtype)
        if fmt is None:
            raise DtypeError(
                f"{name} is {_describe(array.dtype)}, which the tensor engine does not multiply; "
                f"say to which format it may be rounded: dtype= one of {_matmul_names()}"
            )
        fmts.append(fmt)
    if fmts[0] is not fmts[1] and any(fmt.bits > 8 for fmt in fmts):
        raise DtypeError(
            f"a is {_describe(a.dtype)} and b is {_describe(b.dtype)}; say in which format to "
            f"multiply: dtype= one of {_matmul_names()}"
        )
    return tuple(fmts)


def _wide(array, name):
    """The array as binary64: exact, or off by less than its last bit with that bit set.

    The second kind (round to odd) rounds to any format of at most 51 bits as the exact value does.
    """
    _check_real(array, name)
    kind = array.dtype.kind
    if kind == "b":
        return array.astype(np.float64)
    if kind in "iu" and array.dtype.itemsize < 8:
        return array.astype(np.float64)
    if kind in "iu":
        negative = array < 0
        magnitude = array.astype(np.uint64)
        # Two's complement; also right for the most negative number.
        magnitude = np.where(negative, ~magnitude + np.uint64(1), magnitude)
        dropped = np.uint64((1 << 64 - _DOUBLE_BITS) - 1)
        large = magnitude >> np.uint64(_DOUBLE_BITS) != 0
        sticky = np.where(magnitude & dropped != 0, dropped + np.uint64(1), np.uint64(0))
        magnitude = np.where(large, magnitude & ~dropped | sticky, magnitude)
        wide = magnitude.astype(np.float64)
        return np.where(negative, -wide, wide)
    if kind == "f" and array.dtype.itemsize > 8:
        with np.errstate(all="ignore"):
            wide = array.astype(np.float64)
            rest = array - wide.astype(array.dtype)
            inexact = np.isfinite(wide) & (rest != 0)
            even = wide.view(np.uint64) & np.uint64(1) == 0
            toward = np.where(rest > 0, np.inf, -np.inf)
            return np.where(inexact & even, np.nextafter(wide, toward), wide)
    with np.errstate(all="ignore"):  # signaling NaN
        return array.astype(np.float64 if kind == "f" else np.float32).astype(np.float64)


def to_format(array, fmt, *, name="array", saturate=False):
    """Codes of ``array`` in ``fmt``, contiguous, each element rounded at most once to nearest even.

    An array that already has the format keeps its bits.
    """
    array = _native(np.asarray(array))
    if array.dtype == fmt.dtype and fmt in (FP32, _multiplied(array.dtype)):
        return np.ascontiguousarray(array)
    wide = _wide(array, name)
    return np.ascontiguousarray(fmt.encode(wide, saturate=saturate))


@dataclass(frozen=True)
class MatmulShape:
    """Shapes of ``a @ b`` by numpy's rules.

    Attributes
    ----------
    batch : tuple
        Broadcast batch dimensions.
    m, k, n : :class:`int`
    result : tuple
        Shape of the result.
    """

    a: tuple
    b: tuple
    batch: tuple
    m: int
    k: int
    n: int
    result: tuple

    @classmethod
    def of(cls, a, b):
        """The shape of the product of arrays with shapes ``a`` and ``b``.

        Raises
        ------
        :exc:`ShapeError`
            If numpy would not multiply them.
        """
        a, b = tuple(a), tuple(b)
        for name, shape in (("a", a), ("b", b)):
            if not shape:
                raise ShapeError(f"matmul: {name} is a scalar; it needs at least one dimension")
        left = (1, *a) if len(a) == 1 else a
        right = (*b, 1) if len(b) == 1 else b
        m, k = left[-2:]
        rows, n = right[-2:]
        if k != rows:
            raise ShapeError(
                f"matmul: a {a} has {k} columns but b {b} has {rows} rows: "
                "the inner dimensions must be equal"
            )
        try:
            batch = np.broadcast_shapes(left[:-2], right[:-2])
        except ValueError:
            raise ShapeError(
                f"matmul: the batch dimensions of a {a} and b {b} cannot be broadcast together"
            ) from None
        result = (*batch, *((m,) if len(a) > 1 else ()), *((n,) if len(b) > 1 else ()))
        return cls(a, b, batch, m, k, n, result)

    @property
    def is_empty(self):
        """Whether the answer is known without multiplying anything."""
        return 0 in (self.m, self.k, self.n, *self.batch)

    @property
    def macs(self):
        """Multiply-accumulates."""
        return prod(self.batch) * self.m * self.k * self.n

    def jobs(self, a, b):
        """``([M, K], [K, N])`` of every matrix product to be made, in the order of the result.

        Small matrices that share ``b`` are stacked.
        """
        left = a.reshape((1, *a.shape)) if a.ndim == 1 else a
        right = b.reshape((*b.shape, 1)) if b.ndim == 1 else b
        if prod(right.shape[:-2]) == 1 and left.ndim >= 2:
            left, right = left.reshape(-1, self.k), right.reshape(self.k, self.n)
            step = max(STACKED_ROWS // self.m, 1) * self.m
            for row in range(0, len(left), step):
                yield left[row : row + step], right
            return
        left = np.broadcast_to(left, (*self.batch, self.m, self.k))
        right = np.broadcast_to(right, (*self.batch, self.k, self.n))
        for index in np.ndindex(self.batch):
            yield left[index], right[index]
