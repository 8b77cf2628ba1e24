"""Tensors of a kernel under trace: storage, and views that slice, permute, reshape, broadcast.

A view is arithmetic on (shape, byte steps, byte offset); nothing is copied. On-chip memory is two
dimensional, so a step of :data:`PARTITION` stands for "the next partition" and everything below it
for bytes within one.
"""

import math

from ...rtl.arch import formats

__all__ = ["PARTITION", "Access", "KernelError", "NkiTensor", "Storage", "TensorSpec", "byte_runs"]

PARTITION = 1 << 40
"""Byte step of the partition axis in view arithmetic."""


class KernelError(Exception):
    """A kernel that the machine cannot run, and where it says so.

    The message names the tensors, the limit and the value, and ends with ``file:line``.
    """


class TensorSpec:
    """Shape and number format of a kernel argument, where no array is at hand."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape, dtype):
        self.shape = tuple(int(n) for n in shape)
        self.dtype = formats.format_of(dtype)

    def __repr__(self):
        return f"TensorSpec({list(self.shape)}, {self.dtype.name})"


class Storage:
    """Memory behind views: one HBM tensor, SBUF tile or PSUM tile."""

    __slots__ = (
        "address", "buffer", "dtype", "index", "kind", "location", "name",
        "partition_bytes", "shape", "site", "span", "written", "zeros",
    )  # fmt: skip

    def __init__(self, *, index, name, shape, dtype, buffer, kind, location):
        self.index = index
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.buffer = buffer
        self.kind = kind
        self.location = location
        self.site = ()
        free = shape if buffer == "hbm" else shape[1:]
        self.partition_bytes = math.prod(free) * dtype.bytes
        self.address = None  # on chip: byte offset in each partition, given by the allocator
        self.span = None  # first and last use, as positions in the trace
        self.written = None  # PSUM: what matmuls have written, for their accumulate=None
        self.zeros = False  # asked for as zeros in PSUM

    def __str__(self):
        return f"{self.name} {list(self.shape)} {self.dtype.name} in {self.buffer}"


class Access:
    """A view as an engine's access pattern, relative to its tile."""

    __slots__ = (
        "cells", "count", "dims", "dtype", "elements", "inner", "joined", "offset", "row", "start",
        "storage",
    )  # fmt: skip

    def __init__(self, storage, dtype, start, count, offset, dims, joined=None):
        self.storage = storage
        self.dtype = dtype
        self.start = start
        self.count = count
        self.offset = offset  # bytes
        self.dims = dims  # innermost first, steps in elements
        self.joined = dims if joined is None else joined  # the same, as few as possible
        elements = 1
        for _, n in dims:
            elements *= n
        self.elements = elements
        self.inner = 0  # innermost dimensions that were asked to stay apart
        self.cells = None
        self.row = None

    @property
    def key(self):
        """Equal for accesses of the same elements in the same order."""
        return self.storage.index, self.dtype.code, self.start, self.count, self.offset, self.joined

    def is_in_place_of(self, other):
        """Whether both are the same elements in the same order, maybe of two formats."""
        index, _, *place = self.key
        of_other, _, *other_place = other.key
        same_size = self.dtype.bytes == other.dtype.bytes
        return same_size and index == of_other and place == other_place


def byte_runs(offset, dims, size, cap):
    """Byte intervals that a pattern touches, as a list of ``(first, last + 1)``.

    ``dims`` are ``(byte step, count)`` in any order. More than ``cap`` intervals are replaced by
    the one that encloses them.
    """
    rest = []
    for step, count in dims:
        if count == 0:
            return []
        if count > 1 and step:
            if step < 0:
                offset += step * (count - 1)
                step = -step
            rest.append((step, count))
    rest.sort()
    run, i = size, 0
    while i < len(rest) and rest[i][0] <= run:
        run += rest[i][0] * (rest[i][1] - 1)
        i += 1
    outer = rest[i:]
    if not outer:
        return [(offset, offset + run)]
    if math.prod(count for _, count in outer) > cap:
        return [(offset, offset + run + sum(step * (count - 1) for step, count in outer))]
    starts = [offset]
    for step, count in reversed(outer):
        starts = [start + step * j for start in starts for j in range(count)]
    return [(start, start + run) for start in starts]


def _merged(dims):
    """Drop dimensions of one element and join contiguous neighbours; innermost first."""
    out = []
    for step, count in dims:
        if count == 1:
            continue
        if out and step == out[-1][0] * out[-1][1]:
            out[-1] = (out[-1][0], out[-1][1] * count)
        else:
            out.append((step, count))
    return tuple(out) or ((0, 1),)


