"""Number formats: codes, value codec, numpy dtype. The only place that knows how bits mean numbers.

Formats are data. A :class:`FloatFormat` or :class:`IntFormat` decodes codes to exact numpy float64
values and rounds exact values to codes, vectorised; the hardware takes its widths from the same
objects. Witness: ``ml_dtypes`` and numpy (``tests/arch/test_formats.py``).
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

__all__ = [
    "BF16", "FORMATS", "FP8_E3M4", "FP8_E4M3", "FP8_E4M3FN", "FP8_E5M2", "FP16", "FP32", "INT8",
    "INT16", "INT32", "INTEGER_FORMATS", "TF32", "UINT8", "UINT16", "UINT32", "FloatFormat",
    "IntFormat", "format_by_code", "format_of",
]  # fmt: skip

CANONICAL_NAN = 0x7FC00000
"""The one NaN that binary32 arithmetic of the core produces."""


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Parameters
    ----------
    name : :class:`str`
        Lower-case name, as ``nl`` spells it.
    code : :class:`int`
        Value of an instruction's dtype field.
    exp, man : :class:`int`, bits
        Exponent and stored significand.
    finite : :class:`bool`
        ``True`` if there is no infinity and only the all-ones code is NaN (OCP "FN").
    dtype : :class:`numpy.dtype`
        Storage on the host. TF32 is stored as binary32; its low 13 bits are rounded away on use.
    """

    name: str
    code: int
    exp: int
    man: int
    finite: bool
    dtype: np.dtype

    is_float = True

    @property
    def bias(self):
        """Exponent bias."""
        return (1 << (self.exp - 1)) - 1

    @property
    def bytes(self):
        """Storage size in bytes."""
        return self.dtype.itemsize

    @property
    def bits(self):
        """Storage size in bits."""
        return 8 * self.bytes

    @property
    def max(self):
        """Largest finite value."""
        if self.finite:
            top = (1 << self.exp) - 1
            return float(2.0 ** (top - self.bias) * (2 - 2.0 ** (1 - self.man)))
        return float(2.0 ** ((1 << self.exp) - 2 - self.bias) * (2 - 2.0**-self.man))

    @property
    def min_subnormal(self):
        """Smallest positive value."""
        return float(2.0 ** (1 - self.bias - self.man))

    def round(self, values, *, saturate=False):
        """Round exact values once to this format, ties to even, and return them as float64.

        Overflow goes to infinity (``finite`` formats: NaN) unless ``saturate``; then finite values
        and infinities clamp to the largest finite value. NaN stays NaN.
        """
        x = np.asarray(values, dtype=np.float64)
        with np.errstate(all="ignore"):
            _, e = np.frexp(x)
            quantum_exp = np.maximum(e - 1, 1 - self.bias) - self.man
            scaled = np.rint(np.ldexp(x, -quantum_exp))
            y = np.ldexp(scaled, quantum_exp)
            y = np.where(np.isfinite(x), y, x)
            over = np.abs(y) > self.max
            if saturate:
                limit = np.copysign(self.max, x)
            else:
                limit = np.full_like(x, np.nan) if self.finite else np.copysign(np.inf, x)
            return np.copysign(np.where(over, limit, y), x)

    def encode(self, values, *, saturate=False):
        """Round values (see :meth:`round`) and return their codes in :attr:`dtype`'s bytes.

        The result has dtype :attr:`dtype`. NaN becomes the format's canonical quiet NaN with the
        sign kept, as in ``ml_dtypes`` (numpy's float16 would keep payload bits).
        """
        rounded = self.round(values, saturate=saturate)
        rounded = np.where(np.isnan(rounded), np.copysign(np.nan, rounded), rounded)
        with np.errstate(all="ignore"):
            return rounded.astype(np.float32).astype(self.dtype)

    def decode(self, array):
        """Exact float64 values of an array of :attr:`dtype`."""
        array = np.asarray(array)
        with np.errstate(all="ignore"):
            values = array.astype(np.float32).astype(np.float64)
        return self.round(values) if self.name == "tf32" else values


