"""Makalu: an open, synthesizable, cycle-accurate Trainium-like NeuronCore and its software.

``makalu.open()`` gives a device, ``makalu.nki`` is the kernel language.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "open": ("makalu.host.device", "open_device"),
    "Device": ("makalu.host.device", "Device"),
    "LoadedProgram": ("makalu.host.device", "LoadedProgram"),
    "Tensor": ("makalu.host.device", "Tensor"),
    "RunReport": ("makalu.host.report", "RunReport"),
    "CoreConfig": ("makalu.rtl.arch.config", "CoreConfig"),
    "HbmConfig": ("makalu.rtl.arch.config", "HbmConfig"),
    "TINY": ("makalu.rtl.arch.config", "TINY"),
    "SMALL": ("makalu.rtl.arch.config", "SMALL"),
    "TRN": ("makalu.rtl.arch.config", "TRN"),
    "MakaluError": ("makalu.host.errors", "MakaluError"),
    "DeviceError": ("makalu.host.errors", "DeviceError"),
    "Program": ("makalu.firmware.program", "Program"),
    "nki": ("makalu.nki", None),
    "errors": ("makalu.host.errors", None),
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name):
    # Loaded on first use, so that `import makalu.rtl.arch` stays cheap.
    try:
        module, attribute = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module 'makalu' has no attribute {name!r}") from None
    value = importlib.import_module(module)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
