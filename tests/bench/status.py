"""The status section of README.md: derived from the code, the tests and measured figures.

    python tests/bench/status.py             # write it between the two markers of README.md
    python tests/bench/status.py --measure   # first measure the figures and keep them

``--measure`` runs SMALL and TRN for about three minutes, plus as many to build them if need be, and
writes ``figures.json`` beside this file. ``tests/test_readme.py`` holds the README to this script.
"""

import json
import sys
import textwrap
from pathlib import Path

from makalu.host.devices import BACKENDS
from makalu.rtl.arch.config import SMALL, TINY, TRN, named_config
from makalu.rtl.arch.formats import FORMATS, MATMUL_FORMATS, format_of
from makalu.rtl.arch.isa import INSTRUCTIONS, Engine, EventSemaphore

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FIGURES = Path(__file__).with_name("figures.json")
HBM_BYTES = 64 << 20
BEGIN, END = "<!-- status -->", "<!-- end of status -->"

MACHINES = (TINY, SMALL, TRN)

_SAME_BITS = "tests/host/test_backends.py::test_products_have_the_same_bits"
_HAND_MADE = "tests/host/test_device.py::test_compiled_and_hand_assembled_programs_agree"
PROVED = {
    "golden": {"TINY": _HAND_MADE, "SMALL": _HAND_MADE, "TRN": _HAND_MADE},
    "pysim": {"TINY": _SAME_BITS},
    "native": {
        "TINY": _SAME_BITS,
        "SMALL": "tests/system/test_full_machine.py::test_the_published_cycles",
        "TRN": "tests/system/test_full_machine.py::test_products_equal_the_golden_model",
    },
    "verilator": {
        "TINY": _SAME_BITS,
        "SMALL": "tests/system/test_figures.py::test_a_product_from_hbm_uses_the_array",
    },
}
"""By backend and machine, a test that runs products on the whole core and compares every bit."""

EXPORTED = {
    "TINY": ("runs under cocotb", "tests/benches/test_core.py::test_core"),
    "SMALL": ("is what Verilator compiles", PROVED["verilator"]["SMALL"]),
    "TRN": (
        "is written",
        "tests/test_export.py::test_the_full_machine_exports_within_two_gigabytes",
    ),
}
"""By machine, what a test does with the Verilog of the whole core."""


def _table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]


def _link(text, test):
    return f"[{text}]({test.partition('::')[0]})"


def _kib(size):
    return f"{size // 1024} KiB" if size % 1024 == 0 else f"{size} B"


def _wrapped(text):
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _percent(share):
    return f"{100 * share:.2f} %"


def _names(formats):
    return ", ".join(f"`{fmt.name}`" for fmt in formats)


def machines():
    """What each machine is, and what simulates it in the tests."""
    facts = (
        ("array", lambda c: f"{c.rows} x {c.cols}"),
        ("SBUF per partition", lambda c: _kib(c.sbuf_bytes)),
        ("PSUM per partition", lambda c: f"{c.psum_banks} banks x {_kib(c.psum_bank_bytes)}"),
        ("DMA engines", lambda c: c.dma_engines),
    )
    rows = [(name, *(fact(c) for c in MACHINES)) for name, fact in facts]
    for backend in reversed(BACKENDS):
        proved = PROVED.get(backend, {})
        cells = [
            _link("tested", proved[c.name]) if c.name in proved else "not tested" for c in MACHINES
        ]
        rows.append((f"whole core on `{backend}`", *cells))
    exported = [_link(*EXPORTED[c.name]) if c.name in EXPORTED else "" for c in MACHINES]
    rows.append(("exported Verilog", *exported))
    return _table(("", *(f"`{c.name}`" for c in MACHINES)), rows)


def queues():
    """Which instructions there are, by the queue that takes them."""
    rows = []
    for engine in Engine:
        taken = [c for c in INSTRUCTIONS.values() if engine in c.engines]
        names = (f"`{c.mnemonic}`" for c in taken if c is not EventSemaphore)
        rows.append((engine.name, ", ".join(names)))
    return _table(("queue", f"instructions, besides `{EventSemaphore.mnemonic}`"), rows)


