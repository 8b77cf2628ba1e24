"""Run arrays through a small component: Verilog, Verilator, a loop in C++, numpy arrays in and out.

pysim steps a component some thousand times a second; this some million times.
"""

import ctypes

import numpy as np
import pytest
from amaranth.back import verilog
from amaranth.lib import wiring
from makalu.sim import toolchain

_TYPES = {8: "uint8_t", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t"}


def _word(width):
    return next(word for word in _TYPES if width <= word)


class CompiledComponent:
    """A component compiled to a loop over vectors.

    Parameters
    ----------
    component : :class:`~amaranth.lib.wiring.Component`
        Uses the ``sync`` domain only; ports of at most 64 bits.
    change : callable(:class:`str`), optional
        Changes the Verilog before it is compiled.
    extra_inputs : :class:`dict`, optional
        Width by name of the inputs that ``change`` adds.
    """

    def __init__(self, component, *, change=None, extra_inputs=None):
        self.inputs, self.outputs = {}, {}
        for path, member, _ in component.signature.flatten(component):
            ports = self.inputs if member.flow == wiring.In else self.outputs
            ports["__".join(str(part) for part in path)] = _word(
                len(component_port(component, path))
            )
        self.inputs |= {name: _word(width) for name, width in (extra_inputs or {}).items()}
        name = type(component).__name__.lower()
        text = verilog.convert(component, name="dut", emit_src=False, strip_internal_attrs=True)
        if change is not None:
            text = change(text)
        try:
            library = toolchain.build_verilated(
                name=name, verilog=text, top="dut", glue=self._glue(clocked=" clk" in text)
            )
        except toolchain.ToolMissing as missing:
            pytest.skip(str(missing))
        self._run = ctypes.CDLL(str(library)).run_vectors
        self._run.restype = None

    def _glue(self, *, clocked):
        def cast(kind, word, index):
            return f"(({_TYPES[word]} *)({kind}[{index}]))"

        drive = "\n".join(
            f"      at = cycle - delay[{i}];\n"
            f"      dut.{port} = at >= 0 && at < n ? {cast('in', word, i)}[at] : 0;"
            for i, (port, word) in enumerate(self.inputs.items())
        )
        take = "\n".join(
            f"      {cast('out', word, i)}[at] = dut.{port};"
            for i, (port, word) in enumerate(self.outputs.items())
        )
        zero = "".join(f" dut.{port} = 0;" for port in self.inputs)
        edge = "dut.clk = 0; dut.eval(); dut.clk = 1; dut.eval();" if clocked else "dut.eval();"
        reset = f"dut.rst = 1; {edge} {edge} dut.rst = 0;" if clocked else ""
        return f"""
#include "Vtop.h"
#include "verilated.h"
#include <cstdint>
extern "C" void run_vectors(void **in, void **out, long n, const long *delay, long latency) {{
    VerilatedContext context;
    Vtop dut{{&context}};
   {zero}
    {reset}
    for (long cycle = 0; cycle < n + (latency ? latency - 1 : 0); cycle++) {{
      long at;
{drive}
      {edge}
      at = latency ? cycle - (latency - 1) : cycle;
      if (at < 0) continue;
{take}
    }}
}}
"""

    def __call__(self, *, latency, delays=None, **inputs):
        """Apply one vector per cycle.

        Parameters
        ----------
        latency : :class:`int`, cycles
            From a vector to its results; 0 for a combinational component.
        delays : :class:`dict`, optional
            By how many cycles an input comes later than the others.
        inputs : arrays
            By port name; nested ports are joined by ``__``. Scalars are broadcast, ports left out
            are 0.

        Returns
        -------
        :class:`dict`
            Array of results by output port.
        """
        unknown = sorted(inputs.keys() - self.inputs.keys())
        assert not unknown, f"no input {unknown}; there are {list(self.inputs)}"
        arrays = np.broadcast_arrays(*(np.asarray(value) for value in inputs.values()))
        n = arrays[0].size
        given = dict(zip(inputs, arrays, strict=True))
        feeds = []
        for port, word in self.inputs.items():
            array = np.zeros(n, np.uint64) if port not in given else given[port].ravel()
            feeds.append(np.ascontiguousarray(array.astype(f"u{word // 8}")))
        results = {port: np.zeros(n, f"u{word // 8}") for port, word in self.outputs.items()}

        def pointers(arrays):
            return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))

        delay = [(delays or {}).get(port, 0) for port in self.inputs]
        self._run(
            pointers(feeds),
            pointers(list(results.values())),
            ctypes.c_long(n),
            (ctypes.c_long * len(delay))(*delay),
            ctypes.c_long(latency),
        )
        return results


def component_port(component, path):
    """The port of ``component`` at ``path``, as a value."""
    value = component
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value.as_value() if hasattr(value, "as_value") else value


_compiled = {}


def run_vectors(component, *, latency, delays=None, **inputs):
    """Run arrays through ``component``; see :meth:`CompiledComponent.__call__`.

    Components of the same class and signature are compiled once per test run.
    """
    key = (type(component), repr(component.signature), repr(sorted(_plain(component).items())))
    if key not in _compiled:
        _compiled[key] = CompiledComponent(component)
    else:
        component._MustUse__used = True
    return _compiled[key](latency=latency, delays=delays, **inputs)


def _plain(component):
    """Constructor parameters kept as attributes: whatever prints faithfully."""
    return {
        name: value
        for name, value in vars(component).items()
        if isinstance(value, (int, str, bool, float))
    }


def assert_equal_bits(got, expected, **context):
    """Compare two integer arrays; a failure shows the first few differences in hexadecimal."""
    got, expected = np.asarray(got).ravel(), np.asarray(expected).ravel()
    assert got.shape == expected.shape
    assert got.size, "nothing was compared"
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        lines = [f"{wrong.size} of {got.size} differ:"]
        for i in wrong[:8]:
            inputs = ", ".join(
                f"{name}={int(np.broadcast_to(np.asarray(a).ravel(), got.shape)[i]):#x}"
                for name, a in context.items()
            )
            lines.append(f"  [{i}] got {int(got[i]):#x}, expected {int(expected[i]):#x}; {inputs}")
        raise AssertionError("\n".join(lines))
