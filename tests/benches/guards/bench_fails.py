"""A bench whose test fails."""

import cocotb


@cocotb.test()
async def test_fails(dut):
    assert False  # noqa: B011, PT015
