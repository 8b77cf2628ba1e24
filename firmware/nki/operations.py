"""Elementwise functions and reductions of ``nki.language``: a table, and how each one is made.

Each is two things. ``nki.isa`` takes it as the name of an operation, as in
``nisa.tensor_tensor(dst, a, b, op=nl.add)``. Called with tiles, ``nl.add(a, b)``, it makes the tile
of its result and records the instruction that fills it.
"""

import builtins
import math

from ...rtl.arch import formats as _formats
from ...rtl.arch.isa import AluOp, Function, ReduceOp
from . import trace as _trace
from .tensor import NkiTensor

__all__ = [
    "abs", "abs_max", "abs_min", "add", "all",
    "arctan", "bitwise_and", "bitwise_or", "bitwise_xor", "copy", "divide", "equal", "erf",
    "erf_dx", "exp", "gelu", "gelu_apprx_sigmoid", "gelu_apprx_tanh", "gelu_apprx_tanh_dx",
    "gelu_dx", "greater", "greater_equal", "invert", "left_shift", "less", "less_equal", "log",
    "logical_and", "logical_not", "logical_or", "logical_xor", "max", "maximum", "mean", "min",
    "minimum", "mish", "multiply", "negative", "not_equal", "prelu", "reciprocal", "relu",
    "right_shift", "rsqrt", "sigmoid", "sign", "silu", "silu_dx", "sin", "softplus", "sqrt",
    "square", "subtract", "sum", "tanh", "where",
]  # fmt: skip

ALU: dict[AluOp, "Operation"] = {}
"""What ``nki.isa`` takes as an operation of the vector engine on two elements."""
REDUCTIONS: dict[ReduceOp, "Operation"] = {}
"""What ``nisa.tensor_reduce`` takes, by the instruction's operation."""
FUNCTIONS: dict[Function, "Operation"] = {}
"""What ``nisa.activation`` takes."""


class Operation:
    """A function of ``nki.language`` that names an operation of an engine.

    Attributes
    ----------
    names : :class:`Operation`
        The row of :data:`ALU`, :data:`REDUCTIONS` or :data:`FUNCTIONS` that it names, if any.
    """

    def __init__(self, name, doc):
        self.__name__ = name
        self.__doc__ = doc
        self.names = self

    def __repr__(self):
        return f"nl.{self.__name__}"


class Binary(Operation):
    """Two elements make one, on the vector engine."""

    def __init__(self, name, alu):
        super().__init__(name, f"``x {alu.name.lower()} y``, element by element: a new tile.")
        ALU[alu] = self
        if alu in list(ReduceOp):
            REDUCTIONS[ReduceOp(alu)] = self

    def __call__(self, x, y, dtype=None):
        from . import isa

        dst = _result(self, (x, y), dtype)
        if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
            isa.tensor_tensor(dst, x.broadcast_to(dst.shape), y.broadcast_to(dst.shape), self)
        elif isinstance(x, NkiTensor):
            isa.tensor_scalar(dst, x, self, y)
        else:
            isa.tensor_scalar(dst, y, self, x, reverse0=True)
        return dst


class Unary(Operation):
    """A function of one element, on the scalar engine."""

    def __init__(self, name, function):
        text = (
            f"{function.name.lower().replace('_', ' ')} of ``x``, element by element: a new tile."
        )
        super().__init__(name, text)
        FUNCTIONS[function] = self

    def __call__(self, x, dtype=None):
        from . import isa

        dst = _result(self, (x,), dtype)
        isa.activation(dst, self, x)
        return dst


class _Copy(Unary):
    """As an operation a function of the scalar engine; called, a copy by the vector engine."""

    def __call__(self, x, dtype=None):
        from . import isa

        dst = _result(self, (x,), dtype)
        isa.tensor_copy(dst, x)
        return dst


class _Invert(Operation):
    """An operation of the vector engine that ignores its second operand."""

    def __init__(self):
        super().__init__("invert", "all bits of ``x`` inverted, element by element: a new tile.")
        ALU[AluOp.BITWISE_NOT] = self

    def __call__(self, x, dtype=None):
        from . import isa

        dst = _result(self, (x,), dtype)
        isa.tensor_scalar(dst, x, self, 0)
        return dst


