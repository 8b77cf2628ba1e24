"""The command line: ``makalu demo``, ``matmul``, ``run``, ``export``, ``bench`` and so on.

Results go to standard output, progress and messages to standard error. Exit codes: 0 done, 1 the
device or a kernel failed or a result is wrong, 2 wrong input, 3 a tool is missing, 4 out of memory,
130 interrupted.
"""

import contextlib
import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated, overload

import numpy as np
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ..rtl.arch.config import SMALL, TINY, TRN, named_config
from ..rtl.arch.events import COUNTERS
from ..rtl.arch.formats import ALIASES, FORMATS, MATMUL_FORMATS, format_of
from . import devices
from .errors import DtypeError, MakaluError, ShapeError, ToolMissing, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    name="makalu",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

FAILED, WRONG_INPUT, NO_TOOL, NO_MEMORY, INTERRUPTED = 1, 2, 3, 4, 130

ConfigOption = Annotated[
    str, typer.Option("--config", help="Machine: TINY, SMALL or TRN; see `makalu info`.")
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        help="What simulates the core: verilator or native (compiled), pysim (slow, needs "
        "nothing), golden (no cycles), or auto, what suits this machine; see `makalu doctor`.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="Round operands to this format: bf16, fp16, fp8_e4m3, fp32, ..."),
]
HbmOption = Annotated[
    int | None, typer.Option("--hbm-mib", help="Size of HBM in MiB.", min=1, max=1 << 20)
]
KeepOption = Annotated[
    Path | None,
    typer.Option(
        "--keep", help="Folder for the C that simulates the core, with its names; takes native."
    ),
]
WavesOption = Annotated[
    Path | None, typer.Option("--waves", help="Write waveforms to this .vcd file; takes native.")
]
WavesSignalsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--waves-signals",
        help="Signals of the waveforms, such as pe_queue.* or control.*.issued; repeatable. "
        "(default: all, which is much)",
    ),
]
WavesWindowOption = Annotated[
    str | None,
    typer.Option(
        "--waves-window",
        help="Cycles of the waveforms, such as 1000:2000 or 1000:, counted from the start of the "
        "simulation; the rest runs at full speed. (default: all)",
    ),
]
WavesLaneOption = Annotated[
    int | None,
    typer.Option(
        "--waves-lane", help="Of parts that there are many of only this one, from 0.", min=0
    ),
]


def _out():
    return Console(highlight=False, soft_wrap=True)


def _err():
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _errors():
    """Errors that a user can cause become one message and an exit code."""
    from ..firmware.nki import KernelError
    from ..firmware.program import ProgramError

    def fail(error, code):
        text = _escape(_as_options(str(error) or type(error).__name__))
        _err().print(f"[bold red]error:[/bold red] {text}")
        raise typer.Exit(code) from None

    try:
        yield
    except KeyboardInterrupt:
        _err().print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except ToolMissing as error:
        fail(error, NO_TOOL)
    except MemoryError as error:
        fail(str(error) or "this machine has not enough memory", NO_MEMORY)
    except OSError as error:
        if error.strerror and error.filename:
            fail(f"{error.filename}: {error.strerror.lower()}", WRONG_INPUT)
        fail(error, WRONG_INPUT)
    except (DtypeError, ShapeError, ProgramError) as error:
        fail(error, WRONG_INPUT)
    except MakaluError as error:
        fail(error, WRONG_INPUT if isinstance(error, ValueError) else FAILED)
    except KernelError as error:
        fail(error, FAILED)


def _as_options(text):
    """The parameters of :mod:`.device` in a message, as the options that set them."""
    for name, option in (
        ("out_dtype", "--out-dtype"),
        ("dtype", "--dtype"),
        ("hbm", "--hbm-mib"),
    ):
        text = re.sub(rf"\b{name}= ?(?=\w|')", f"{option} ", text)  # a value follows, or none
        text = text.replace(f"{name}=", option)
    return text


def _escape(text):
    from rich.markup import escape

    return escape(text)


