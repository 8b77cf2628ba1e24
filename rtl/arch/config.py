"""Configuration of one core: the knobs, the machines built from them, and everything derived.

A configuration is a frozen Python value that prints as the code that makes it. Derived values are
properties. The machines ``TINY``, ``SMALL`` and ``TRN`` are constants; variants come from
:func:`dataclasses.replace`.
"""

import hashlib
from dataclasses import dataclass, fields

__all__ = ["SMALL", "TINY", "TRN", "CoreConfig", "HbmConfig", "named_config"]


def _power_of_two(value):
    return value > 0 and value & (value - 1) == 0


def _log2_up(value):
    """Bits needed to count ``value`` things."""
    return max(value - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """One NeuronCore.

    Parameters
    ----------
    name : :class:`str`
        How reports and program files call this machine.
    rows : :class:`int`, processing elements
        Edge of the square systolic array; also the number of SBUF and PSUM partitions.
    sbuf_bytes : :class:`int`, bytes
        SBUF per partition.
    psum_bank_bytes : :class:`int`, bytes
        One PSUM bank of one partition; holds ``psum_bank_bytes / 4`` binary32 sums.
    psum_banks : :class:`int`
        PSUM banks per partition.
    dma_queues : :class:`int`
        Descriptor queues of one DMA engine.
    dma_bursts : :class:`int`
        Read bursts of ``dma_burst_bytes`` that one DMA engine keeps in flight. Of shorter ones, and
        of reads of descriptors, there may be more: four times as many in all.
    dma_burst_bytes : :class:`int`, bytes
        Longest AXI burst a DMA engine issues.
    queue_depth : :class:`int`, instructions
        Instructions prefetched per queue.
    semaphores : :class:`int`
        Number of 32-bit semaphores.
    """

    name: str
    rows: int
    sbuf_bytes: int
    psum_bank_bytes: int
    psum_banks: int = 8
    dma_queues: int = 4
    dma_bursts: int = 16
    dma_burst_bytes: int = 256
    queue_depth: int = 16
    semaphores: int = 256

    def __post_init__(self):
        def check(condition, message):
            if not condition:
                raise ValueError(f"CoreConfig {self.name!r}: {message}")

        for field in fields(self):
            if field.name == "name":
                check(isinstance(self.name, str) and self.name, "name must be a non-empty string")
            else:
                value = getattr(self, field.name)
                check(
                    isinstance(value, int) and not isinstance(value, bool),
                    f"{field.name} must be an integer, not {value!r}",
                )
        check(
            _power_of_two(self.rows) and 4 <= self.rows <= 1024,
            f"rows must be a power of two from 4 to 1024, not {self.rows}",
        )
        check(
            self.sbuf_bytes % 64 == 0 and 64 <= self.sbuf_bytes <= 1 << 20,
            f"sbuf_bytes must be a multiple of 64 from 64 to 1048576, not {self.sbuf_bytes}",
        )
        check(
            _power_of_two(self.psum_bank_bytes) and 16 <= self.psum_bank_bytes <= 1 << 16,
            f"psum_bank_bytes must be a power of two from 16 to 65536, not {self.psum_bank_bytes}",
        )
        check(
            _power_of_two(self.psum_banks) and 1 < self.psum_banks <= 32,
            f"psum_banks must be a power of two from 2 to 32, not {self.psum_banks}",
        )
        check(
            _power_of_two(self.dma_queues) and 2 <= self.dma_queues <= 16,
            f"dma_queues must be a power of two from 2 to 16, not {self.dma_queues}",
        )
        check(
            _power_of_two(self.dma_bursts) and 2 <= self.dma_bursts <= 64,
            f"dma_bursts must be a power of two from 2 to 64, not {self.dma_bursts}",
        )
        check(
            _power_of_two(self.dma_burst_bytes) and 64 <= self.dma_burst_bytes <= 2048,
            f"dma_burst_bytes must be a power of two from 64 to 2048, not {self.dma_burst_bytes}",
        )
        check(
            _power_of_two(self.queue_depth) and 2 <= self.queue_depth <= 256,
            f"queue_depth must be a power of two from 2 to 256, not {self.queue_depth}",
        )
        check(
            _power_of_two(self.semaphores) and 8 <= self.semaphores <= 256,
            f"semaphores must be a power of two from 8 to 256, not {self.semaphores}",
        )

    # Geometry -------------------------------------------------------------------------------------

    @property
    def cols(self):
        """Columns of the array; the array is square."""
        return self.rows

    @property
    def partitions(self):
        """Partitions of SBUF and PSUM."""
        return self.rows

    @property
    def quadrant(self):
        """Partitions in a quadrant."""
        return self.rows // 4

    @property
    def partition_bits(self):
        """Width of a partition number."""
        return _log2_up(self.rows)

    # SBUF -----------------------------------------------------------------------------------------

    @property
    def sbuf_words(self):
        """16-byte words of one partition, both banks together."""
        return self.sbuf_bytes // 16

    @property
    def sbuf_word_bits(self):
        """Width of a word address; its low bit is the bank."""
        return _log2_up(self.sbuf_words)

    @property
    def sbuf_addr_bits(self):
        """Width of a byte address within one partition."""
        return _log2_up(self.sbuf_bytes)

    # PSUM -----------------------------------------------------------------------------------------

    @property
    def psum_bytes(self):
        """PSUM bytes per partition."""
        return self.psum_banks * self.psum_bank_bytes

    @property
    def psum_bank_words(self):
        """Binary32 sums in one bank of one partition; the longest moving operand."""
        return self.psum_bank_bytes // 4

    @property
    def psum_bank_bits(self):
        """Width of a bank number."""
        return _log2_up(self.psum_banks)

    @property
    def psum_word_bits(self):
        """Width of a word address within one bank."""
        return _log2_up(self.psum_bank_words)

    # DMA ------------------------------------------------------------------------------------------

    @property
    def group(self):
        """Partitions in one SBUF group; one DMA engine per group."""
        return min(8, self.rows)

    @property
    def dma_engines(self):
        """DMA engines, each with an AXI4 master of its own."""
        return self.rows // self.group

    # Address map ----------------------------------------------------------------------------------
    # One 48-bit map for every agent: bits 47..40 choose the window. Window 0 is HBM, window 1 is
    # SBUF (partition << sbuf_partition_log2 | byte offset). The rest is free for semaphores,
    # registers and other cores.

    @property
    def sbuf_partition_log2(self):
        """log2 of the distance of two partitions in the SBUF window."""
        return self.sbuf_addr_bits

    @property
    def sbuf_partition_stride(self):
        """Distance of two partitions in the SBUF window, in bytes."""
        return 1 << self.sbuf_partition_log2

    def sbuf_address(self, partition, offset):
        """48-bit address of byte ``offset`` of ``partition`` in the SBUF window."""
        return (SBUF_WINDOW << WINDOW_LOG2) | partition << self.sbuf_partition_log2 | offset

    # Identity -------------------------------------------------------------------------------------

    @property
    def fingerprint(self):
        """32-bit hash of every parameter; a program built for another one is refused.

        The name takes no part: two machines with the same parameters run the same programs.
        """
        text = ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "name"
        )
        return int.from_bytes(hashlib.sha256(f"makalu-1:{text}".encode()).digest()[:4], "little")