class _Where(Operation):
    """A choice between two, element by element, on the vector engine."""

    def __init__(self):
        super().__init__(
            "where",
            "``x`` where ``condition`` is not zero, else ``y``, element by element: a new tile. "
            "``condition`` is a tile, and ``x`` or ``y``.",
        )

    def __call__(self, condition, x, y, dtype=None):
        from . import isa

        trace = _trace.current()
        if not isinstance(condition, NkiTensor):
            raise trace.error(f"nl.where: condition must be a tile, not {condition!r}")
        dst = _result(self, (x, y), dtype)
        if condition.dtype.is_float:
            condition = not_equal(condition, 0, dtype=_formats.UINT8)
        if isinstance(y, NkiTensor):
            isa.tensor_copy(dst, y.broadcast_to(dst.shape))
        else:
            isa.memset(dst, y)
        chosen = x.broadcast_to(dst.shape) if isinstance(x, NkiTensor) else x
        isa.tensor_copy_predicated(dst, chosen, condition.broadcast_to(dst.shape))
        return dst


class Reduction(Operation):
    """Last axes of a tile become one element, on the vector engine."""

    def __init__(self, name, operation, *, named=False, average=False):
        over = "the average" if average else f"``{operation!r}``"
        super().__init__(name, f"{over} over the last axes of ``x``: a new tile.")
        self.operation, self.average = operation, average
        if named:
            self.names = operation

    def __call__(self, x, axis, dtype=None, keepdims=False):
        from . import isa

        trace = _trace.current()
        axes = isa.free_axes(trace, repr(self), x, axis)
        kept = x.shape[: x.ndim - len(axes)]
        shape = (*kept, *(1 for _ in axes)) if keepdims else kept if len(kept) > 1 else (*kept, 1)
        dst = trace.allocate(shape, _format(trace, x.dtype if dtype is None else dtype), "sbuf")
        if not self.average:
            isa.tensor_reduce(dst, self.operation, x, axis)
            return dst
        n = x.size // math.prod(kept)
        sums = trace.allocate(shape, _formats.FP32, "sbuf", name=f"{x.name}_sum")
        isa.tensor_reduce(sums, self.operation, x, axis)
        isa.tensor_scalar(dst, sums, multiply, 1 / n)
        return dst


def _format(trace, dtype):
    try:
        return _formats.format_of(dtype)
    except TypeError as error:
        raise trace.error(str(error)) from None


def _result(operation, operands, dtype):
    """A new tile for the result, of the shape that the operands broadcast to.

    Without ``dtype`` its format is that of the operands, or of the widest; float32 where two of
    that width differ, or where a number with a point meets integers.
    """
    trace = _trace.current()
    tiles = [v for v in operands if isinstance(v, NkiTensor)]
    if not tiles:
        raise trace.error(f"{operation!r} needs a tile, not {', '.join(map(repr, operands))}")
    ndim = builtins.max(v.ndim for v in tiles)
    shapes = [(1,) * (ndim - v.ndim) + v.shape for v in tiles]
    shape = []
    for sizes in zip(*shapes, strict=True):
        wide = builtins.max(sizes)
        if any(n not in (1, wide) for n in sizes):
            raise trace.error(
                f"{operation!r}: shapes {' and '.join(str(list(v.shape)) for v in tiles)} do not "
                "broadcast to each other"
            )
        shape.append(wide)
    if any(v.ndim != ndim or v.shape[0] != shape[0] for v in tiles):
        raise trace.error(
            f"{operation!r}: {' and '.join(str(v) for v in tiles)} have different partitions; no "
            "engine copies from one partition to all, but DMA does: load with "
            "nisa.dma_copy(tile, source.broadcast_to(...))"
        )
    if dtype is None:
        fmt = builtins.max((v.dtype for v in tiles), key=lambda f: (f.is_float, f.bytes))
        if any(v.dtype is not fmt and v.dtype.bytes == fmt.bytes for v in tiles):
            fmt = _formats.FP32
        if not fmt.is_float and any(isinstance(v, float) for v in operands):
            fmt = _formats.FP32
    else:
        fmt = _format(trace, dtype)
    return trace.allocate(tuple(shape), fmt, "sbuf")