class _Bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, console):
        self.console = console
        self.shown = console.is_terminal
        self.told = False
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self.shown,
        )
        self.task = self.progress.add_task("starting", total=None)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def say(self, text):
        """What happens now."""
        self.progress.update(self.task, description=text)

    def building(self, text, fraction):
        """Part of the simulator is built; told once where there is no terminal."""
        if not self.shown and not self.told:
            self.console.print(f"building the simulator: {text}; this takes a while", style="dim")
        self.told = True
        self.progress.update(
            self.task, description=f"building: {text}", completed=fraction, total=1.0
        )

    def reset(self):
        """Something else begins."""
        self.told = False
        self.progress.update(self.task, description="", completed=0, total=None)

    def __call__(self, issued, total, cycles):
        text = "running" if cycles is None else f"running, {cycles:,} cycles"
        self.progress.update(self.task, description=text, completed=issued, total=total or None)


def _version(wanted):
    if wanted:
        print(f"makalu {importlib.metadata.version('makalu')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
):
    """An open, cycle-accurate Trainium-like NeuronCore: simulate it, program it, export it.

    Start with `makalu demo`, or `makalu doctor` to see what this computer can run.
    """


def _config(name):
    try:
        return named_config(name.upper())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from None


@overload
def _dtype(name: str, option: str = ..., among: tuple = ...) -> str: ...
@overload
def _dtype(name: None, option: str = ..., among: tuple = ...) -> None: ...
def _dtype(name, option="--dtype", among=FORMATS):
    try:
        return name if name is None else format_of(name, among).name
    except TypeError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _backend(name):
    if name != "auto" and name not in devices.BACKENDS:
        raise typer.BadParameter(
            f"{name!r} is not one of auto, {', '.join(devices.BACKENDS)}", param_hint="--backend"
        )
    return name


def _open(config, backend, hbm_mib, bar, keep=None, waves=None):
    from .device import open_device

    if backend == "auto" and (keep is not None or waves is not None):
        backend = "native"
    hbm = None if hbm_mib is None else hbm_mib << 20
    device = open_device(
        config,
        backend,
        hbm=hbm,
        progress=bar if bar.shown else None,
        on_build=bar.building,
        keep=keep,
    )
    bar.say("compiling")
    return device


def _waves_wanted(path, signals, window, lane):
    """What the options of waveforms say, or None."""
    from .files import check_writable

    if path is None:
        for option, value in (("signals", signals), ("window", window), ("lane", lane)):
            if value is not None:
                raise UsageError(f"--waves-{option} says what --waves FILE is to write: give both")
        return None
    check_writable(path)
    found = re.fullmatch(r"(\d*):(\d*)", window or ":")
    if not found:
        raise typer.BadParameter(
            f"{window!r} is not of the form FIRST:END, such as 1000:2000 or 1000:",
            param_hint="--waves-window",
        )
    first, end = (int(text) if text else None for text in found.groups())
    return {"path": path, "signals": signals or "*", "lane": lane, "first": first, "end": end}


def _waves(dev, wanted):
    """Where what runs leaves its waveforms, if it is to."""
    if wanted is None:
        return contextlib.nullcontext()
    start = max(wanted["first"] or 0, dev.cycles or 0)  # opening the device has taken a few
    cycles = None if wanted["end"] is None else wanted["end"] - start
    return dev.waves(
        wanted["path"], wanted["signals"], start=start, cycles=cycles, lane=wanted["lane"]
    )


# Commands -----------------------------------------------------------------------------------------


