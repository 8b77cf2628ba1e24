"""How fast the simulators are, side by side: ``makalu bench``.

Every measurement is a Python of its own, one after the other, so that its memory is its own and
nothing else runs beside it. As a program (``python -m makalu.host.bench``) this module is that
child: it takes a :class:`Case` as JSON, tells how a build goes, and ends with a line of results.
"""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from ..rtl.arch.config import named_config
from ..sim import toolchain
from . import devices
from .errors import MakaluError, ToolMissing, UsageError

__all__ = [
    "PLAN", "PRODUCTS", "Case", "cases", "conditions", "growth", "heading", "line_of", "measure",
    "need_matplotlib", "plot", "ratios", "summary", "to_dict",
]  # fmt: skip

PLAN = {
    "TINY": ("native", "verilator", "pysim"),
    "SMALL": ("native", "verilator"),
    "TRN": ("native",),
}
"""What is measured: pysim takes hours beyond TINY; Verilator's TRN takes hours to compile."""

PRODUCTS = {"TINY": (16, 16, 32), "SMALL": (128, 128, 128), "TRN": (512, 512, 512)}
"""M, K, N of the product of each machine: thousands of cycles, the same on every simulator."""

SECONDS = 3.0
"""How long a measurement repeats its product; at least once."""

_CHECKED_ROWS = 64
"""Rows of a product whose bits are compared with the reference; all of them would take minutes."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Parameters
    ----------
    config, backend : :class:`str`
    shape : tuple
        M, K, N.
    dtype : :class:`str`
    seconds : :class:`float`
        Repeat the product for so long.
    fresh : :class:`bool`
        Build from an empty cache.
    """

    config: str
    backend: str
    shape: tuple
    dtype: str = "bf16"
    seconds: float = SECONDS
    fresh: bool = False


def cases(configs=None, backend=None, **options):
    """The cases to measure: all of :data:`PLAN`, or those of some machines and one backend.

    Raises
    ------
    :exc:`UsageError`
        If none is left.
    """
    chosen = [
        Case(config, name, PRODUCTS[config], **options)
        for config, backends in PLAN.items()
        if not configs or config in configs
        for name in backends
        if backend in (None, "auto", name)
    ]
    if not chosen:
        plan = "; ".join(f"{config}: {', '.join(names)}" for config, names in PLAN.items())
        raise UsageError(
            f"nothing to measure for {backend} on {', '.join(configs or PLAN)}. There are: {plan}. "
            "One product on any backend: makalu bench --shape"
        )
    return chosen


# In the parent ------------------------------------------------------------------------------------


def measure(case, on_build=None):
    """Measure one case in a process of its own.

    Returns
    -------
    dict
        ``config``, ``backend``, ``shape``; then either ``missing`` or ``failed`` with a reason, or
        the figures: ``cycles`` and ``macs`` of one product, ``runs``, ``wall_s`` (median of the
        runs, the simulation alone), ``cycles_per_second``, ``mmacs_per_second``, ``ns_per_mac``,
        ``ns_per_pe_cycle`` (cycle of one processing element), ``build_s``, ``from_cache``
        (``None`` where there is no cache), ``peak_bytes``, ``build_peak_bytes`` (largest process
        of the build, ``None`` without one).
    """
    row = {"config": case.config, "backend": case.backend, "shape": list(case.shape)}
    reason = devices.missing(case.backend, named_config(case.config))
    if reason is not None:
        return {**row, "missing": reason}
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile("w+") as errors:
        if case.fresh:
            environment["MAKALU_CACHE"] = empty
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "makalu.host.bench", json.dumps(asdict(case))],
            stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        assert child.stdout is not None, "it is a pipe"
        try:
            found = _listen(child, on_build)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
        if found is None:
            errors.seek(0)
            said = errors.read().strip().splitlines()
            return {**row, "failed": said[-1] if said else f"ended with code {code}"}
    return {**row, **found}


def _listen(child, on_build):
    """What the child found, or ``None`` if it ended without a word."""
    found = None
    for line in child.stdout:
        kind, _, text = line.rstrip("\n").partition(" ")
        if kind == "build" and on_build is not None:
            fraction, _, what = text.partition(" ")
            on_build(what, float(fraction))
        elif kind == "found":
            found = json.loads(text)
    return found


def ratios(rows):
    """For each machine, how many times as fast as the slowest each simulator is."""
    out = {}
    for config in PLAN:
        speeds = {
            row["backend"]: row["cycles_per_second"]
            for row in rows
            if row["config"] == config and "cycles_per_second" in row
        }
        if speeds:
            slowest = min(speeds.values())
            out[config] = {name: speed / slowest for name, speed in speeds.items()}
    return out


