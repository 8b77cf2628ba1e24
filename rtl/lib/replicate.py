"""One definition per replicated component.

Amaranth elaborates and emits every submodule instance apart, which for 16,384 processing elements
costs a quarter of an hour. :class:`Replicated` wraps a component that exists once per partition or
per processing element: in the simulator it is the component itself; in an export
(:class:`Library` given as platform) it is an instance of a module that is defined once.
"""

from amaranth.hdl import ClockSignal, Elaboratable, Instance, ResetSignal, Value
from amaranth.lib import wiring

__all__ = ["Library", "Replicated"]


class Library:
    """The platform of an export: collects the components that are defined once.

    Attributes
    ----------
    components : :class:`dict`
        Module name to one component of that name, in order of first use.
    """

    def __init__(self):
        self.components = {}
        self._keys = {}

    def add(self, name, component, key):
        """Remember ``component`` as the definition of module ``name``.

        Raises
        ------
        :exc:`ValueError`
            If the name stands for a different component already.
        """
        if name in self.components and self._keys[name] != key:
            raise ValueError(
                f"module {name!r} is defined by {self._keys[name]} and by {key}: "
                "give the second another name"
            )
        self.components.setdefault(name, component)
        self._keys.setdefault(name, key)


class Replicated(Elaboratable):
    """A submodule that shares its definition with its like.

    Parameters
    ----------
    component : :class:`~amaranth.lib.wiring.Component`
        Uses the ``sync`` domain only. Components with the same ``name`` must elaborate alike: what
        differs between instances (an index, a depth) is an input. Outputs may depend on inputs of
        the same cycle, but not those of a component that exists once per partition or processing
        element: the compiled simulator calls such components once per cycle.
    name : :class:`str`
        Module name in the export.
    """

    def __init__(self, component, name):
        self.component = component
        self.name = name

    def elaborate(self, platform):
        if not isinstance(platform, Library):
            return self.component
        component = self.component
        component._MustUse__used = True  # this one stays unelaborated: its definition stands for it
        key = (type(component).__qualname__, repr(component.signature))
        platform.add(self.name, component, key)
        ports = {"i_clk": ClockSignal(), "i_rst": ResetSignal()}
        for path, member, value in component.signature.flatten(component):
            prefix = "i" if member.flow == wiring.In else "o"
            ports[f"{prefix}_{'__'.join(str(part) for part in path)}"] = Value.cast(value)
        return Instance(self.name, **ports)