@app.command()
def matmul(
    a: Annotated[Path, typer.Argument(help="Left operand, a .npy file.")],
    b: Annotated[Path, typer.Argument(help="Right operand, a .npy file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the product goes, a .npy file.")],
    config: ConfigOption = "SMALL",
    backend: BackendOption = "auto",
    dtype: DtypeOption = None,
    out_dtype: Annotated[str, typer.Option("--out-dtype", help="Format of the product.")] = "fp32",
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare with a binary64 product; exit code 1 where rounding does not explain a "
            "difference.",
        ),
    ] = True,
    hbm_mib: HbmOption = None,
    keep: KeepOption = None,
    waves: WavesOption = None,
    waves_signals: WavesSignalsOption = None,
    waves_window: WavesWindowOption = None,
    waves_lane: WavesLaneOption = None,
    as_json: JsonOption = False,
):
    """Multiply two matrices (or batches of them, or vectors) on the core."""
    from .files import check_writable, load_array, save_array

    with _errors():
        machine, backend = _config(config), _backend(backend)
        dtype, out_dtype = _dtype(dtype, among=MATMUL_FORMATS), _dtype(out_dtype, "--out-dtype")
        check_writable(out)
        wanted = _waves_wanted(waves, waves_signals, waves_window, waves_lane)
        left, right = load_array(a, dtype=dtype), load_array(b, dtype=dtype)
        console = _err()
        with _Bar(console) as bar, _open(machine, backend, hbm_mib, bar, keep, wanted) as dev:
            with _waves(dev, wanted):
                product = dev.matmul(left, right, dtype=dtype, out_dtype=out_dtype, check=check)
            report, reason = dev.last_run, dev.backend_reason
        assert report is not None, "it has run"
        save_array(out, product)
        if as_json:
            print(report.to_json(indent=1))
        else:
            _print_product(_out(), report, reason, out, product)
        if report.mismatches:
            raise typer.Exit(FAILED)


def _print_product(console, report, reason, out, product):
    console.print(report)
    console.print(f"\nbackend {report.backend}: {_escape(reason)}")
    shape = " x ".join(map(str, np.shape(product))) or "a scalar"
    console.print(f"wrote {_escape(str(out))}: {shape}, {product.dtype}")
    if product.dtype.kind == "V":
        console.print(
            f"numpy does not store this format: np.load(path).view(ml_dtypes.{product.dtype})"
        )


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A Python file with NKI kernels.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Arguments of the kernel, in order: .npy files, numbers, or shapes such as "
            "64x128:bf16, which are filled with random numbers."
        ),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Kernel to call, if the file has several.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Where an output goes, a .npy file; one for each output."),
    ] = None,
    config: ConfigOption = "SMALL",
    backend: BackendOption = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Format of shapes without one and of raw .npy files."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of random inputs.", min=0)] = 0,
    hbm_mib: HbmOption = None,
    keep: KeepOption = None,
    waves: WavesOption = None,
    waves_signals: WavesSignalsOption = None,
    waves_window: WavesWindowOption = None,
    waves_lane: WavesLaneOption = None,
    as_json: JsonOption = False,
):
    """Run an NKI kernel file, unmodified.

    Its imports of nki, nki.isa and nki.language, also below neuronxcc, give Makalu's kernel
    language. With inputs the file's kernel is called with them; without, the file runs as a
    script, and the kernels that it calls run on the core.
    """
    from .files import check_writable, save_array
    from .kernels import (
        argument,
        bind,
        choose_kernel,
        kernel_code,
        kernels_in,
        nki_is_ours,
        run_file,
    )

    with _errors():
        machine, backend, dtype = _config(config), _backend(backend), _dtype(dtype)
        for path in out or ():
            check_writable(path)
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file")
        wanted = _waves_wanted(waves, waves_signals, waves_window, waves_lane)
        reports = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(nki_is_ours())
            bar = stack.enter_context(_Bar(_err()))
            dev = stack.enter_context(_open(machine, backend, hbm_mib, bar, keep, wanted))
            stack.enter_context(_waves(dev, wanted))
            bar.say(f"running {file.name}")
            results = ()
            if inputs or kernel is not None:
                names = run_file(file, as_script=False)
                chosen = choose_kernel(file, names, kernel)
                rng = np.random.default_rng(seed)
                arguments = [argument(text, dtype=dtype, rng=rng) for text in inputs or ()]
                bind(chosen, arguments)
                with kernel_code(file):
                    results = dev.run(chosen, *arguments)
                results = results if isinstance(results, tuple) else (results,)
                reports.append((chosen.__name__, dev.last_run))
            else:
                dev.on_run = lambda name, report: reports.append((name, report))
                names = run_file(file, as_script=True)
        if out and len(out) != len(results):
            raise UsageError(f"outputs: {len(results)}, but --out files: {len(out)}")
        if out:
            for path, array in zip(out, results, strict=True):
                save_array(path, array)
        if as_json:
            print(json.dumps([{"kernel": n, **r.to_dict()} for n, r in reports], indent=1))
            return
        console = _out()
        for name, report in reports:
            console.print(f"[bold]{_escape(name)}[/bold]")
            console.print(report)
        for i, array in enumerate(results):
            where = f" in {out[i]}" if out else ""
            shape = " x ".join(map(str, array.shape))
            console.print(_escape(f"output {i}: {shape}, {array.dtype}{where}"))
        if not reports:
            found = ", ".join(kernels_in(names)) or "none"
            console.print(
                _escape(
                    f"{file} called no kernel (it has: {found}). Give inputs to call one, such as "
                    f"`makalu run {file} 64x64:bf16 64x64:bf16`."
                )
            )


