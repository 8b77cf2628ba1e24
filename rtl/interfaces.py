"""What travels between the blocks of the core: payload layouts and port signatures.

Every block imports its ports from here, so that two blocks cannot disagree. Widths derive from the
:class:`~.arch.config.CoreConfig`.
"""

from amaranth.lib import data, stream
from amaranth.lib.wiring import In, Out, Signature

from .arch.config import ADDRESS_BITS, AXI_ADDR_BITS
from .arch.isa import WORD_BITS

__all__ = [
    "DMA_READ_CYCLES", "PSUM_READ_PORTS", "SBUF_READ_CYCLES", "VECTOR_READ_PORTS",
    "VECTOR_WRITE_PORTS", "DmaJob", "DmaReadData", "Error", "Issue", "PsumReadPort", "SbufBeat",
    "SbufMovingPort", "SbufReadRequest", "SbufVectorReadPort", "SbufVectorWritePort",
    "SbufWeightsPort", "Update", "issue_port", "update_port",
]  # fmt: skip

SBUF_READ_CYCLES = 3
"""From the cycle that accepts a read command to the cycle in which its data can be sampled."""

DMA_READ_CYCLES = 4
"""The same for a DMA read request."""

VECTOR_READ_PORTS = 3
"""Read ports of SBUF for the engines behind the array: 0 and 1 are the first and the second source
of the vector engine, 2 is the source of the scalar engine."""

VECTOR_WRITE_PORTS = 2
"""Their write ports: 0 is the vector engine's, 1 the scalar engine's."""

PSUM_READ_PORTS = 2
"""Their read ports of PSUM: 0 is the vector engine's, 1 the scalar engine's."""


class Issue(data.Struct):
    """A checked instruction on its way to an engine (stream payload)."""

    word: WORD_BITS
    pc: AXI_ADDR_BITS


class Update(data.Struct):
    """A semaphore update (stream payload); mode as :class:`~.arch.isa.UpdateMode`."""

    semaphore: 8
    mode: 2
    value: 32


class Error(data.Struct):
    """An error, held until reset: the block that raises it does nothing more."""

    valid: 1
    code: 8
    field: 16
    pc: AXI_ADDR_BITS
    address: ADDRESS_BITS


class DmaJob(data.Struct):
    """Descriptors for one engine (stream payload)."""

    queue: 4
    table: AXI_ADDR_BITS
    count: 16
    update: Update


def SbufMovingPort(config):
    """Moving operand, seen by the tensor engine: top priority, never refused.

    One command per cycle in which ``valid``: the element whose first byte is ``offset`` of the
    16-byte word. ``new`` reads ``word`` from its bank; otherwise the word read last on this port is
    used again (no bank access). ``data[p]`` holds the element of partition ``p`` in its low bits
    (the bits above the element are unspecified) :data:`SBUF_READ_CYCLES` cycles later.
    """
    return Signature(
        {
            "valid": Out(1),
            "new": Out(1),
            "word": Out(config.sbuf_word_bits),
            "offset": Out(4),
            "data": In(32).array(config.partitions),
        }
    )


def SbufWeightsPort(config):
    """Weights, seen by the tensor engine: up to four elements of one word per cycle.

    As :func:`SbufMovingPort`, but with ``ready`` (a command counts when both are high), and four
    byte offsets within the same word; ``data[p]`` carries four 32-bit lanes, lane 0 lowest.
    """
    return Signature(
        {
            "valid": Out(1),
            "ready": In(1),
            "new": Out(1),
            "word": Out(config.sbuf_word_bits),
            "offsets": Out(data.ArrayLayout(4, 4)),
            "data": In(128).array(config.partitions),
        }
    )


def SbufVectorReadPort(config):
    """A source of the vector or scalar engine: as :func:`SbufMovingPort`, with ``ready``.

    A command counts when ``valid`` and ``ready`` are high; one that is refused stays. There are
    :data:`VECTOR_READ_PORTS`, each of which remembers the word that it read last. ``ready`` does
    not depend on ``valid``, but follows in the same cycle the commands of the ports that go first,
    those with lower numbers among them: a port's command may depend on ``ready`` of ports with
    lower numbers, not of ports with higher ones.
    """
    return Signature(
        {
            "valid": Out(1),
            "ready": In(1),
            "new": Out(1),
            "word": Out(config.sbuf_word_bits),
            "offset": Out(4),
            "data": In(32).array(config.partitions),
        }
    )


def SbufVectorWritePort(config):
    """Destination of the vector or scalar engine: never refused, goes before DMA.

    In a cycle with ``valid``, element ``data[p]`` (low ``1 << size_log2`` bytes) is put at byte
    ``offset`` of the word under construction in every partition with ``mask[p]``, unless the
    element is to be left out (``skip[p]``); with ``commit`` the bytes gathered since the last
    commit, this element's included, are written to ``word``.

    There are :data:`VECTOR_WRITE_PORTS`, each with a word under construction of its own. The
    engines guarantee that two ports never commit to the same bank (``word[0]``) in the same cycle;
    what would then be written, and where, is unspecified.
    """
    return Signature(
        {
            "valid": Out(1),
            "commit": Out(1),
            "word": Out(config.sbuf_word_bits),
            "offset": Out(4),
            "size_log2": Out(2),
            "mask": Out(config.partitions),
            "skip": Out(1).array(config.partitions),
            "data": Out(32).array(config.partitions),
        }
    )


def SbufBeat(config):
    """A DMA write beat (stream payload).

    Along the free axis (``across`` 0): the 8 bytes at ``offset`` (a multiple of 8) of
    ``partition``, byte ``i`` written where ``strobe[i]``. Across partitions (``across``): elements
    of ``1 << size_log2`` bytes at ``offset`` (a multiple of that size) of the ``8 >> size_log2``
    consecutive partitions from ``partition`` (a multiple of that number); element ``i`` is
    ``data[i * size ...]`` and is written where its strobe bits are set.
    """
    return data.StructLayout(
        {
            "across": 1,
            "size_log2": 2,
            "partition": config.partition_bits,
            "offset": config.sbuf_addr_bits,
            "data": 64,
            "strobe": 8,
        }
    )


def SbufReadRequest(config):
    """A DMA read beat (stream payload): addresses as :func:`SbufBeat`."""
    return data.StructLayout(
        {
            "across": 1,
            "size_log2": 2,
            "partition": config.partition_bits,
            "offset": config.sbuf_addr_bits,
        }
    )


class DmaReadData(data.Struct):
    """Answer to a DMA read, :data:`DMA_READ_CYCLES` after the request; cannot be refused."""

    valid: 1
    data: 64


def PsumReadPort(config):
    """Source of the vector or scalar engine in PSUM: never refused.

    The engine must hold the bank (see README): there are :data:`PSUM_READ_PORTS`, and in a cycle
    no bank may be read by two of them, nor read while the tensor engine writes it. ``data[p]``
    holds the sum of partition ``p`` :data:`SBUF_READ_CYCLES` cycles later.
    """
    return Signature(
        {
            "valid": Out(1),
            "bank": Out(config.psum_bank_bits),
            "word": Out(config.psum_word_bits),
            "data": In(32).array(config.partitions),
        }
    )


def issue_port():
    """Instruction stream as an engine sees it."""
    return In(stream.Signature(Issue))


def update_port():
    """Semaphore updates as an engine sees them."""
    return Out(stream.Signature(Update))