def growth(rows):
    """For each simulator, what a MAC and a cycle of a processing element cost by machine.

    Returns
    -------
    dict of str to dict
        Backend to ``machines`` (names, small ones first), ``ns_per_mac`` and ``ns_per_pe_cycle``
        (lists alike), and ``mac_growth`` and ``pe_cycle_growth``, the last divided by the first.
    """
    out = {}
    for row in rows:
        if "ns_per_mac" not in row:
            continue
        found = out.setdefault(
            row["backend"], {"machines": [], "ns_per_mac": [], "ns_per_pe_cycle": []}
        )
        found["machines"].append(row["config"])
        for name in ("ns_per_mac", "ns_per_pe_cycle"):
            found[name].append(row[name])
    for found in out.values():
        for name in ("mac", "pe_cycle"):
            values = found[f"ns_per_{name}"]
            found[f"{name}_growth"] = values[-1] / values[0]
    return out


def conditions():
    """Under what these figures are measured: processor, load, tools."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    tools = {"Python": platform.python_version()}
    for name, find in (
        ("C compiler", lambda: toolchain.tool_version(toolchain.find_clang_cc())),
        ("C++ compiler", lambda: toolchain.tool_version(toolchain.find_clang_cxx())),
        ("Verilator", lambda: toolchain.find_verilator().version),
    ):
        try:
            tools[name] = find()
        except toolchain.ToolMissing:
            tools[name] = "not there"
    return {"processor": model, "cores": os.cpu_count(), "load": load, "tools": tools}


# Text ---------------------------------------------------------------------------------------------


def heading():
    """What stands above the rows."""
    found = conditions()
    load = "" if found["load"] is None else f", load {found['load']:.1f}"
    titles = (
        f"{'machine':8}{'simulator':11}{'M x K x N':15}{'cycles':>8}{'runs':>6}{'cycles/s':>12}"
        f"{'MMAC/s':>11}{'ns/MAC':>12}{'ns/PE cycle':>13}{'memory':>10}  build"
    )
    return [
        f"{found['processor']}, {found['cores']} cores{load}",
        *(f"{name}: {text}" for name, text in found["tools"].items()),
        "",
        titles,
    ]


def line_of(row):
    """One measurement."""
    start = f"{row['config']:8}{row['backend']:11}"
    for name, text in (("missing", "not there"), ("failed", "FAILED")):
        if name in row:
            return f"{start}{text}: {row[name]}"
    shape = "x".join(map(str, row["shape"]))
    if row["from_cache"]:
        build = "from the cache"
    else:
        build = f"{row['build_s']:.1f} s"
        if row["from_cache"] is False:
            build += f", {_mib(row['build_peak_bytes'])} in the largest process"
    return (
        f"{start}{shape:15}{row['cycles']:>8,}{row['runs']:>6}{row['cycles_per_second']:>12,.0f}"
        f"{_three(row['mmacs_per_second']):>11}{_three(row['ns_per_mac']):>12}"
        f"{_three(row['ns_per_pe_cycle']):>13}{_mib(row['peak_bytes']):>10}  {build}"
    )


def summary(rows):
    """Ratios between the simulators, and growth of the cost with the machine."""
    lines = []
    for config, found in ratios(rows).items():
        names = sorted(found, key=found.__getitem__)
        if len(names) > 1:
            parts = [f"{name} {_three(found[name])}" for name in reversed(names[1:])]
            lines.append(f"{config}: {', '.join(parts)} times as fast as {names[0]}")
    for name, found in growth(rows).items():
        if len(found["machines"]) > 1:
            first, last = found["machines"][0], found["machines"][-1]
            per_mac, per_cycle = _three(found["mac_growth"]), _three(found["pe_cycle_growth"])
            lines.append(
                f"{name}, from {first} to {last}: a MAC costs {per_mac} times as much, a cycle of "
                f"a processing element {per_cycle} times"
            )
    return ["", *lines] if lines else []


def to_dict(rows):
    """Everything, ready for JSON."""
    return {
        "conditions": conditions(), "rows": rows, "ratios": ratios(rows), "growth": growth(rows),
    }  # fmt: skip


def _three(value):
    """A number to three digits, but all digits before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = max(2 - math.floor(math.log10(value)), 0) if value > 0 else 0
    return f"{value:.{digits}f}"


def _mib(size):
    return f"{size / (1 << 20):,.0f} MiB"


# Plot ---------------------------------------------------------------------------------------------

_COLOURS = {"native": "#0b6e4f", "verilator": "#3d6fb6", "pysim": "#c8791e"}


def plot(rows, path):
    """Draw the figures; writes ``path`` with the endings ``.png`` and ``.svg``.

    Returns
    -------
    list of :class:`pathlib.Path`

    Raises
    ------
    :exc:`ToolMissing`
        Without matplotlib.
    """
    figure = _figure([row for row in rows if "cycles_per_second" in row])
    path = Path(path)
    if path.suffix.lower() in (".png", ".svg"):
        path = path.with_suffix("")
    written = []
    for ending in (".png", ".svg"):
        target = path.with_name(path.name + ending)
        figure.savefig(target, dpi=160)
        written.append(target)
    return written