@app.command()
def demo(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="Machine: TINY, SMALL or TRN. (default: TRN, on verilator SMALL, on pysim TINY)",
        ),
    ] = None,
    backend: BackendOption = "auto",
    images: Annotated[
        int | None,
        typer.Option(
            "--images",
            help="Test images. (default: on TRN all 397, else 256, on pysim 8)",
            min=1,
            max=397,
        ),
    ] = None,
    as_json: JsonOption = False,
):
    """Classify handwritten digits: a small network whose matrix products run on the core.

    Without a C compiler a smaller network runs on SMALL, by Verilator; where nothing can be
    compiled, a still smaller one on TINY in Amaranth's simulator.
    """
    from .demo import run_demo, work_for

    with _errors():
        console = _err()
        backend = _backend(backend)
        if config is None:
            machine, backend = _demo_machine(backend, console)
        else:
            machine = _config(config)
        slow = (devices.choose(backend, machine)[0] if backend == "auto" else backend) == "pysim"
        usual, sizes = work_for(machine, slow=slow)
        images = images or usual
        if slow:
            console.print(
                "The hardware runs in Amaranth's simulator, about a hundred cycles per second, so "
                f"a smaller network sees fewer images: {machine.name}, {images} images."
            )
        with _Bar(console) as bar:

            def say(text):
                bar.say(text)
                if not as_json and not bar.shown:
                    console.print(_escape(text))

            def progress(layer, layers, issued, total, cycles):
                part = issued / total if total else 0
                text = f"layer {layer + 1} of {layers}"
                if cycles is not None:
                    text += f", {cycles:,} cycles"
                bar.progress.update(
                    bar.task, description=text, completed=1000 * (layer + part), total=1000 * layers
                )

            result = run_demo(
                machine,
                backend,
                images=images,
                sizes=sizes,
                say=say,
                progress=progress if bar.shown else None,
                on_build=bar.building,
            )
        if as_json:
            print(json.dumps(result.to_dict(), indent=1))
        else:
            _print_demo(_out(), result)
        if not result.same_bits:
            raise typer.Exit(FAILED)


def _demo_machine(backend, console):
    """The largest machine that can be simulated here in good time, and the backend."""
    if backend != "auto":
        return {"verilator": SMALL, "pysim": TINY}.get(backend, TRN), backend
    reason = ""
    for machine in (TRN, SMALL):
        choice, reason = devices.choose("auto", machine)
        if choice not in ("pysim", "golden"):
            if machine is not TRN:
                console.print(f"{machine.name} instead of TRN: {_escape(reason)}.")
            return machine, "auto"
    # No compiler: show the hardware all the same, with less work.
    console.print(f"No compiled simulation here ({_escape(reason)}).")
    return TINY, "pysim"