WINDOW_LOG2 = 40
HBM_WINDOW = 0
SBUF_WINDOW = 1
ADDRESS_BITS = 48
AXI_ADDR_BITS = WINDOW_LOG2
AXI_DATA_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class HbmConfig:
    """The high-bandwidth memory of the simulators; not part of the core.

    Parameters
    ----------
    size_bytes : :class:`int`, bytes
        Capacity; an access outside it is answered with DECERR. Multiple of 4096.
    bytes_per_cycle : :class:`int`, bytes per cycle
        Shared by reads and writes. ``None`` means one byte per partition.
    latency_cycles : :class:`int`, cycles
        From an accepted read address to its first data beat, and from the last write beat to the
        response.
    min_access_bytes : :class:`int`, bytes
        A shorter access costs as much bandwidth as this one.
    """

    size_bytes: int = 1 << 20
    bytes_per_cycle: int | None = None
    latency_cycles: int = 200
    min_access_bytes: int = 32

    def __post_init__(self):
        if self.size_bytes <= 0 or self.size_bytes % 4096 or self.size_bytes > 1 << WINDOW_LOG2:
            raise ValueError(
                "HbmConfig: size_bytes must be a positive multiple of 4096 up to 2**40, "
                f"not {self.size_bytes}"
            )
        if self.bytes_per_cycle is not None and self.bytes_per_cycle < 1:
            raise ValueError(
                f"HbmConfig: bytes_per_cycle must be at least 1, not {self.bytes_per_cycle}"
            )
        if not 2 <= self.latency_cycles <= 65535:
            raise ValueError(
                f"HbmConfig: latency_cycles must be from 2 to 65535, not {self.latency_cycles}"
            )
        if self.min_access_bytes not in (8, 16, 32, 64, 128, 256):
            raise ValueError(
                "HbmConfig: min_access_bytes must be a power of two from 8 to 256, "
                f"not {self.min_access_bytes}"
            )


TINY = CoreConfig(name="TINY", rows=4, sbuf_bytes=2 << 10, psum_bank_bytes=64)
"""4 x 4: unit tests in the Amaranth simulator."""

SMALL = CoreConfig(name="SMALL", rows=16, sbuf_bytes=16 << 10, psum_bank_bytes=512)
"""16 x 16: FPGA, cocotb, quick runs."""

TRN = CoreConfig(name="TRN", rows=128, sbuf_bytes=192 << 10, psum_bank_bytes=2048)
"""128 x 128: the full machine."""


def named_config(name):
    """Return the machine called ``name`` (any case).

    Raises
    ------
    :exc:`ValueError`
        If there is no such machine; the message lists those there are.
    """
    machines = {machine.name: machine for machine in (TINY, SMALL, TRN)}
    try:
        return machines[name.upper()]
    except (KeyError, AttributeError):
        raise ValueError(
            f"no configuration is called {name!r}; choose one of {', '.join(machines)}"
        ) from None
