"""What a kernel says that the machine cannot run."""

import re

import makalu.nki as nki
import makalu.nki.language as nl
import pytest
from makalu.nki import KernelError
from makalu.rtl.arch.config import TINY

__all__ = ["check_refused"]


def check_refused(body, pattern, file):
    """``body`` is refused with a message that has ``pattern`` and names its line in ``file``."""

    @nki.jit
    def kernel():
        body()
        out = nl.ndarray((4, 1), nl.int8, buffer=nl.shared_hbm)
        nl.store(out, nl.zeros((4, 1), nl.int8))
        return out

    with pytest.raises(KernelError) as error:
        kernel.compile(TINY)
    text = str(error.value)
    assert re.search(pattern, text, re.DOTALL), text
    assert f"{file}:" in text
