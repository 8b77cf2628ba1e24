"""Configurations: derived values, and impossible machines refused with a sentence."""

from dataclasses import replace

import pytest
from makalu.rtl.arch.config import SMALL, TINY, TRN, CoreConfig, HbmConfig, named_config
from makalu.rtl.arch.events import COUNTERS
from makalu.rtl.arch.registers import COUNTER_BASE, REGISTERS, SEMAPHORE_BASE, address_of


def test_named_machines_have_the_documented_size():
    assert (TINY.rows, TINY.sbuf_bytes, TINY.psum_bank_words, TINY.dma_engines) == (4, 2048, 16, 1)
    assert (SMALL.rows, SMALL.sbuf_bytes, SMALL.psum_bank_words, SMALL.dma_engines) == (
        16, 16384, 128, 2,
    )  # fmt: skip
    assert (TRN.rows, TRN.sbuf_bytes, TRN.psum_bank_words, TRN.dma_engines) == (
        128, 196608, 512, 16,
    )  # fmt: skip
    assert TRN.quadrant == 32
    assert TRN.sbuf_partition_stride == 1 << 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 12}, "rows must be a power of two from 4 to 1024, not 12"),
        ({"rows": 2}, "rows must be"),
        ({"sbuf_bytes": 100}, "sbuf_bytes must be a multiple of 64"),
        ({"psum_bank_bytes": 48}, "psum_bank_bytes must be a power of two"),
        ({"semaphores": 512}, "semaphores must be a power of two from 8 to 256"),
        ({"queue_depth": 3}, "queue_depth must be"),
        ({"dma_burst_bytes": 4096}, "dma_burst_bytes must be"),
        ({"rows": 4.0}, "rows must be an integer, not 4.0"),
        ({"name": ""}, "name must be a non-empty string"),
    ],
)
def test_impossible_machines_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_a_configuration_prints_as_the_code_that_makes_it():
    assert eval(repr(TRN), {"CoreConfig": CoreConfig}) == TRN


def test_fingerprint_depends_on_every_parameter_but_the_name():
    assert replace(TINY, name="other").fingerprint == TINY.fingerprint
    seen = {TINY.fingerprint, SMALL.fingerprint, TRN.fingerprint}
    for field, value in {
        "rows": 8, "sbuf_bytes": 4096, "psum_bank_bytes": 128, "psum_banks": 4, "dma_queues": 8,
        "dma_bursts": 32, "dma_burst_bytes": 128, "queue_depth": 32, "semaphores": 64,
    }.items():  # fmt: skip
        seen.add(replace(TINY, **{field: value}).fingerprint)
    assert len(seen) == 12


def test_unknown_machine_lists_those_there_are():
    assert named_config("trn") is TRN
    with pytest.raises(ValueError, match="choose one of TINY, SMALL, TRN"):
        named_config("HUGE")


@pytest.mark.parametrize(
    "change",
    [{"size_bytes": 100}, {"bytes_per_cycle": 0}, {"latency_cycles": 1}, {"min_access_bytes": 24}],
)
def test_impossible_memories_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        HbmConfig(**change)


def test_registers_do_not_overlap():
    addresses = [r.address for r in REGISTERS]
    assert len(set(addresses)) == len(addresses)
    assert all(a % 4 == 0 and a < SEMAPHORE_BASE for a in addresses)
    assert SEMAPHORE_BASE + 4 * 256 <= COUNTER_BASE
    assert COUNTER_BASE + 8 * len(COUNTERS) <= 1 << 12
    assert address_of("control") == 0x10
    assert len({e.full_name for e in COUNTERS}) == len(COUNTERS)
