"""What the RTL simulators simulate: a core and its HBM; only the host's register bus comes out."""

from amaranth.hdl import ClockDomain, DomainRenamer, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, connect, flipped

from ..rtl.arch.registers import ADDRESS_BITS
from ..rtl.core import Core
from ..rtl.lib.axi import AXI4Lite
from .memory import Hbm, HbmSettings

__all__ = ["SimTop"]


class SimTop(wiring.Component):
    """A core with its memory.

    Parameters
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`
    settable : :class:`bool`
        As for :class:`~.memory.Hbm`; adds the port ``settings``.

    Members
    -------
    host : :py:`In(AXI4Lite(addr_bits=12))`
        The core's registers.
    settings : :py:`In(HbmSettings)`
        Only if settable.

    Attributes
    ----------
    core, hbm : components
    sync_domain : :class:`amaranth.hdl.ClockDomain`
        Of the core; propagates upwards.
    """

    def __init__(self, *, config, hbm=None, settable=False):
        self.settable = settable
        self.core = Core(config=config)
        self.hbm = Hbm(config=config, hbm=hbm, settable=settable)
        self.sync_domain = self.core.sync_domain
        super().__init__(
            {
                "host": In(AXI4Lite(addr_bits=ADDRESS_BITS)),
                **({"settings": In(HbmSettings)} if settable else {}),
            }
        )

    def elaborate(self, platform):
        m = Module()
        # Clock and reset are the core's.
        m.domains.memory = memory = ClockDomain("memory")
        memory.clk, memory.rst = self.sync_domain.clk, self.sync_domain.rst
        m.submodules.core = core = self.core
        m.submodules.hbm = DomainRenamer("memory")(self.hbm)
        hbm = self.hbm
        if self.settable:
            m.d.comb += hbm.settings.eq(self.settings)
        connect(m, flipped(self.host), core.host)
        connect(m, core.fetch, hbm.fetch)
        for i, port in enumerate(hbm.dma):
            connect(m, getattr(core, f"dma{i}"), port)
        return m
