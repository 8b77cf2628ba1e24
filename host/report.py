"""What a run cost and where its cycles went: numbers as attributes, JSON and a page for people."""

import json
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields

__all__ = ["RunReport", "group_counters", "label"]

_ENGINES = {engine: f"{engine}_busy" for engine in ("pe", "act", "dve", "pool", "dma")}

_LABELS = {
    "pe_wait_weights": "matmul waits for its weights",
    "pe_wait_psum": "matmul waits for a PSUM bank",
    "pe_wait_interval": "matmul waits for the PSUM adder",
    "pe_wait_sbuf": "weight load waits for SBUF",
    "dve_wait_psum": "DVE waits for a PSUM bank",
    "dve_wait_sbuf": "DVE waits for SBUF",
    "pool_wait_sbuf": "POOL waits for SBUF",
    "act_wait_psum": "ACT waits for a PSUM bank",
    "act_wait_sbuf": "ACT waits for SBUF",
    "act_wait_table": "ACT waits for its function's table",
    "dma_wait_read": "DMA waits for HBM",
    "dma_wait_sbuf": "DMA waits for SBUF",
    "wait_semaphore": "{} queue waits for a semaphore",
    "wait_engine": "{} queue waits for its engine",
    "wait_fetch": "{} queue waits for instructions",
    "sbuf_conflict_weights": "weights lose an SBUF bank",
    "sbuf_conflict_vector_read": "vector reads lose an SBUF bank",
    "sbuf_conflict_dma_read": "DMA reads lose an SBUF bank",
    "sbuf_conflict_dma_write": "DMA writes lose an SBUF bank",
}


def label(name):
    """What a counter of waiting means, for people."""
    if name.startswith("queue_"):
        _, queue, cause = name.split("_", 2)
        return _LABELS[cause].format(queue.upper())
    return _LABELS.get(name, name.replace("_", " "))


def group_counters(counters, config):
    """Busy cycles per engine, and stall cycles by cause, of a run's counters.

    Counts that are sums over DMA engines or SBUF groups are divided by their number.
    """
    scale = {"dma": config.dma_engines, "sbuf_conflict_dma": config.dma_engines}

    def per_unit(name):
        for prefix, number in scale.items():
            if name.startswith(prefix):
                return counters[name] / number
        return counters[name]

    busy = {engine: per_unit(name) for engine, name in _ENGINES.items() if name in counters}
    stalls = {name: per_unit(name) for name in counters if "_wait_" in name or "_conflict_" in name}
    return busy, stalls


