"""Products too large for one program or for HBM: M and N are cut into slabs, K never is.

A program that multiplies a slab of rows of A by a slab of columns of B gives the bits of that part
of the whole product, since each element is a sum over all of K in the same order. Slabs of equal
size share one program.
"""

from dataclasses import dataclass

from ..rtl.arch.config import CoreConfig
from ..rtl.arch.isa import WORD_BYTES
from .allocator import ALIGNMENT

__all__ = ["PROGRAM_WORDS", "Product", "Slabs", "plan"]

PROGRAM_WORDS = 40_000
"""Instructions and descriptors of one program, unless K alone asks for more: 5 MiB, which take a
few seconds to compile."""

COMPILE_CYCLES = 2
"""Cycles that a simulation could make while one such word is compiled."""

RUN_CYCLES = 1000
"""About what a run takes before the array has work and after the last product."""


def _ceil(a, b):
    return -(-a // b)


@dataclass(frozen=True)
class Product:
    """``[M, K] @ [K, N]`` on a machine.

    Parameters
    ----------
    m, k, n : :class:`int`
    a_bytes, b_bytes, c_bytes : :class:`int`, bytes
        Of an element.
    passes : :class:`int`
        Matmul instructions for each pair of tiles: 4 for binary32.
    config : :class:`CoreConfig`
    """

    m: int
    k: int
    n: int
    a_bytes: int
    b_bytes: int
    c_bytes: int
    passes: int
    config: CoreConfig

    def words(self, m, n):
        """About the instructions and descriptors of a slab of ``m`` rows and ``n`` columns."""
        config = self.config
        tiles = _ceil(m, config.rows) * _ceil(n, config.psum_bank_words)
        matmuls = tiles * _ceil(self.k, config.rows) * self.passes
        loads = matmuls // 2 if self.passes > 1 else matmuls
        # Each tile of the result is copied out of PSUM and stored by all DMA engines.
        return matmuls + loads + tiles * (2 + config.dma_engines)

    def image_bytes(self, m, n):
        """About the size of the program of such a slab."""
        return WORD_BYTES * self.words(m, n)

    def cycles(self, m, n):
        """About the cycles of the whole product in such slabs, to compare them with others."""
        config, slabs = self.config, Slabs(self, m, n)
        rows, words = config.rows, config.psum_bank_words
        depth, strips = _ceil(self.k, rows), _ceil(n, words)

        def columns(part):
            """Cycles in which a tile of A meets ``part`` columns of B."""
            return _ceil(part, words) * max(_ceil(part, _ceil(part, words)), rows)

        down = (slabs.down - 1) * _ceil(m, rows) + _ceil(slabs.last_rows, rows)
        across = (slabs.across - 1) * columns(n) + columns(slabs.last_cols)
        streamed = down * depth * self.passes * across
        # How often each operand is read: a slab of B, if no strip of it fits SBUF, once for as many
        # rows as PSUM has banks for; a slab of A once for as many strips as fit.
        fit = 3 * config.sbuf_bytes // (4 * depth * _ceil(n, strips) * self.b_bytes)
        of_a = slabs.across * _ceil(strips, max(fit, 1))
        of_b = slabs.down * (1 if fit else _ceil(m, rows * config.psum_banks))
        moved = self.k * (self.m * self.a_bytes * of_a + self.n * self.b_bytes * of_b)
        return (
            max(streamed, moved // rows)  # operands are read while the array works
            + slabs.runs * RUN_CYCLES
            + len(slabs.shapes) * self.words(m, n) * COMPILE_CYCLES
        )


@dataclass(frozen=True)
class Slabs:
    """A product in slabs.

    Parameters
    ----------
    product : :class:`Product`
    rows, cols : :class:`int`
        Of a slab; the last ones may have fewer.
    keep : :class:`str`
        ``"a"`` or ``"b"``: all slabs of this operand lie in HBM from the first run to the last, and
        each slab of the other is written once. ``""``: HBM holds one slab of each.
    """

    product: Product
    rows: int
    cols: int
    keep: str = ""

    @property
    def down(self):
        """Slabs of A."""
        return _ceil(self.product.m, self.rows)

    @property
    def across(self):
        """Slabs of B."""
        return _ceil(self.product.n, self.cols)

    @property
    def last_rows(self):
        """Rows of the last slab of A."""
        return self.product.m - (self.down - 1) * self.rows

    @property
    def last_cols(self):
        """Columns of the last slab of B."""
        return self.product.n - (self.across - 1) * self.cols

    @property
    def runs(self):
        """Programs to run."""
        return self.down * self.across

    @property
    def shapes(self):
        """Rows and columns of the slabs that differ, of the most frequent first."""
        rows, cols = (self.rows, self.last_rows), (self.cols, self.last_cols)
        return list(dict.fromkeys((m, n) for m in rows for n in cols))

    @property
    def slots(self):
        """Bytes from one slab of A in HBM to the next, and the same of B."""
        sizes = (
            self.rows * self.product.k * self.product.a_bytes,
            self.product.k * self.cols * self.product.b_bytes,
        )
        return tuple(_ceil(size, ALIGNMENT) * ALIGNMENT for size in sizes)

    @property
    def buffers(self):
        """Bytes in HBM for slabs of A, slabs of B, and a slab of the result."""
        a, b = self.slots
        return [
            a * (self.down if self.keep == "a" else 1),
            b * (self.across if self.keep == "b" else 1),
            self.rows * self.cols * self.product.c_bytes,
        ]

    def order(self):
        """``(i, j)`` of the slabs of A and B, in the order in which the fewest bytes are written.

        The slab that changes last is written once.
        """
        p = self.product
        a, b = p.m * p.k * p.a_bytes, p.k * p.n * p.b_bytes
        a_last = self.keep == "b" or (not self.keep and a + b * self.down < a * self.across + b)
        if a_last:
            return [(i, j) for i in range(self.down) for j in range(self.across)]
        return [(i, j) for j in range(self.across) for i in range(self.down)]

    def part(self, i, j):
        """Rows and columns of a slab, as slices of the result."""
        p = self.product
        return (
            slice(i * self.rows, min((i + 1) * self.rows, p.m)),
            slice(j * self.cols, min((j + 1) * self.cols, p.n)),
        )


def _sizes(total, *units):
    """Sizes of about equal pieces of ``total``, large ones first.

    Each is a multiple of the units below it, or of some of them.
    """
    found, pieces = {total}, 1
    while True:
        size = _ceil(total, pieces)
        below = [unit for unit in units if unit < size]
        found |= {min(_ceil(size, unit) * unit, total) for unit in below or [1]}
        if size == 1:
            return sorted(found, reverse=True)
        pieces = max(pieces + 1, pieces * 9 // 8)


def _candidates(product):
    """Slabs in the order in which they are wanted, the whole product first."""
    whole, config = (product.m, product.n), product.config
    yield whole
    heights = _sizes(product.m, config.rows, config.rows * config.psum_banks)
    widths = _sizes(product.n, 16, config.psum_bank_words)
    found = [(m, n) for m in heights for n in widths if (m, n) != whole]
    yield from sorted(found, key=lambda slab: product.cycles(*slab))


def plan(product, room, image_bytes):
    """Choose the slabs that take the fewest cycles, bound the programs, and fit HBM.

    Parameters
    ----------
    product : :class:`Product`
    room : callable
        Whether pieces of these sizes fit HBM, placed in this order.
    image_bytes : callable
        Size of the largest program of :class:`Slabs`; compiles them.

    Returns
    -------
    :class:`Slabs` or ``None``
        ``None`` if not even one element of the result fits with what it is made of.
    """
    tile = product.config.rows, product.config.psum_bank_words
    more = 1.0  # size of programs compared to what was expected

    def fitting(slabs, image):
        """With all of an operand in HBM, if possible."""
        for keep in ("a", "b", ""):
            kept = Slabs(product, slabs.rows, slabs.cols, keep)
            if room([*kept.buffers, image]):
                return kept
        return None

    for m, n in _candidates(product):
        bounded = product.words(m, n) <= PROGRAM_WORDS or (m <= tile[0] and n <= tile[1])
        slabs, expected = Slabs(product, m, n), product.image_bytes(m, n)
        if not bounded or not room([*slabs.buffers, int(more * expected)]):
            continue
        image = image_bytes(slabs)
        found = fitting(slabs, image)
        if found is not None:
            return found
        more = max(more, image / expected)
    least = Slabs(product, 1, 1)
    if room([*least.buffers, product.image_bytes(1, 1)]):
        return fitting(least, image_bytes(least))
    return None