def _operator(name, *, reverse=False):
    """A method that calls a function of two operands of ``nki.language``."""

    def method(self, other):
        from . import operations

        function = getattr(operations, name)
        return function(other, self) if reverse else function(self, other)

    return method


def _function(name):
    """A method that calls a function of one operand of ``nki.language``."""

    def method(self):
        from . import operations

        return getattr(operations, name)(self)

    return method


class NkiTensor:
    """A tensor, or a view of one: what kernels slice and hand to ``nki.isa``.

    ``shape`` and ``dtype`` read as usual. ``t[i, a:b, c:d:s]`` takes integers, slices and ``...``;
    :meth:`reshape`, :meth:`permute`, :meth:`broadcast_to`, :meth:`ap` and :meth:`view` give other
    views. The first axis of a tile in SBUF or PSUM is the partition axis.
    """

    __slots__ = ("_access", "dtype", "offset", "shape", "steps", "storage")

    def __init__(self, storage, shape, steps, offset, dtype):
        self.storage = storage
        self.shape = shape
        self.steps = steps  # bytes; PARTITION for the next partition
        self.offset = offset
        self.dtype = dtype
        self._access = None

    @classmethod
    def whole(cls, storage):
        """The view of all of ``storage``."""
        steps, step = [], storage.dtype.bytes
        for n in reversed(storage.shape):
            steps.append(step)
            step *= n
        if storage.buffer != "hbm":
            steps[-1] = PARTITION
        return cls(storage, storage.shape, tuple(reversed(steps)), 0, storage.dtype)

    # Facts ----------------------------------------------------------------------------------------

    @property
    def ndim(self):
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def buffer(self):
        """``"hbm"``, ``"sbuf"`` or ``"psum"``."""
        return self.storage.buffer

    @property
    def name(self):
        """Name of the tensor that this is a view of."""
        return self.storage.name

    def is_contiguous(self):
        """Whether the elements follow each other in memory (on chip: within each partition)."""
        step = self.dtype.bytes
        for n, have in zip(reversed(self.shape), reversed(self.steps), strict=True):
            if n == 1 or have == PARTITION:
                continue
            if have != step:
                return False
            step *= n
        return True

    def __str__(self):
        return f"{self.storage.name} {list(self.shape)} {self.dtype.name} in {self.buffer}"

    def __repr__(self):
        return f"<NkiTensor {self}>"

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        raise TypeError(
            f"{self}: a tensor under trace has no values to iterate over; loop over indices"
        )

    def __bool__(self):
        raise TypeError(f"{self}: a tensor under trace has no values to test")

    # Views ----------------------------------------------------------------------------------------

    def __getitem__(self, index):
        if type(index) is not tuple:
            index = (index,)
        shape, steps = self.shape, self.steps
        if Ellipsis in index:
            at = index.index(Ellipsis)
            missing = len(shape) - len(index) + 1
            index = index[:at] + (slice(None),) * missing + index[at + 1 :]
        if len(index) > len(shape):
            raise IndexError(f"{self} has {len(shape)} axes, not {len(index)}")
        offset = self.offset
        new_shape, new_steps = [], []
        axis = 0
        for item in index:
            n, step = shape[axis], steps[axis]
            if type(item) is slice:
                first, last, by = item.start, item.stop, item.step
                first = 0 if first is None else first.__index__()
                last = n if last is None else last.__index__()
                by = 1 if by is None else by.__index__()
                if first < 0:
                    first += n
                if last < 0:
                    last += n
                if by < 1:
                    raise IndexError(f"{self}: slice step {by} on axis {axis} must be at least 1")
                if first < 0 or last > n or first > last:
                    raise IndexError(
                        f"{self}: slice {item.start}:{item.stop} on axis {axis} is outside its "
                        f"{n} elements (end ragged tiles with min(stop, {n}))"
                    )
                offset += first * step
                new_shape.append((last - first + by - 1) // by)
                new_steps.append(step * by)
            else:
                try:
                    at = item.__index__()
                except AttributeError:
                    raise TypeError(
                        f"{self}: index {item!r} on axis {axis} must be an integer or a slice"
                    ) from None
                if at < 0:
                    at += n
                if not 0 <= at < n:
                    raise IndexError(
                        f"{self}: index {item} on axis {axis} is outside its {n} elements"
                    )
                offset += at * step
            axis += 1
        return NkiTensor(
            self.storage,
            (*new_shape, *shape[axis:]),
            (*new_steps, *steps[axis:]),
            offset,
            self.dtype,
        )

    def permute(self, *axes):
        """Reorder the axes."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            axes = tuple(axes[0])
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"{self}: permute({axes}) must name each of its {self.ndim} axes once")
        return NkiTensor(
            self.storage,
            tuple(self.shape[i] for i in axes),
            tuple(self.steps[i] for i in axes),
            self.offset,
            self.dtype,
        )

    def transpose(self, *axes):
        """Reorder the axes; reverse them if none are given."""
        return self.permute(*(axes or reversed(range(self.ndim))))

    @property
    def T(self):
        """Axes reversed."""
        return self.transpose()

    def reshape(self, *shape):
        """Another shape of the same elements in the same order, where no copy is needed for it."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        if shape.count(-1) == 1:
            rest = math.prod(n for n in shape if n != -1)
            shape = tuple(self.size // max(rest, 1) if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"{self}: reshape to {list(shape)} changes the number of elements")
        # Join the axes that are contiguous to each other, then cut them anew.
        joined = []
        for n, step in zip(self.shape, self.steps, strict=True):
            if n == 1:
                continue
            if joined and joined[-1][1] == step * n and step < PARTITION:
                joined[-1] = (joined[-1][0] * n, step)
            else:
                joined.append((n, step))
        steps, at = [], 0
        left, step = joined[0] if joined else (1, self.dtype.bytes)
        for n in shape:
            if n == 1:
                steps.append(step * left)
                continue
            while left == 1 and at + 1 < len(joined):
                at += 1
                left, step = joined[at]
            if left % n:
                raise ValueError(
                    f"{self}: reshape to {list(shape)} would need a copy"
                    + (" (the partition axis stays as it is)" if self.buffer != "hbm" else "")
                )
            left //= n
            steps.append(step * left)
        return NkiTensor(self.storage, tuple(shape), tuple(steps), self.offset, self.dtype)

    def expand_dim(self, axis):
        """Insert an axis of one element."""
        axis = axis + self.ndim + 1 if axis < 0 else axis
        return NkiTensor(
            self.storage,
            (*self.shape[:axis], 1, *self.shape[axis:]),
            (*self.steps[:axis], 0, *self.steps[axis:]),
            self.offset,
            self.dtype,
        )

    def squeeze_dim(self, axis):
        """Remove an axis of one element."""
        axis = axis + self.ndim if axis < 0 else axis
        if self.shape[axis] != 1:
            raise ValueError(f"{self}: axis {axis} has {self.shape[axis]} elements, not one")
        return NkiTensor(
            self.storage,
            self.shape[:axis] + self.shape[axis + 1 :],
            self.steps[:axis] + self.steps[axis + 1 :],
            self.offset,
            self.dtype,
        )

    def broadcast_to(self, *shape):
        """Repeat axes of one element (step 0); read such a view, do not write it."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        missing = len(shape) - self.ndim
        if missing < 0:
            raise ValueError(f"{self}: broadcast_to({list(shape)}) has fewer axes")
        steps = []
        for i, n in enumerate(shape):
            have, step = (
                (1, 0) if i < missing else (self.shape[i - missing], self.steps[i - missing])
            )
            if have != n and have != 1:
                raise ValueError(f"{self}: axis of {have} elements cannot be broadcast to {n}")
            steps.append(step if have == n else 0)
        return NkiTensor(self.storage, tuple(shape), tuple(steps), self.offset, self.dtype)

    def broadcast(self, axis, size):
        """Repeat one axis of one element ``size`` times."""
        return self.broadcast_to(*self.shape[:axis], size, *self.shape[axis + 1 :])

    def ap(self, pattern, offset=0, dtype=None):
        """Raw access pattern over the whole tensor: ``[[step, count], ...]``, outermost first.

        Steps and offset count elements of the tensor laid out flat; on chip the first pair is the
        partition pair and its step is the number of elements in a partition. Any view this is
        called on is overridden.
        """
        storage = self.storage
        dtype = self.dtype if dtype is None else formats.format_of(dtype)
        pattern = [(int(step), int(count)) for step, count in pattern]
        if storage.buffer == "hbm":
            limit = storage.partition_bytes
            first = offset * dtype.bytes
            steps = [step * dtype.bytes for step, _ in pattern]
            low = first + sum(min(0, s * (n - 1)) for s, (_, n) in zip(steps, pattern, strict=True))
            high = first + sum(
                max(0, s * (n - 1)) for s, (_, n) in zip(steps, pattern, strict=True)
            )
            if low < 0 or high + dtype.bytes > limit:
                raise IndexError(f"{self}: ap({pattern}, offset={offset}) leaves the tensor")
        else:
            free = storage.partition_bytes // dtype.bytes
            if pattern[0][0] != free and pattern[0][1] != 1:
                raise ValueError(
                    f"{self}: the first pair of ap() is the partition pair, its step must be "
                    f"{free} (elements in a partition), not {pattern[0][0]}"
                )
            part, inner = divmod(offset, free)
            steps = [PARTITION, *(step * dtype.bytes for step, _ in pattern[1:])]
            pairs = pattern[1:]
            low = inner + sum(min(0, s * (n - 1)) for s, n in pairs)
            high = inner + sum(max(0, s * (n - 1)) for s, n in pairs)
            if low < 0 or high >= free or part + pattern[0][1] > storage.shape[0]:
                raise IndexError(f"{self}: ap({pattern}, offset={offset}) leaves the tile")
            first = part * PARTITION + inner * dtype.bytes
        return NkiTensor(storage, tuple(n for _, n in pattern), tuple(steps), first, dtype)

    def view(self, dtype):
        """The same bytes as another number format."""
        dtype = formats.format_of(dtype)
        old, new = self.dtype.bytes, dtype.bytes
        if old == new:
            return NkiTensor(self.storage, self.shape, self.steps, self.offset, dtype)
        n = self.shape[-1] * old
        if self.steps[-1] != old or n % new or len(self.shape) < 2:
            raise ValueError(f"{self}: its last axis cannot be read as {dtype.name}")
        return NkiTensor(
            self.storage, (*self.shape[:-1], n // new), (*self.steps[:-1], new), self.offset, dtype
        )

    # Arithmetic: a new tile each, as the function of nki.language makes it ----------------------

    __array_ufunc__ = None  # numpy leaves the operators to us

    __add__, __radd__ = _operator("add"), _operator("add", reverse=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", reverse=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", reverse=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", reverse=True)
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __and__, __or__, __xor__ = map(_operator, ("bitwise_and", "bitwise_or", "bitwise_xor"))
    __lshift__, __rshift__ = _operator("left_shift"), _operator("right_shift")
    __neg__, __invert__ = _function("negative"), _function("invert")

    # For engines ----------------------------------------------------------------------------------

    def access(self, inner=0):
        """This view as an :class:`Access`.

        The last ``inner`` axes get dimensions of their own, at least one, and are not joined with
        others; :attr:`Access.inner` says how many.

        Raises
        ------
        :exc:`ValueError`
            If no engine can walk it; the message says why.
        """
        found = self._access
        if found is not None and not inner:
            return found
        shape, steps, size = self.shape, self.steps, self.dtype.bytes
        if not shape:
            raise ValueError(
                f"{self} has lost its partition axis; keep it with a slice such as t[0:1]"
            )
        start, offset = divmod(self.offset, PARTITION)
        if shape[0] != 1 and steps[0] != PARTITION:
            raise ValueError(
                f"{self}: axis 0 must be the partition axis with all partitions in a row; "
                "keep it with slices such as t[0:1, :] and do not permute or stride it"
            )
        dims = []
        for step, count in zip(reversed(steps[1:]), reversed(shape[1:]), strict=True):
            if count == 1:
                dims.append((0, 1))
                continue
            if step >= PARTITION:
                raise ValueError(f"{self}: only axis 0 may run over partitions")
            if step % size:
                raise ValueError(f"{self}: a step of {step} bytes is not a multiple of {size}")
            dims.append((step // size, count))
        first = _merged(dims[:inner]) if inner else ()
        dims = (*first, *_merged(dims[inner:]))
        if inner and dims[len(first) :] == ((0, 1),):
            dims = first
        if len(dims) > 4:
            raise ValueError(
                f"{self}: {len(dims)} free dimensions remain, an engine walks at most 4"
            )
        for step, count in dims:
            if not -(1 << 15) <= step < 1 << 15 or count > 65535:
                raise ValueError(
                    f"{self}: step {step} (16 signed bits) or count {count} (16 bits) is too large"
                )
        if offset % size:
            raise ValueError(f"{self}: byte offset {offset} is not a multiple of {size}")
        found = Access(self.storage, self.dtype, start, shape[0], offset, dims)
        if inner:
            found.inner = len(first)
        else:
            self._access = found
        return found