# The table ----------------------------------------------------------------------------------------

add = Binary("add", AluOp.ADD)
subtract = Binary("subtract", AluOp.SUBTRACT)
multiply = Binary("multiply", AluOp.MULTIPLY)
maximum = Binary("maximum", AluOp.MAX)
minimum = Binary("minimum", AluOp.MIN)
abs_max = Binary("abs_max", AluOp.ABS_MAX)
abs_min = Binary("abs_min", AluOp.ABS_MIN)
equal = Binary("equal", AluOp.EQUAL)
not_equal = Binary("not_equal", AluOp.NOT_EQUAL)
greater_equal = Binary("greater_equal", AluOp.GREATER_EQUAL)
greater = Binary("greater", AluOp.GREATER)
less_equal = Binary("less_equal", AluOp.LESS_EQUAL)
less = Binary("less", AluOp.LESS)
logical_and = Binary("logical_and", AluOp.LOGICAL_AND)
logical_or = Binary("logical_or", AluOp.LOGICAL_OR)
logical_xor = Binary("logical_xor", AluOp.LOGICAL_XOR)
bitwise_and = Binary("bitwise_and", AluOp.BITWISE_AND)
bitwise_or = Binary("bitwise_or", AluOp.BITWISE_OR)
bitwise_xor = Binary("bitwise_xor", AluOp.BITWISE_XOR)
invert = _Invert()
left_shift = Binary("left_shift", AluOp.LEFT_SHIFT)
right_shift = Binary("right_shift", AluOp.RIGHT_SHIFT)

copy = _Copy("copy", Function.COPY)
square = Unary("square", Function.SQUARE)
abs = Unary("abs", Function.ABS)
sign = Unary("sign", Function.SIGN)
relu = Unary("relu", Function.RELU)
prelu = Unary("prelu", Function.PRELU)
exp = Unary("exp", Function.EXP)
log = Unary("log", Function.LOG)
sqrt = Unary("sqrt", Function.SQRT)
rsqrt = Unary("rsqrt", Function.RSQRT)
reciprocal = Unary("reciprocal", Function.RECIPROCAL)
tanh = Unary("tanh", Function.TANH)
sigmoid = Unary("sigmoid", Function.SIGMOID)
gelu = Unary("gelu", Function.GELU)
gelu_dx = Unary("gelu_dx", Function.GELU_DX)
gelu_apprx_tanh = Unary("gelu_apprx_tanh", Function.GELU_TANH)
gelu_apprx_tanh_dx = Unary("gelu_apprx_tanh_dx", Function.GELU_TANH_DX)
gelu_apprx_sigmoid = Unary("gelu_apprx_sigmoid", Function.GELU_SIGMOID)
silu = Unary("silu", Function.SILU)
silu_dx = Unary("silu_dx", Function.SILU_DX)
softplus = Unary("softplus", Function.SOFTPLUS)
mish = Unary("mish", Function.MISH)
erf = Unary("erf", Function.ERF)
erf_dx = Unary("erf_dx", Function.ERF_DX)
sin = Unary("sin", Function.SIN)
arctan = Unary("arctan", Function.ARCTAN)

sum = Reduction("sum", add)
max = Reduction("max", maximum, named=True)
min = Reduction("min", minimum, named=True)
all = Reduction("all", logical_and)
mean = Reduction("mean", add, average=True)


where = _Where()


def negative(x, dtype=None):
    """``-x``, element by element: a new tile."""
    return multiply(x, -1, dtype)


def logical_not(x, dtype=None):
    """1 where ``x`` is zero, else 0: a new tile."""
    return equal(x, 0, dtype)


def divide(x, y, dtype=None):
    """Refused: no engine divides."""
    del dtype
    raise _trace.current().error(
        f"divide: no engine divides {x} by {y}; multiply by nl.reciprocal(y), or by 1 / y where y "
        "is a number"
    )
