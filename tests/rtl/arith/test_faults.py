"""How good the directed vectors are: break one bit of the adder at a time; do they notice?"""

import re

import numpy as np
import pytest
from makalu.rtl.arith.fma import FMA_CYCLES, Fma

from .exact import exact_fma
from .support import CompiledComponent, assert_equal_bits
from .test_fma import directed

FAULTS = {"fault_net": 16, "fault_mask": 64, "fault_value": 1}


def breakable(text, nets):
    """Verilog in which net ``fault_net``, where ``fault_mask`` is set, is stuck at ``fault_value``.

    ``nets`` receives ``(name, width)`` of every net, in order.
    """
    widths = {
        name: int(msb or 0) + 1
        for msb, name in re.findall(r"^  (?:wire|reg) (?:\[(\d+):0\] )?(\S+)\s*[;=]", text, re.M)
    }

    sources = [
        re.split(r" = | <= ", line, maxsplit=1)[1]
        for line in text.splitlines()
        if re.search(r"assign .* = | <= ", line)
    ]

    def is_read(name):
        pattern = re.compile(r"(?<![\w.$\\])" + re.escape(name) + r"(?![\w.$])")
        return any(pattern.search(source) for source in sources)

    def wrap(match):
        name, value = match[1], match[3]
        base, _, msb, lsb = re.fullmatch(r"(.+?)( ?\[(\d+):?(\d*)\])?", name).groups()
        if not is_read(base):  # an alias that only a waveform shows
            return match[0]
        width = int(msb) - int(lsb or msb) + 1 if msb else widths[base]
        number = len(nets)
        nets.append((name, width))
        mask, before = f"fault_mask[{width - 1}:0]", f"before_{number}"
        return (
            f"  wire [{width - 1}:0] {before};\n  assign {before} = {value};\n"
            f"  assign {name} = fault_net != {number} ? {before} :"
            f" fault_value ? {before} | {mask} : {before} & ~{mask};"
        )

    text = re.sub(r"^  assign ([^{=\s]+( \[[\d:]+\])?) += (.*);$", wrap, text, flags=re.M)
    ports = ", ".join(FAULTS)
    text = re.sub(r"^module dut\(", f"module dut({ports}, ", text, count=1, flags=re.M)
    declarations = "".join(f"  input [{width - 1}:0] {n};\n" for n, width in FAULTS.items())
    return re.sub(r"^(module dut\(.*\);\n)", rf"\1{declarations}", text, count=1, flags=re.M)


@pytest.mark.verilator
def test_directed_vectors_notice_stuck_bits(rng):
    nets = []
    dut = CompiledComponent(Fma(), change=lambda text: breakable(text, nets), extra_inputs=FAULTS)
    x, w, acc = directed(rng, 200_000)
    expected = exact_fma(x, w, acc)

    def run(net, mask, value, n=x.size):
        return dut(
            latency=FMA_CYCLES, delays={"acc": 1}, x=x[:n], w=w[:n], acc=acc[:n],
            fault_net=net, fault_mask=np.uint64(mask), fault_value=value,
        )["result"]  # fmt: skip

    assert_equal_bits(run(0xFFFF, 0, 0), expected)
    missed, total = [], 0
    for net, (name, width) in enumerate(nets):
        for bit in range(width):
            for value in (0, 1):
                total += 1
                if any(
                    (run(net, 1 << bit, value, n) != expected[:n]).any()
                    for n in (500, 20_000, x.size)
                ):
                    continue
                missed.append(f"{name}[{bit}] at {value}")
    # The rest cannot matter: sign extensions that are cut off, mask bits that meet zeros, a sticky
    # bit that is set anyway.
    print(f"missed: {missed}")
    assert total > 1_500
    assert total - len(missed) > 0.94 * total, f"{len(missed)} of {total} stuck bits not noticed"