def need_matplotlib():
    """Refuse early where nothing can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ToolMissing(
            "--plot draws with matplotlib, which is not installed: pip install matplotlib"
        ) from None


def _figure(rows):
    need_matplotlib()
    from matplotlib.figure import Figure

    if not rows:
        raise UsageError("--plot: nothing was measured, so there is nothing to draw")
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    speed, cost = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_speed(speed, rows)
    _draw_cost(cost, rows)
    backends = [name for name in _COLOURS if any(row["backend"] == name for row in rows)]
    handles = [
        next(b for b in speed.containers if b.get_label() == name) for name in backends
    ]  # a bar of each
    figure.legend(handles, backends, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw_speed(axes, rows):
    width, at, ticks = 0.8, 0.0, []
    for config in PLAN:
        mine = [row for row in rows if row["config"] == config]
        if not mine:
            continue
        for i, row in enumerate(mine):
            speed, name = row["cycles_per_second"], row["backend"]
            axes.bar(at + i, speed, width, color=_COLOURS[name], label=name)
            axes.annotate(
                _short(speed), (at + i, speed), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize=9,
            )  # fmt: skip
        edge = named_config(config).rows
        ticks.append((at + (len(mine) - 1) / 2, f"{config}\n{edge} x {edge}"))
        at += len(mine) + 0.7
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 50), high * 2.5)
    axes.set_xticks([x for x, _ in ticks], [text for _, text in ticks])
    axes.set_title("Speed", loc="left", fontsize=11)
    axes.set_ylabel("simulated cycles per second")
    _plain(axes)


def _draw_cost(axes, rows):
    edges = []
    for name, found in growth(rows).items():
        sizes = [named_config(config).rows ** 2 for config in found["machines"]]
        edges += sizes
        axes.plot(sizes, found["ns_per_pe_cycle"], "o-", color=_COLOURS[name], linewidth=1.8)
        for x, y in zip(sizes, found["ns_per_pe_cycle"], strict=True):
            axes.annotate(
                _three(y), (x, y), xytext=(6, 5), textcoords="offset points", fontsize=9,
                color=_COLOURS[name],
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(edges) / 2, max(edges) * 5)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 2.5)
    named = {named_config(config).rows for config in PLAN}
    ticks = sorted(edge for edge in named if edge**2 in edges)
    axes.set_xticks([edge**2 for edge in ticks], [f"{edge} x {edge}" for edge in ticks])
    axes.minorticks_off()
    axes.set_title("Cost", loc="left", fontsize=11)
    axes.set_xlabel("processing elements")
    axes.set_ylabel("ns per processing element and cycle")
    _plain(axes)


def _plain(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _short(value):
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


# In the child -------------------------------------------------------------------------------------


def _peaks():
    """Largest resident set of this process, and of the processes it started, in bytes."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    try:  # a fork counts as the one that forked; this is of this program alone
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                own = int(line.split()[1]) * 1024
    except OSError:
        pass
    return own, children


def _measured(case):
    """The figures of a case, measured in this process."""
    import numpy as np

    from ..firmware.kernels.matmul import matmul_reference
    from ..rtl.arch.formats import format_of
    from .device import open_device

    built = []

    def on_build(text, fraction):
        built.append(text)
        print("build", fraction, text, flush=True)

    m, k, n = case.shape
    rng, fmt = np.random.default_rng(0), format_of(case.dtype)
    a, b = (fmt.encode(rng.standard_normal(shape)) for shape in ((m, k), (k, n)))
    with open_device(case.config, case.backend, on_build=on_build) as device:
        cached = None if case.backend == "pysim" else not built
        build_s, (_, build_peak) = device.build_s, _peaks()
        product, took, cycles = a, [], None
        warm = case.backend != "pysim"  # which has nothing to warm up
        end = math.inf if warm else time.perf_counter() + case.seconds
        while not took or time.perf_counter() < end:
            product = device.matmul(a, b, dtype=case.dtype)
            report = device.last_run
            assert report is not None, "it has run"
            if cycles not in (None, report.cycles):
                raise MakaluError(f"equal runs took {cycles} and {report.cycles} cycles")
            cycles = report.cycles
            if warm:
                warm, end = False, time.perf_counter() + case.seconds
            else:
                took.append(report.wall_s)
        rows, elements = slice(0, _CHECKED_ROWS), device.config.rows**2
        if product[rows].tobytes() != matmul_reference(a[rows], b, device.config.rows).tobytes():
            raise MakaluError("the product has wrong bits")
        assert cycles, "this backend counts cycles"
        wall_s, macs = median(took), m * k * n
        return {
            "cycles": cycles,
            "macs": macs,
            "pe_utilization": macs / (cycles * elements),
            "runs": len(took),
            "wall_s": wall_s,
            "fastest_s": min(took),
            "cycles_per_second": cycles / wall_s,
            "mmacs_per_second": macs / wall_s / 1e6,
            "ns_per_mac": 1e9 * wall_s / macs,
            "ns_per_pe_cycle": 1e9 * wall_s / (cycles * elements),
            "build_s": build_s,
            "from_cache": cached,
            "peak_bytes": _peaks()[0],
            "build_peak_bytes": build_peak if cached is False else None,
        }


def main():
    """What the child does."""
    values = json.loads(sys.argv[1])
    found = _measured(Case(**{**values, "shape": tuple(values["shape"])}))
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