def _print_demo(console, result):
    layers = " x ".join(map(str, result.layers))
    report = result.report
    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]task[/bold]", f"{result.images} handwritten digits, network {layers}")
    table.add_row(
        "[bold]accuracy[/bold]",
        f"{result.accuracy:.1%} on the core (BF16), {result.reference_accuracy:.1%} in numpy "
        "(binary32)",
    )
    verdict = "[green]equal, every bit[/green]" if result.same_bits else "[red]DIFFERENT[/red]"
    table.add_row("[bold]golden model[/bold]", verdict)
    console.print(table)
    console.print(report)
    console.print(f"\nall together {result.total_s:.1f} s, training {result.train_s:.1f} s of it")


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write to.")],
    config: ConfigOption = "SMALL",
    as_json: JsonOption = False,
):
    """Write the core as Verilog, with AXI ports, for any simulator or synthesis tool."""
    with _errors():
        machine = _config(config)
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"{out}: a file, not a directory to write to")
        out.mkdir(parents=True, exist_ok=True)  # refused before the work
        from ..rtl.verilog import write_export

        began = time.perf_counter()
        with _Bar(_err()) as bar:
            bar.say(f"converting {machine.name} to Verilog")
            files = write_export(machine, out)
        took = time.perf_counter() - began
        if as_json:
            print(json.dumps({"files": [str(path) for path in files], "seconds": took}, indent=1))
            return
        for path in files:
            _out().print(_escape(f"{path}  {path.stat().st_size:,} bytes"))
        _out().print(f"{took:.1f} s")


bench = typer.Typer(rich_markup_mode="markdown")
app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def _bench(
    context: typer.Context,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", help="Machine: TINY, SMALL or TRN; repeatable. [default: all three]"
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option("--backend", help="Only this simulator. [default: every one that is there]"),
    ] = "auto",
    dtype: DtypeOption = "bf16",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Measure only this product, on one machine [default: SMALL] and one backend; "
            "M x K x N, such as 64x64x128; repeatable.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Repeat a product for so long.", min=0)
    ] = 3.0,
    build: Annotated[
        bool, typer.Option("--build", help="Build every simulator anew, from an empty cache.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw to this path, with .png and with .svg.")
    ] = None,
    as_json: JsonOption = False,
):
    """Measure the simulators side by side: speed, cost, memory, time to build.

    Each measurement runs in a process of its own, one after the other, and multiplies one product
    again and again; its bits are compared with the reference.
    """
    if context.invoked_subcommand is not None:
        return
    with _errors():
        machines = [_config(name) for name in config or ()]
        backend, dtype = _backend(backend), _dtype(dtype, among=MATMUL_FORMATS) or ""
        if shape:
            if len(machines) > 1 or build or plot:
                raise UsageError("--shape goes with one --config, without --build and --plot")
            shapes = [_shape(text) for text in shape]
            _bench_shapes(machines[0] if machines else SMALL, backend, dtype, shapes, as_json)
            return
        from . import bench as measurements

        if plot is not None:
            measurements.need_matplotlib()
        chosen = measurements.cases(
            [machine.name for machine in machines], backend,
            dtype=dtype, seconds=seconds, fresh=build,
        )  # fmt: skip
        rows = []
        say = _silent if as_json else _out().print
        try:
            for line in measurements.heading():
                say(_escape(line))
            with _Bar(_err()) as bar:
                for case in chosen:
                    bar.say(f"{case.config} on {case.backend}")
                    rows.append(measurements.measure(case, bar.building))
                    bar.reset()
                    say(_escape(measurements.line_of(rows[-1])))
            for line in measurements.summary(rows):
                say(_escape(line))
        finally:
            if as_json:
                print(json.dumps(measurements.to_dict(rows), indent=1))
        for path in measurements.plot(rows, plot) if plot is not None else ():
            _err().print(_escape(f"wrote {path}"))
        if any("failed" in row for row in rows):
            raise typer.Exit(FAILED)