def measured(figures):
    """Cycles and utilisation of the committed figures."""
    rows, dtype = [], format_of(figures["dtype"]).name
    for kind, where in (("products", "from HBM to HBM"), ("resident", "from SBUF to SBUF")):
        for product in figures[kind]:
            m, k, n, cycles = (product[name] for name in ("m", "k", "n", "cycles"))
            machine = named_config(product["machine"])
            used = m * k * n / (cycles * machine.rows * machine.cols)
            what = f"{m} x {k} x {n}, `{dtype}`, {where}"
            rows.append((f"`{machine.name}`", what, f"{cycles:,}", _percent(used)))
    for chain in figures["in_sbuf"]:
        machine = named_config(chain["machine"])
        depth = chain["k_tiles"] * machine.rows
        what = f"{machine.rows} x {depth} x {machine.psum_bank_words}, `float16`, 64 times in SBUF"
        rows.append((f"`{machine.name}`", what, "", _percent(chain["utilization"])))
    head = f"product (M x K x N), on `{figures['backend']}`"
    return _table(("", head, "cycles", "PE utilisation"), rows)


def kernels(figures):
    """Cycles of the kernel library."""
    rows = [
        (f"`{case['machine']}`", case["kernel"], f"{case['cycles']:,}")
        for case in figures["kernels"]
    ]
    return _table(("", f"kernel, on `{figures['backend']}`, from HBM to HBM", "cycles"), rows)


def render(figures=None):
    """The status section, without its markers."""
    if figures is None:
        figures = json.loads(FIGURES.read_text())
    others = [fmt for fmt in FORMATS if fmt not in MATMUL_FORMATS]
    formats = (
        f"The array multiplies {_names(MATMUL_FORMATS)}; the vector engine converts between these "
        f"and {_names(others)}."
    )
    tested = (
        "*Tested*: products on the whole core equal, in every bit, what numpy or the golden model "
        "makes of them; on the golden model, what a program assembled by hand gives."
    )
    return "\n".join(
        [
            *machines(), "", *_wrapped(tested), "", *queues(), "", *_wrapped(formats), "",
            *measured(figures), "", *kernels(figures),
        ]
    )  # fmt: skip


def section(text):
    """README's text before the status section, the section, and the text after it."""
    before, found, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (found and end):
        raise SystemExit(f"README.md needs the lines {BEGIN} and {END}")
    return before, inside.strip("\n"), after


def write():
    """Put the present status into README.md."""
    before, _, after = section(README.read_text())
    README.write_text(f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}")


def measure():
    """Run the figures and keep them."""
    import makalu
    import numpy as np

    sys.path.insert(0, str(ROOT / "tests" / "system"))
    from chains import chain
    from library import calls
    from makalu.host.shapes import in_sbuf
    from test_figures import measure as measure_chain

    figures = json.loads(FIGURES.read_text())
    dtype, rng = format_of(figures["dtype"]), np.random.default_rng(1)
    for kind in ("products", "resident", "in_sbuf"):
        for case in figures[kind]:
            with (  # new ones: what ran before moves the moments at which we look
                makalu.open(case["machine"], figures["backend"], hbm=HBM_BYTES) as dev,
                makalu.open(case["machine"], "golden", hbm=HBM_BYTES) as golden,
            ):
                if kind == "in_sbuf":
                    image, starts, _, _ = chain(dev.config, case["k_tiles"])
                    dev._runner.machine.hbm_write(0, image)
                    counters, window = measure_chain(dev, starts)
                    case["utilization"] = round(counters["pe_columns"] / window, 4)
                    continue
                m, k, n = (case[name] for name in ("m", "k", "n"))
                a, b = (dtype.encode(rng.standard_normal(s)) for s in ((m, k), (k, n)))
                if kind == "products":
                    c, case["cycles"] = dev.matmul(a, b), dev.last_run.cycles
                else:
                    found, c = in_sbuf(dev, a, b)
                    case["cycles"] = found["cycles"]
                if c.tobytes() != golden.matmul(a, b).tobytes():
                    raise SystemExit(f"{m} x {k} x {n}: wrong bits")
    figures["kernels"] = []
    for machine in ("SMALL", "TRN"):
        with (  # one for all, as in the test: which table the scalar engine holds counts
            makalu.open(machine, figures["backend"]) as dev,
            makalu.open(machine, "golden") as golden,
        ):
            for call in calls(machine):
                args = call.operands(rng)
                found, wanted = call.kernel(dev, *args), call.kernel(golden, *args)
                if call.error(found, args) != call.error(wanted, args):
                    raise SystemExit(f"{call.name} on {machine}: wrong bits")
                case = {"machine": machine, "kernel": call.name, "cycles": dev.last_run.cycles}
                figures["kernels"].append(case)
    FIGURES.write_text(_json(figures))


def _json(figures):
    """One line for each measurement."""
    parts = []
    for key, value in figures.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        parts.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main():
    """See the top of this file."""
    if sys.argv[1:] == ["--measure"]:
        measure()
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    write()


if __name__ == "__main__":
    main()
