"""Performance events: what each block counts, declared once.

A block presents one :class:`~amaranth.lib.data.StructLayout` of increments per cycle; the control
block adds them to 64-bit counters, the driver reads them by name, reports group them by cause.
"""

from dataclasses import dataclass

from amaranth.lib import data

__all__ = ["COUNTERS", "Event", "events_layout", "events_of"]


@dataclass(frozen=True)
class Event:
    """One counter.

    Parameters
    ----------
    source : :class:`str`
        Block that raises it: ``core``, ``pe``, ``act``, ``dve``, ``pool``, ``queue_<engine>``,
        ``sbuf``, ``dma`` or ``fetch``.
    name : :class:`str`
        Name within the source; the counter is ``<source>_<name>``.
    width : :class:`int`, bits
        Of the increment in one cycle, given the core's configuration; 0 means "depends on config".
    meaning : :class:`str`
    unit : :class:`str`
    """

    source: str
    name: str
    width: int
    meaning: str
    unit: str = "cycles"

    @property
    def full_name(self):
        """Counter name."""
        return f"{self.source}_{self.name}"


_QUEUES = ("pe", "act", "dve", "pool", "sp")

COUNTERS = (
    Event("core", "cycles", 1, "Doorbell accepted until completion visible."),
    # Tensor engine
    Event("pe", "columns", 1, "A moving column entered the array."),
    Event(
        "pe", "passes", 21, "Useful multiply passes: rows x columns in use, per column.", "passes"
    ),
    Event("pe", "busy", 1, "A load, a wave or a drain was under way."),
    Event("pe", "wait_weights", 1, "A matmul was ready but its weights were still loading."),
    Event("pe", "wait_psum", 1, "A matmul was ready but the vector engine held its PSUM bank."),
    Event("pe", "wait_interval", 1, "A matmul waited for the PSUM adder's latency (N < 6)."),
    Event("pe", "wait_sbuf", 1, "A weight load lost its SBUF bank to another requester."),
    # Vector engine
    Event("dve", "elements", 1, "An element per partition entered the lanes."),
    Event("dve", "busy", 1, "An instruction was in the lanes."),
    Event(
        "dve", "wait_psum", 1, "An instruction was ready but the tensor engine held its PSUM bank."
    ),
    Event("dve", "wait_sbuf", 1, "A read lost its SBUF bank, or yielded to a starving DMA."),
    # Queues
    *(
        event
        for q in _QUEUES
        for event in (
            Event(f"queue_{q}", "issued", 1, "An instruction was issued.", "instructions"),
            Event(f"queue_{q}", "wait_semaphore", 1, "The head waited for a semaphore."),
            Event(f"queue_{q}", "wait_engine", 1, "The head waited for its engine."),
            Event(f"queue_{q}", "wait_fetch", 1, "The queue had instructions left but held none."),
        )
    ),
    # SBUF: cycles in which a requester wanted a bank and did not get it
    Event("sbuf", "conflict_weights", 1, "Weight reads delayed."),
    Event(
        "sbuf",
        "conflict_vector_read",
        2,
        "Reads of the vector and scalar engine delayed, summed over ports.",
        "port cycles",
    ),
    Event("sbuf", "conflict_dma_read", 8, "DMA reads delayed, summed over groups.", "group cycles"),
    Event(
        "sbuf", "conflict_dma_write", 8, "DMA writes delayed, summed over groups.", "group cycles"
    ),
    # DMA, summed over engines
    Event("dma", "busy", 8, "Engines with work.", "engine cycles"),
    Event("dma", "read_bytes", 12, "Useful bytes read from HBM by descriptors.", "bytes"),
    Event("dma", "write_bytes", 12, "Useful bytes written to HBM by descriptors.", "bytes"),
    Event("dma", "descriptor_bytes", 12, "Bytes of descriptors fetched.", "bytes"),
    Event("dma", "wait_read", 8, "Engines with reads outstanding and no data.", "engine cycles"),
    Event("dma", "wait_sbuf", 8, "Engines held back by SBUF.", "engine cycles"),
    Event("fetch", "bytes", 4, "Bytes of instructions fetched.", "bytes"),
    # Last, so that the addresses of the others stay what they were.
    Event("dma", "sbuf_beats", 9, "Beats that SBUF took from or gave to descriptors.", "beats"),
    # Scalar engine
    Event("act", "elements", 1, "An element per partition entered the lanes."),
    Event("act", "busy", 1, "An instruction was in the lanes."),
    Event("act", "wait_psum", 1, "An instruction was ready but another engine held its PSUM bank."),
    Event("act", "wait_sbuf", 1, "A read or write lost its SBUF bank, or yielded to DMA."),
    Event("act", "wait_table", 1, "An instruction waited for its function's table."),
    # GpSimd engine
    Event("pool", "elements", 1, "An element per partition entered the lanes."),
    Event("pool", "busy", 1, "An instruction was in the lanes."),
    Event("pool", "wait_sbuf", 1, "A read or write lost its SBUF bank, or yielded to DMA."),
)


def events_of(source):
    """The events that ``source`` raises."""
    return tuple(event for event in COUNTERS if event.source == source)


def events_layout(source):
    """Increments of ``source`` per cycle as an Amaranth layout, named by :attr:`Event.name`."""
    return data.StructLayout({event.name: event.width for event in events_of(source)})
