"""Host-visible registers, declared once: 32-bit words behind AXI4-Lite, 12-bit byte addresses.

The control block, the driver and the manual read this list. A read of an unmapped address, a write
to a read-only one, a partial strobe or an unaligned access is answered with SLVERR and changes
nothing.
"""

from dataclasses import dataclass

from .events import COUNTERS
from .isa import Engine

__all__ = [
    "ADDRESS_BITS", "COUNTER_BASE", "ID_VALUE", "QUEUE_STATE", "REGISTERS", "SEMAPHORE_BASE",
    "VERSION_VALUE", "Register", "address_of", "counter_address", "queue_register",
]  # fmt: skip

ADDRESS_BITS = 12
ID_VALUE = int.from_bytes(b"MAKA", "little")
VERSION_VALUE = 1


@dataclass(frozen=True)
class Register:
    """One 32-bit register: byte address, access (``"r"``, ``"rw"`` or ``"w"``), fields."""

    name: str
    address: int
    access: str
    meaning: str
    fields: tuple[tuple[str, int, int], ...] = ()


_FIXED = (
    Register("id", 0x000, "r", "The bytes MAKA."),
    Register("version", 0x004, "r", "Version of the contract."),
    Register("fingerprint", 0x008, "r", "CoreConfig.fingerprint."),
    Register("rows", 0x00C, "r", "Rows of the array."),
    Register(
        "control", 0x010, "w",
        "Write start to run the queues, reset to stop everything (memories are kept). A start "
        "while busy, in error or resetting is ignored.",
        (("start", 0, 1), ("reset", 1, 1)),
    ),
    Register(
        "status", 0x014, "r",
        "busy from the cycle after an accepted start until done or error; done and error hold "
        "until the next start or reset.",
        (("busy", 0, 1), ("done", 1, 1), ("error", 2, 1), ("resetting", 3, 1)),
    ),
    Register(
        "watchdog", 0x018, "rw",
        "Cycles without progress before WATCHDOG (0 never); 65536. Progress: an instruction issued "
        "or fetched, a semaphore updated, data moved by any engine.",
    ),
    Register("clear", 0x01C, "w", "Write 1: set every semaphore to 0 (only while not busy).",
             (("semaphores", 0, 1),)),
    Register(
        "error", 0x020, "r",
        "First error; see the table of error registers. field: first bit of the field.",
        (("code", 0, 8), ("source", 8, 8), ("field", 16, 16)),
    ),
    Register("error_pc_lo", 0x024, "r", "Address of the instruction or descriptor, if known."),
    Register("error_pc_hi", 0x028, "r", "Its high part."),
    Register("error_address_lo", 0x02C, "r", "Bus address, descriptor or semaphore, by code."),
    Register("error_address_hi", 0x030, "r", "Its high part."),
)  # fmt: skip

QUEUE_STATE = {"done": 0, "fetching": 1, "waiting_semaphore": 2, "waiting_engine": 3, "stopped": 4}
"""Values of a queue's ``state`` field."""

QUEUE_BASE, QUEUE_STRIDE = 0x040, 0x10
QUEUE_STATUS_BASE, QUEUE_STATUS_STRIDE = 0x0A0, 0x20


def _queue_registers(engine):
    q, name = int(engine), engine.name.lower()
    base, status = QUEUE_BASE + QUEUE_STRIDE * q, QUEUE_STATUS_BASE + QUEUE_STATUS_STRIDE * q
    return (
        Register(f"queue_{name}_base_lo", base, "rw", "HBM address of the first instruction."),
        Register(f"queue_{name}_base_hi", base + 4, "rw", "Its high part."),
        Register(f"queue_{name}_count", base + 8, "rw", "Instructions to run; 0 leaves it idle."),
        Register(
            f"queue_{name}_state", status, "r",
            "What the head does; which of its waits fails first.",
            (("state", 0, 4), ("wait", 4, 1), ("mode", 8, 8), ("semaphore", 16, 8)),
        ),
        Register(f"queue_{name}_wanted", status + 4, "r", "Value that the failing wait wants."),
        Register(f"queue_{name}_seen", status + 8, "r", "Value of that semaphore now."),
        Register(f"queue_{name}_pc_lo", status + 12, "r", "Address of the head instruction."),
        Register(f"queue_{name}_pc_hi", status + 16, "r", "Its high part."),
        Register(f"queue_{name}_issued", status + 20, "r", "Instructions issued since the start."),
    )  # fmt: skip


SEMAPHORE_BASE = 0x400
"""Semaphore ``s`` reads at ``SEMAPHORE_BASE + 4 * s`` (a host write sets it, while not busy)."""

COUNTER_BASE = 0x800
"""Counter ``i`` of :data:`~.events.COUNTERS` reads at ``COUNTER_BASE + 8 * i``, low word first."""

REGISTERS = (*_FIXED, *(r for engine in Engine for r in _queue_registers(engine)))
"""Every single register; the semaphore and counter windows are apart."""

_BY_NAME = {register.name: register for register in REGISTERS}


def address_of(name):
    """Byte address of register ``name``."""
    return _BY_NAME[name].address


def queue_register(engine, what):
    """Byte address of a queue's register, e.g. ``queue_register(Engine.PE, "base_lo")``."""
    return address_of(f"queue_{Engine(engine).name.lower()}_{what}")


def counter_address(full_name):
    """Byte address of the low word of a counter."""
    return COUNTER_BASE + 8 * [event.full_name for event in COUNTERS].index(full_name)