@bench.command()
def shapes(
    shape: Annotated[
        list[str] | None,
        typer.Argument(help="M x K x N, such as 512x512x512. [default: the table's]"),
    ] = None,
    config: ConfigOption = "TRN",
    backend: BackendOption = "native",
    largest: Annotated[
        int | None,
        typer.Option("--max", help="Leave out shapes with a longer edge.", min=1),
    ] = None,
    as_json: JsonOption = False,
):
    """Cycles and PE utilization by shape, beside the bound and other projects.

    With operands in SBUF, and from HBM to HBM. Where ours is more than 5 % above the bound, the
    line below says what it waited for. A row is printed as soon as it is there.
    """
    from . import shapes as table

    with _errors():
        machine, backend = _config(config), _backend(backend)
        if backend in ("auto", "golden"):
            raise UsageError("--backend must be one that counts cycles: native, verilator or pysim")
        chosen = table.chosen_shapes(machine.name, [_shape(text) for text in shape or ()], largest)
        rows, say, facts = [], _silent if as_json else _out().print, {}
        try:
            with _Bar(_err()) as bar, _open(machine, backend, None, bar) as dev:
                facts = {"config": machine.name, "backend": dev.backend}
                for line in table.heading(dev):
                    say(_escape(line))
                for m, k, n in chosen:
                    bar.reset()
                    bar.say(f"{m} x {k} x {n}, {len(rows) + 1} of {len(chosen)}")
                    rows.append(table.measure(dev, (m, k, n)))
                    for line in table.lines_of(rows[-1], machine.rows):
                        say(_escape(line))
            for line in table.legend(machine.rows):
                say(_escape(line))
        finally:
            if as_json:
                print(json.dumps(table.to_dict(facts, rows), indent=1))
        if any("failed" in row[name] for row in rows for name in ("in_sbuf", "from_hbm")):
            raise typer.Exit(FAILED)


def _silent(text):
    """Prints nothing."""


def _bench_shapes(machine, backend, dtype, shapes, as_json):
    """Products of any shape on one machine and one backend."""
    rng = np.random.default_rng(0)
    rows = []
    with _Bar(_err()) as bar, _open(machine, backend, None, bar) as dev:
        for m, k, n in shapes:
            a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
            dev.matmul(a, b, dtype=dtype, check=True)
            assert dev.last_run is not None, "it has run"
            rows.append({"m": m, "k": k, "n": n, "dtype": dtype, **dev.last_run.to_dict()})
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("M x K x N", "cycles", "PE", "MACs", "cycles/s", "compile", "run")
    for row in rows:
        used, speed = row["pe_utilization"], row["cycles_per_second"]
        table.add_row(
            f"{row['m']} x {row['k']} x {row['n']}",
            "-" if row["cycles"] is None else f"{row['cycles']:,}",
            "-" if used is None else f"{used:.1%}",
            f"{row['macs']:,}",
            "-" if speed is None else f"{speed:,.0f}",
            f"{row['compile_s']:.2f} s",
            f"{row['wall_s']:.2f} s",
        )
    _out().print(f"{machine.name} on {dev.backend}, {dtype}")
    _out().print(table)


def _shape(text, option="--shape"):
    try:
        m, k, n = (int(part) for part in text.lower().split("x"))
        if min(m, k, n) < 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not of the form MxKxN, such as 64x64x128", param_hint=option
        ) from None
    return m, k, n


