"""``nki.isa``: instructions, see :mod:`makalu.firmware.nki.isa`."""

from makalu.firmware.nki import isa as _isa
from makalu.firmware.nki.isa import *  # noqa: F403

__all__ = _isa.__all__
