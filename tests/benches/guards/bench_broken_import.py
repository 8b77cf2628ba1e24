"""A bench that cannot be imported."""

import cocotb
import no_such_module_of_makalu  # noqa: F401


@cocotb.test()
async def test_never_runs(dut):
    del dut