@app.command()
def compare(
    file: Annotated[
        Path | None, typer.Argument(help="A Python file with NKI kernels, as for `makalu run`.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the kernel, as for `makalu run`.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", help="Kernel to call, if the file has several.")
    ] = None,
    matmul: Annotated[
        str | None, typer.Option("--matmul", help="Instead of a file a product, M x K x N.")
    ] = None,
    backends: Annotated[
        str, typer.Option("--backends", help="The two to compare, with a comma between.")
    ] = "native,verilator",
    config: ConfigOption = "TINY",
    dtype: DtypeOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of random inputs.", min=0)] = 0,
    window: Annotated[
        int, typer.Option("--window", help="Cycles between two looks at the memories.", min=1)
    ] = 1000,
    cycles: Annotated[
        str | None,
        typer.Option("--cycles", help="Look in every cycle from FIRST:LAST, and no further."),
    ] = None,
    operands: Annotated[
        Path | None,
        typer.Option("--operands", help="Write a.npy and b.npy of --matmul to this folder."),
    ] = None,
    hbm_mib: HbmOption = None,
    as_json: JsonOption = False,
):
    """Run a program on two simulations in lock step, and explain the first difference.

    Counters, registers and memories are compared; at the end the memories with the golden model's.
    Exit code 0 if all is equal, 1 if not.
    """
    from . import compare as lockstep

    with _errors():
        machine, names = _config(config), lockstep.check_backends(backends.split(","))
        if (file is None) == (matmul is None):
            raise UsageError("give a kernel file or --matmul MxKxN, one of them")
        only = _cycle_window(cycles)
        if matmul is None:
            dtype = _dtype(dtype)
        else:
            dtype = _dtype(dtype or "bf16", among=MATMUL_FORMATS)
        size = hbm_mib or (1 if "pysim" in names else 16)
        with _Bar(_err()) as bar:
            with lockstep.Recorder(machine, hbm=size << 20) as recorder:
                bar.say("running on golden")
                if matmul is not None:
                    words = _record_matmul(recorder, _shape(matmul, "--matmul"), dtype, seed,
                                           operands)  # fmt: skip
                else:
                    words = _record_file(recorder, file, inputs, kernel, dtype, seed)
                recorded, hbm = recorder.recorded, recorder.hbm
            pair = lockstep.Machines.of(names, machine, hbm, bar.building)
            results = []
            for program in recorded:
                results.append(
                    lockstep.compare(
                        pair, program, window=window, only=only,
                        progress=lambda text, cycle: bar.say(f"{text}, cycle {cycle:,}"),
                    )
                )  # fmt: skip
                if not results[-1].equal:
                    break
        tail = ["--config", machine.name]
        if dtype is not None:
            tail += ["--dtype", dtype]
        if file is not None or (matmul is not None and seed):
            tail += ["--seed", str(seed)]
        if hbm_mib is not None:
            tail += ["--hbm-mib", str(hbm_mib)]
        waves = None
        if "native" in names and len(results) == 1:
            there = [*words["run"], "--config", machine.name, "--backend", "native"]
            waves = there + (["--dtype", dtype] if dtype is not None else [])
        commands = lockstep.rerun_commands(
            {"compare": [*words["compare"], "--backends", ",".join(names), *tail], "waves": waves},
            results[-1],
        )
        if as_json:
            found = [result.to_dict() for result in results]
            print(json.dumps({"programs": found, "again": commands}, indent=1))
        else:
            console = _out()
            for program, result in zip(recorded, results, strict=False):
                title = f"{program.program.kernel} on {machine.name}, {' and '.join(names)}: "
                console.print(_escape(title + "\n".join(result.lines())))
            if commands:
                console.print(_escape("\n".join(["", "look again", *commands])))
        if not results[-1].equal:
            raise typer.Exit(FAILED)


def _cycle_window(text):
    if text is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) > int(found[2]):
        raise typer.BadParameter(
            f"{text!r} is not of the form FIRST:LAST, such as 1000:1100", param_hint="--cycles"
        )
    return int(found[1]), int(found[2])


def _record_matmul(recorder, shape, dtype, seed, operands):
    """Multiply on the recorder; the words of commands that do the same."""
    from .files import save_array

    m, k, n = shape
    rng, fmt = np.random.default_rng(seed), format_of(dtype)
    a, b = (fmt.encode(rng.standard_normal(edges)) for edges in ((m, k), (k, n)))
    recorder.matmul(a, b, dtype=dtype)
    folder = Path() if operands is None else operands
    paths = folder / "a.npy", folder / "b.npy"
    if operands is not None:
        operands.mkdir(parents=True, exist_ok=True)
        for path, array in zip(paths, (a, b), strict=True):
            save_array(path, fmt.decode(array).astype(np.float32))
    compared = ["--matmul", f"{m}x{k}x{n}"]
    if operands is not None:
        compared += ["--operands", str(operands)]
    return {"compare": compared, "run": ["matmul", *map(str, paths), "--out", "c.npy"]}


