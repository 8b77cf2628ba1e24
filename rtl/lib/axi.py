"""AXI bundles, as seen by the manager. Member names are AXI's, so that ``dma0`` becomes the ports
``dma0__awvalid`` and so on, which public AXI models find by prefix ``dma0_``."""

from enum import IntEnum

from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

__all__ = ["AXI4", "AXI4Lite", "AXI4Read", "Resp"]


class Resp(IntEnum):
    """Response codes."""

    OKAY = 0
    EXOKAY = 1
    SLVERR = 2
    DECERR = 3


def _read_members(addr_bits, data_bytes):
    return {
        "arid": Out(1),
        "araddr": Out(addr_bits),
        "arlen": Out(8),
        "arsize": Out(3),
        "arburst": Out(2),
        "arvalid": Out(1),
        "arready": In(1),
        "rid": In(1),
        "rdata": In(8 * data_bytes),
        "rresp": In(2),
        "rlast": In(1),
        "rvalid": In(1),
        "rready": Out(1),
    }


def _write_members(addr_bits, data_bytes):
    return {
        "awid": Out(1),
        "awaddr": Out(addr_bits),
        "awlen": Out(8),
        "awsize": Out(3),
        "awburst": Out(2),
        "awvalid": Out(1),
        "awready": In(1),
        "wdata": Out(8 * data_bytes),
        "wstrb": Out(data_bytes),
        "wlast": Out(1),
        "wvalid": Out(1),
        "wready": In(1),
        "bid": In(1),
        "bresp": In(2),
        "bvalid": In(1),
        "bready": Out(1),
    }


class _Bus(wiring.Signature):
    """Common part: parameters, equality, printing."""

    def __init__(self, members, **parameters):
        super().__init__(members)
        self.parameters = parameters

    def __eq__(self, other):
        return type(self) is type(other) and self.parameters == other.parameters

    def __repr__(self):
        text = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{type(self).__name__}({text})"


class AXI4(_Bus):
    """AXI4 with one ID bit (driven 0: everything is in order).

    Parameters
    ----------
    addr_bits : :class:`int`, bits
    data_bytes : :class:`int`, bytes
    """

    def __init__(self, *, addr_bits, data_bytes=8):
        super().__init__(
            {**_write_members(addr_bits, data_bytes), **_read_members(addr_bits, data_bytes)},
            addr_bits=addr_bits,
            data_bytes=data_bytes,
        )


class AXI4Read(_Bus):
    """The read half of :class:`AXI4`."""

    def __init__(self, *, addr_bits, data_bytes=8):
        super().__init__(
            _read_members(addr_bits, data_bytes), addr_bits=addr_bits, data_bytes=data_bytes
        )


class AXI4Lite(_Bus):
    """AXI4-Lite with 32-bit data, as seen by the manager."""

    def __init__(self, *, addr_bits):
        super().__init__(
            {
                "awaddr": Out(addr_bits),
                "awprot": Out(3),
                "awvalid": Out(1),
                "awready": In(1),
                "wdata": Out(32),
                "wstrb": Out(4),
                "wvalid": Out(1),
                "wready": In(1),
                "bresp": In(2),
                "bvalid": In(1),
                "bready": Out(1),
                "araddr": Out(addr_bits),
                "arprot": Out(3),
                "arvalid": Out(1),
                "arready": In(1),
                "rdata": In(32),
                "rresp": In(2),
                "rvalid": In(1),
                "rready": Out(1),
            },
            addr_bits=addr_bits,
        )
