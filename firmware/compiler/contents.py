"""Nothing is read that was not written, and outputs are written whole.

What memory held before a kernel depends on who ran before it, so a kernel that reads it has no
result. Every operation of a trace is followed, element by element: reads of unwritten elements are
refused, except in PSUM tiles made by ``nl.zeros``, which are then filled with zeros for real.
"""

from ...rtl.arch import formats
from ...rtl.arch.isa import Memset
from ..nki.tensor import Access, KernelError, NkiTensor, Storage
from ..nki.trace import MATMUL, ZERO, Op
from ..nki.written import Written

__all__ = ["check_contents", "fill_zeros"]


def check_contents(trace):
    """Refuse reads of what was never written; return the tiles that need zeros.

    Lifetimes must be set.

    Returns
    -------
    list of :class:`~..nki.tensor.Storage`
        PSUM tiles of ``nl.zeros`` of which an operation reads elements that no matmul has written
        before: :func:`fill_zeros` fills them.

    Raises
    ------
    :exc:`~..nki.KernelError`
        Naming the tensor, the first elements in question and the kernel's line.
    """
    storages = trace.storages
    whole = [s.kind == "input" for s in storages]  # all written: nothing to look up
    masks = {}
    zeros = []

    def mask(storage, position):
        found = masks.get(storage.index)
        if found is None:
            found = masks[storage.index] = Written(storage)
        if position == storage.span[1] and storage.kind != "output":
            del masks[storage.index]  # nobody asks again
        return found

    def read(op, view, position):
        storage = view.storage
        found = mask(storage, position)
        key = view.key if type(view) is Access else None
        if key in found.regions:
            return
        if found.cells(view).all():
            if key is not None:
                found.regions.add(key)
        else:
            if not storage.zeros:
                raise _unwritten(trace, op, view, found)
            whole[storage.index] = True
            zeros.append(storage)

    for position, op in enumerate(trace.ops):
        dst = op.dst
        for view in op.sources:
            if not whole[view.storage.index]:
                read(op, view, position)
        storage = dst.storage
        if whole[storage.index]:
            continue
        if op.kind is MATMUL and op.fields["accumulate"]:
            read(op, dst, position)
        found = mask(storage, position)
        found.cells(dst)[...] = True
        # On chip tiles are small, and soon whole. HBM tensors are looked at when it matters.
        if storage.buffer != "hbm" and found.all():
            whole[storage.index] = True
            masks.pop(storage.index, None)

    for storage in trace.outputs:
        found = masks.get(storage.index)
        if found is None or not found.all():
            raise _unwritten_output(trace, storage, found)
    return zeros


def _unwritten(trace, op, view, found):
    storage = view.storage
    if view is op.dst:
        what = f"nc_matmul adds to {storage}"
    else:
        what = f"{storage} is read"
    remedy = {
        "hbm": "store there first, with nisa.dma_copy",
        "sbuf": "fill it first, with nisa.dma_copy, nisa.tensor_copy or nisa.memset",
        "psum": "multiply into it first, with nisa.nc_matmul, or allocate it with nl.zeros",
    }[storage.buffer]
    return KernelError(
        f"{what} before anything was written there: {found.missing(view)}; {remedy}, or read only "
        f"what was written\n  at {trace.where(op.location)}"
    )


def _unwritten_output(trace, storage, found):
    if found is None:
        problem = "nothing writes it"
    else:
        problem = f"not all of it is written: {found.missing()} is missing"
    return KernelError(
        f"{trace.name} returns {storage}, but {problem}; store every element of an output with "
        f"nisa.dma_copy\n  at {trace.where(storage.location)}"
    )


def fill_zeros(trace, tiles):
    """Fill PSUM tiles with zeros before their first use.

    Only the tensor engine writes PSUM, so this is a product of one row of zeros by another. Both
    are a single element of SBUF, read again and again, that is filled before the first product.

    Parameters
    ----------
    trace : :class:`~..nki.trace.Trace`
        Its operations change, so lifetimes have to be found anew.
    tiles : list of :class:`~..nki.tensor.Storage`, not empty
    """
    tiles = sorted(tiles, key=lambda s: s.span[0])
    element = Storage(
        index=len(trace.storages), name="zeros", shape=(1, 1), dtype=formats.BF16, buffer="sbuf",
        kind="scratch", location=tiles[0].location,
    )  # fmt: skip
    trace.storages.append(element)
    zero = NkiTensor.whole(element)
    ops, done = [], 0
    for tile in tiles:
        ops += trace.ops[done : tile.span[0]]
        done = tile.span[0]
        if tile is tiles[0]:
            ops.append(Op(Memset, zero.access(), (), {"value": 0}, tile.location))
        dst = NkiTensor.whole(tile).access()
        rows = tuple(zero.broadcast_to(1, n).access() for n in (dst.count, dst.elements))
        ops.append(Op(ZERO, dst, rows, {"accumulate": False}, tile.location))
    trace.ops[:] = ops + trace.ops[done:]
