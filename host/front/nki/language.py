"""``nki.language``: tensors, ranges and tile sizes, see :mod:`makalu.firmware.nki.language`."""

from makalu.firmware.nki import language as _language
from makalu.firmware.nki.language import *  # noqa: F403

__all__ = _language.__all__