@dataclass
class RunReport:
    """One run, or several added up.

    Attributes
    ----------
    config, backend : :class:`str`
    dtype : :class:`str` or ``None``
        Format in which a matrix product multiplied: that of both operands, or ``a x b``.
    cycles : :class:`int` or ``None``
        Doorbell accepted until completion visible; ``None`` on a backend without cycles.
    macs : :class:`int`
        Multiply-accumulates asked for.
    passes : :class:`int`
        Multiply passes made by the array; a binary32 MAC takes four.
    pe_utilization : :class:`float` or ``None``
        Useful passes / (cycles x rows x columns).
    mac_utilization : :class:`float` or ``None``
        MACs / (cycles x rows x columns).
    hbm_bytes_read, hbm_bytes_written : :class:`int`, bytes
        Data, descriptors and instructions.
    engines : dict of str to number, cycles
        Busy cycles; ``dma`` is the mean over the DMA engines.
    stalls : dict of str to number, cycles
        By cause.
    wall_s, build_s, compile_s : :class:`float`, seconds
        The simulated run alone; building the simulator; compiling the program.
    max_abs_error : :class:`float` or ``None``
        Against a reference, where one was computed; of finite values.
    mismatches : :class:`int` or ``None``
        Elements that are not what the reference says, rounding and overflow considered; see
        :func:`~.witness.compare`.
    first_mismatch : list of :class:`int` or ``None``
        Index of the first of them.
    runs, instructions : :class:`int`
    counters : dict
        Every counter of the core.
    """

    config: str
    backend: str
    rows: int
    cols: int
    dtype: str | None = None
    cycles: int | None = None
    macs: int = 0
    passes: int = 0
    hbm_bytes_read: int = 0
    hbm_bytes_written: int = 0
    engines: dict = field(default_factory=dict)
    stalls: dict = field(default_factory=dict)
    wall_s: float = 0.0
    build_s: float = 0.0
    compile_s: float = 0.0
    max_abs_error: float | None = None
    mismatches: int | None = None
    first_mismatch: list | None = None
    runs: int = 0
    instructions: int = 0
    counters: dict = field(default_factory=dict)

    @property
    def pe_utilization(self):
        """Useful passes / (cycles x rows x columns)."""
        return self.passes / (self.cycles * self.rows * self.cols) if self.cycles else None

    @property
    def mac_utilization(self):
        """MACs / (cycles x rows x columns)."""
        return self.macs / (self.cycles * self.rows * self.cols) if self.cycles else None

    @property
    def cycles_per_second(self):
        """Speed of the simulation."""
        return self.cycles / self.wall_s if self.cycles and self.wall_s else None

    @classmethod
    def of_run(cls, config, backend, counters, *, macs=None, wall_s, build_s=0.0):
        """A report from the counters of one run (``config`` is a CoreConfig)."""
        busy, stalls = group_counters(counters, config)
        passes = counters.get("pe_passes", 0)
        return cls(
            config=config.name,
            backend=backend,
            rows=config.rows,
            cols=config.cols,
            cycles=counters.get("core_cycles"),
            macs=passes if macs is None else macs,
            passes=passes,
            hbm_bytes_read=sum(
                counters.get(name, 0)
                for name in ("dma_read_bytes", "dma_descriptor_bytes", "fetch_bytes")
            ),
            hbm_bytes_written=counters.get("dma_write_bytes", 0),
            engines=busy,
            stalls=stalls,
            wall_s=wall_s,
            build_s=build_s,
            runs=1,
            instructions=sum(n for name, n in counters.items() if name.endswith("_issued")),
            counters=dict(counters),
        )

    def add(self, other):
        """Add another run to this report, in place; the builds are not counted twice."""
        if other.cycles is not None:
            self.cycles = (self.cycles or 0) + other.cycles
        for name in (
            "macs", "passes", "hbm_bytes_read", "hbm_bytes_written", "wall_s", "compile_s", "runs",
            "instructions",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.build_s = max(self.build_s, other.build_s)
        for name in ("engines", "stalls", "counters"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + value
        if other.max_abs_error is not None:
            self.max_abs_error = max(self.max_abs_error or 0.0, other.max_abs_error)
        if other.mismatches is not None:
            self.mismatches = (self.mismatches or 0) + other.mismatches
        if self.first_mismatch is None:
            self.first_mismatch = other.first_mismatch
        return self

    def compared(self, comparison):
        """Note how the result compares with a reference (a :class:`~.witness.Comparison`)."""
        self.max_abs_error = comparison.max_abs_error
        self.mismatches = comparison.mismatches
        self.first_mismatch = comparison.first

    def to_dict(self):
        """Every number, ready for JSON."""
        out = asdict(self)
        out["pe_utilization"] = self.pe_utilization
        out["mac_utilization"] = self.mac_utilization
        out["cycles_per_second"] = self.cycles_per_second
        return out

    def to_json(self, **options):
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_dict(cls, values):
        """The inverse of :meth:`to_dict`."""
        names = {f.name for f in dataclass_fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    # For people -----------------------------------------------------------------------------------

    def __rich_console__(self, console, options):
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value in self._lines():
            table.add_row(f"[bold]{name}[/bold]", value)
        yield table
        if self.cycles:
            yield ""
            yield from self._bars(self.cycles)

    def _lines(self):
        yield "machine", f"{self.config} ({self.rows} x {self.cols}) on {self.backend}"
        if self.dtype is not None:
            yield "format", f"{self.dtype} operands, summed in float32"
        if self.runs > 1:
            yield "runs", f"{self.runs}"
        if self.cycles is None:
            yield "cycles", "not counted by this backend"
        else:
            yield "cycles", f"{self.cycles:,}"
        yield "MACs", f"{self.macs:,}"
        if self.cycles:
            text = f"{self.pe_utilization:.1%}"
            if self.passes != self.macs:
                text += f" (MACs: {self.mac_utilization:.1%})"
            yield "PE utilization", text
        yield "HBM", f"{self.hbm_bytes_read:,} B read, {self.hbm_bytes_written:,} B written"
        if self.max_abs_error is not None:
            yield "max |error|", f"{self.max_abs_error:.3g}"
        if self.mismatches:
            what = "element is" if self.mismatches == 1 else "elements are"
            text = f"{self.mismatches:,} {what} wrong beyond rounding"
            yield "MISMATCH", f"{text}, the first at {tuple(self.first_mismatch or ())}"
        took = f"{self.wall_s:.3g} s"
        if self.cycles_per_second:
            took += f" ({self.cycles_per_second:,.0f} cycles/s)"
        if self.build_s >= 0.05:
            took += f", build {self.build_s:.1f} s"
        yield "simulation", took

    def _bars(self, whole):
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        table.add_column(min_width=38)
        table.add_column(width=32)
        table.add_column(justify="right")

        def bar(label, cycles, style):
            share = min(max(cycles / whole, 0.0), 1.0)
            table.add_row(
                label,
                ProgressBar(
                    total=1.0, completed=share, width=32, complete_style=style, finished_style=style
                ),
                f"{share:6.1%}",
            )

        table.add_row("[bold]engines at work[/bold]", "", "")
        if "pe_columns" in self.counters:
            bar("  PE streams columns", self.counters["pe_columns"], "green")
        for engine, cycles in self.engines.items():
            bar(f"  {engine.upper()} busy", cycles, "green")
        worst = sorted(self.stalls.items(), key=lambda item: -item[1])
        worst = [item for item in worst if item[1] >= 0.005 * whole][:8]
        if worst:
            table.add_row("[bold]waiting[/bold]", "", "")
        for name, cycles in worst:
            bar(f"  {label(name)}", cycles, "yellow")
        yield table

    def __str__(self):
        """The page as plain text."""
        import io

        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=100, color_system=None, highlight=False).print(self)
        return out.getvalue().rstrip()

    def __repr__(self):
        """The headline."""
        cycles = "no cycles" if self.cycles is None else f"{self.cycles:,} cycles"
        used = "" if self.pe_utilization is None else f", PE {self.pe_utilization:.1%}"
        return f"<RunReport {self.config}/{self.backend}: {cycles}, {self.macs:,} MACs{used}>"