@dataclass(frozen=True)
class IntFormat:
    """A two's complement or unsigned integer format; parameters as :class:`FloatFormat`."""

    name: str
    code: int
    signed: bool
    dtype: np.dtype

    is_float = False

    @property
    def bytes(self):
        """Storage size in bytes."""
        return self.dtype.itemsize

    @property
    def bits(self):
        """Storage size in bits."""
        return 8 * self.bytes

    @property
    def max(self):
        """Largest value."""
        return int(np.iinfo(self.dtype).max)

    @property
    def min(self):
        """Smallest value."""
        return int(np.iinfo(self.dtype).min)

    def encode(self, values, *, saturate=True):
        """Round values to nearest even, saturate, NaN to 0."""
        del saturate  # integers always saturate
        x = np.rint(np.asarray(values, dtype=np.float64))
        x = np.where(np.isnan(x), 0.0, np.clip(x, self.min, self.max))
        return x.astype(np.int64).astype(self.dtype)

    def decode(self, array):
        """Exact float64 values."""
        return np.asarray(array).astype(np.float64)


def _dt(name):
    return np.dtype(getattr(ml_dtypes, name))


FP32 = FloatFormat("float32", 1, 8, 23, False, np.dtype(np.float32))
TF32 = FloatFormat("tf32", 2, 8, 10, False, np.dtype(np.float32))
BF16 = FloatFormat("bfloat16", 3, 8, 7, False, _dt("bfloat16"))
FP16 = FloatFormat("float16", 4, 5, 10, False, np.dtype(np.float16))
FP8_E4M3 = FloatFormat("float8_e4m3", 5, 4, 3, False, _dt("float8_e4m3"))
FP8_E4M3FN = FloatFormat("float8_e4m3fn", 6, 4, 3, True, _dt("float8_e4m3fn"))
FP8_E5M2 = FloatFormat("float8_e5m2", 7, 5, 2, False, _dt("float8_e5m2"))
FP8_E3M4 = FloatFormat("float8_e3m4", 8, 3, 4, False, _dt("float8_e3m4"))
INT8 = IntFormat("int8", 9, True, np.dtype(np.int8))
UINT8 = IntFormat("uint8", 10, False, np.dtype(np.uint8))
INT16 = IntFormat("int16", 11, True, np.dtype(np.int16))
UINT16 = IntFormat("uint16", 12, False, np.dtype(np.uint16))
INT32 = IntFormat("int32", 13, True, np.dtype(np.int32))
UINT32 = IntFormat("uint32", 14, False, np.dtype(np.uint32))

FORMATS = (
    FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E4M3FN, FP8_E5M2, FP8_E3M4,
    INT8, UINT8, INT16, UINT16, INT32, UINT32,
)  # fmt: skip

MATMUL_FORMATS = tuple(fmt for fmt in FORMATS if fmt.is_float)
"""What the tensor engine multiplies."""

INTEGER_FORMATS = tuple(fmt for fmt in FORMATS if not fmt.is_float)
"""What the GpSimd engine adds and multiplies without rounding."""

ALIASES = {
    "fp32": FP32, "f32": FP32, "tf32": TF32, "bf16": BF16, "fp16": FP16, "f16": FP16,
    "fp8_e4m3": FP8_E4M3, "fp8_e4m3fn": FP8_E4M3FN, "fp8_e5m2": FP8_E5M2, "fp8_e3m4": FP8_E3M4,
}  # fmt: skip

_BY_CODE = {fmt.code: fmt for fmt in FORMATS}
_BY_NAME = {fmt.name: fmt for fmt in FORMATS} | ALIASES
_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS if fmt is not TF32}


def format_by_code(code):
    """The format with instruction code ``code``, or :exc:`ValueError`."""
    try:
        return _BY_CODE[code]
    except KeyError:
        raise ValueError(f"dtype code {code} is not a number format") from None


def format_of(dtype, among=FORMATS):
    """The format of a name (``"bf16"``, ``"bfloat16"``), numpy dtype, or format.

    Raises
    ------
    :exc:`TypeError`
        If the core has no such format; the message lists the names of those in ``among``.
    """
    if isinstance(dtype, FloatFormat | IntFormat):
        return dtype
    if isinstance(dtype, str) and dtype.lower() in _BY_NAME:
        return _BY_NAME[dtype.lower()]
    try:
        return _BY_DTYPE[np.dtype(dtype).newbyteorder("=")]
    except (KeyError, TypeError):
        aliased = [alias for alias, fmt in ALIASES.items() if fmt in among]
        names = ", ".join([*aliased, *(f.name for f in among if not f.is_float)])
        raise TypeError(
            f"{dtype!r} is not a number format of this core; use one of {names}"
        ) from None
