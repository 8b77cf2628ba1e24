"""Eight numbers of a partition: the greatest of a stream, or those that it is searched for."""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..arch.isa import EIGHT, EIGHT_LIMIT

__all__ = ["INDEX_BITS", "Eight"]

INDEX_BITS = (EIGHT_LIMIT - 1).bit_length()
"""Width of the number of an element."""


class Eight(wiring.Component):
    """Keeps eight binary32 numbers, in the order in which they leave it.

    Members
    -------
    x : :py:`In(32)`
        An element of the stream.
    value : :py:`In(32)`
        What ``load`` loads.
    load : :py:`In(1)`
        ``value`` becomes the last of the numbers, the first one is lost. What was found is
        forgotten.
    insert, clear : :py:`In(1)`
        ``x`` goes to its place among the numbers, which are in descending order, behind those that
        are equal to it; the last one is lost. ``clear``: there were none, which is a negative NaN
        of all ones.
    match, index : :py:`In(1)`, :py:`In(INDEX_BITS)`
        ``x``, the element ``index``, is looked for among the numbers that were not found before.
    flush : :py:`In(1)`
        The first number leaves.
    number : :py:`In(32)`
        What takes the place of an element that is found.
    indices : :py:`In(1)`
        With ``flush``: give the index at which the first number was found, all ones if it was not,
        instead of the number.
    o : :py:`Out(32)`
        Registered. With ``flush`` the first number or its index, with ``match`` ``number`` or
        ``x``, else unspecified.

    Timing
    ------
    At most one of ``load``, ``insert``, ``match`` and ``flush`` in every cycle; ``o`` one cycle
    later. The three greatest of three numbers (as small codes), the third of which is looked for::

        cycle   0  1  2  3  4  5  6  7
        insert  1  1  1  0  0  0  0  0
        clear   1  0  0  0  0  0  0  0
        match   0  0  0  1  0  0  0  0
        flush   0  0  0  0  1  1  1  0
        x       2  5  3  3  .  .  .  .
        number  .  .  .  9  .  .  .  .
        o       .  .  .  .  9  5  3  2
    """

    def __init__(self):
        super().__init__(
            {
                "x": In(32),
                "value": In(32),
                "load": In(1),
                "insert": In(1),
                "clear": In(1),
                "match": In(1),
                "index": In(INDEX_BITS),
                "flush": In(1),
                "number": In(32),
                "indices": In(1),
                "o": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        # As unsigned numbers: the order of binary32 numbers, and back.
        keys = [Signal(32, name=f"key{i}", reset_less=True) for i in range(EIGHT)]
        found = [Signal(name=f"found{i}", reset_less=True) for i in range(EIGHT)]
        where = [Signal(INDEX_BITS, name=f"where{i}", reset_less=True) for i in range(EIGHT)]

        def key_of(name, bits):
            key = Signal(32, name=name)
            m.d.comb += key.eq(bits ^ Cat(bits[31].replicate(31), C(1, 1)))
            return key

        x, value = key_of("x_key", self.x), key_of("value_key", self.value)
        first = Signal(32)
        m.d.comb += first.eq(keys[0] ^ Cat((~keys[0][31]).replicate(31), C(1, 1)))

        # Where an element belongs.
        old = [Mux(self.clear, 0, key) for key in keys]
        above = [x > key for key in old]
        # The first of the numbers that it equals and that is still to be found.
        open_ = [~is_found & (x == key) for is_found, key in zip(found, keys, strict=True)]
        taken = [open_[i] & ~Cat(open_[:i]).any() if i else open_[0] for i in range(EIGHT)]

        for i in range(EIGHT):
            last = i == EIGHT - 1
            with m.If(self.load):
                m.d.sync += [keys[i].eq(value if last else keys[i + 1]), found[i].eq(0)]
            with m.Elif(self.insert):
                before = Mux(above[i - 1], old[i - 1], x) if i else x
                m.d.sync += keys[i].eq(Mux(above[i], before, old[i]))
            with m.Elif(self.match):
                with m.If(taken[i]):
                    m.d.sync += [found[i].eq(1), where[i].eq(self.index)]
            with m.Elif(self.flush):
                if not last:
                    m.d.sync += [
                        keys[i].eq(keys[i + 1]),
                        found[i].eq(found[i + 1]),
                        where[i].eq(where[i + 1]),
                    ]
        with m.If(self.flush):
            m.d.sync += self.o.eq(
                Mux(self.indices, Mux(found[0], where[0], C(0xFFFFFFFF, 32)), first)
            )
        with m.Else():
            m.d.sync += self.o.eq(Mux(Cat(open_).any(), self.number, self.x))
        return m
