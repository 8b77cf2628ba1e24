"""What a library of definitions accepts."""

import gc

import pytest
from amaranth.hdl import Fragment, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from makalu.rtl.lib.replicate import Library, Replicated


class Narrow(wiring.Component):
    def __init__(self, width=1):
        super().__init__({"i": In(width), "o": Out(width)})

    def elaborate(self, platform):
        m = Module()
        m.d.sync += self.o.eq(self.i)
        return m


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_a_name_stands_for_one_component():
    library = Library()
    first = Narrow()
    for component in (first, Narrow()):
        Fragment.get(Replicated(component, "narrow"), library)
    assert library.components == {"narrow": first}
    with pytest.raises(ValueError, match="another name"):
        Fragment.get(Replicated(Narrow(2), "narrow"), library)
    gc.collect()  # the warnings about unused components come when they go