def _record_file(recorder, file, inputs, kernel, dtype, seed):
    """Run a kernel file on the recorder; the words of commands that do the same."""
    from .kernels import argument, bind, choose_kernel, kernel_code, nki_is_ours, run_file

    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    words = [str(file), *(inputs or ())]
    with nki_is_ours():
        if inputs or kernel is not None:
            chosen = choose_kernel(file, run_file(file, as_script=False), kernel)
            rng = np.random.default_rng(seed)
            arguments = [argument(text, dtype=dtype, rng=rng) for text in inputs or ()]
            bind(chosen, arguments)
            with kernel_code(file):
                recorder.run(chosen, *arguments)
        else:
            run_file(file, as_script=True)
    if not recorder.recorded:
        raise UsageError(f"{file} called no kernel: give inputs to call one, as for `makalu run`")
    if kernel is not None:
        words += ["--kernel", kernel]
    return {"compare": words, "run": ["run", *words, "--seed", str(seed)]}


@app.command()
def info(
    counters: Annotated[bool, typer.Option("--counters", help="List the counters too.")] = False,
    as_json: JsonOption = False,
):
    """Show the machines there are, the number formats and the counters."""
    machines = (TINY, SMALL, TRN)
    if as_json:
        print(
            json.dumps(
                {
                    "machines": [_facts(machine) for machine in machines],
                    "formats": [
                        {
                            "name": fmt.name,
                            "aliases": _aliases(fmt),
                            "bytes": fmt.bytes,
                            "multiplied": fmt in MATMUL_FORMATS,
                        }
                        for fmt in FORMATS
                    ],
                    "counters": [
                        {"name": e.full_name, "unit": e.unit, "meaning": e.meaning}
                        for e in COUNTERS
                    ],
                },
                indent=1,
            )
        )
        return
    console = _out()
    table = Table("", *(machine.name for machine in machines))
    for title, fact in (
        ("array", lambda m: f"{m.rows} x {m.cols}"),
        ("SBUF per partition", lambda m: f"{m.sbuf_bytes // 1024} KiB"),
        ("PSUM per partition", lambda m: f"{m.psum_banks} x {m.psum_bank_bytes} B"),
        ("longest moving operand", lambda m: f"{m.psum_bank_words} columns"),
        ("DMA engines", lambda m: str(m.dma_engines)),
        ("fingerprint", lambda m: f"{m.fingerprint:#010x}"),
    ):
        table.add_row(title, *(fact(machine) for machine in machines))
    console.print(table)
    table = Table("number format", "also called", "bytes", "matmul operand")
    for fmt in FORMATS:
        multiplied = "yes" if fmt in MATMUL_FORMATS else ""
        table.add_row(fmt.name, ", ".join(_aliases(fmt)), f"{fmt.bytes}", multiplied)
    console.print(table)
    if counters:
        table = Table("counter", "unit", "meaning")
        for event in COUNTERS:
            table.add_row(event.full_name, event.unit, event.meaning)
        console.print(table)


def _aliases(fmt):
    return [alias for alias, named in ALIASES.items() if named is fmt and alias != fmt.name]


def _facts(machine):
    return {
        "name": machine.name,
        "rows": machine.rows,
        "cols": machine.cols,
        "sbuf_bytes_per_partition": machine.sbuf_bytes,
        "psum_banks": machine.psum_banks,
        "psum_bank_bytes": machine.psum_bank_bytes,
        "dma_engines": machine.dma_engines,
        "fingerprint": machine.fingerprint,
    }


@app.command()
def doctor(as_json: JsonOption = False):
    """Say which backends work on this machine, and what to install for the others."""
    from . import doctor as checks

    found = checks.examine()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = _out()
    for title, rows in found.items():
        table = Table(title, "", "")
        for row in rows:
            mark = "[green]ok[/green]" if row["ok"] else "[red]missing[/red]"
            table.add_row(row["name"], mark, _escape(row["detail"]))
        console.print(table)
    best, why = devices.choose("auto", SMALL)
    console.print(_escape(f"auto on SMALL takes {best}: {why}"))


def main():
    """Entry point of the ``makalu`` command."""
    try:
        app()
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        sys.exit(1)
