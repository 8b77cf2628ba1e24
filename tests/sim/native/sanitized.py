"""Compile the C of a model once more, with flags that look for mistakes, and run it."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from makalu.sim import toolchain
from makalu.sim.native.model import compile_files

__all__ = ["ADDRESS", "PLAIN", "THREAD", "UNDEFINED", "recompile", "recompile_core", "replay"]


@dataclass(frozen=True)
class Sanitizer:
    """Flags, and the library that has to be loaded before everything else."""

    name: str
    flags: tuple
    traps: bool = False
    library: str = ""
    options: tuple = ()


PLAIN = Sanitizer("none", ("-O1",))
UNDEFINED = Sanitizer("undefined behaviour", ("-O1",), traps=True)
ADDRESS = Sanitizer(
    "AddressSanitizer", ("-O1", "-g1", "-fsanitize=address"),
    library="libasan.so", options=(("ASAN_OPTIONS", "detect_leaks=0"),),
)  # fmt: skip
THREAD = Sanitizer(
    "ThreadSanitizer", ("-O1", "-g1", "-fsanitize=thread", "-DWORTH=0"),
    library="libtsan.so", options=(("TSAN_OPTIONS", "exitcode=66"),),
)  # fmt: skip

_HERE = Path(__file__).parent


@functools.cache
def _compilers():
    """Commands of compilers, by what one has."""
    found = {}
    for name in ("gcc", "cc"):
        path = shutil.which(name)
        for library in ("libasan.so", "libtsan.so"):
            if path and library not in found:
                done = subprocess.run(
                    [path, f"-print-file-name={library}"], capture_output=True, text=True,
                    check=False,
                )  # fmt: skip
                if Path(done.stdout.strip()).is_absolute():
                    found[library] = [path], done.stdout.strip()
    return found


def _compiler(sanitizer):
    """Command of a compiler, and the library to load first."""
    if not sanitizer.library:
        return toolchain.find_clang_cc(), None
    if sanitizer.library not in _compilers():
        pytest.skip(f"no compiler with {sanitizer.name}: the system's package gcc has it")
    return _compilers()[sanitizer.library]


@functools.cache
def _trap(cc):
    """Flags that make undefined behaviour a trap: no library is needed for it."""
    if "clang" in toolchain.tool_version(cc) or "ziglang" in cc:
        return "-fsanitize=undefined,local-bounds", "-fsanitize-trap=undefined,local-bounds"
    return "-fsanitize=undefined,bounds-strict", "-fsanitize-undefined-trap-on-error"


def _guards(text):
    """The header with room between the arrays of the state, and C that lets nobody touch it."""
    poison = [
        "void __asan_poison_memory_region(void const volatile *, size_t);",
        "void guard(struct state *s) {",
    ]

    def room(found):
        name, count = found[2], found[3]
        poison.append(
            f"    __asan_poison_memory_region((char *)(s->{name} + {count}), "
            f"(char *)s->guard_{name} + 64 - (char *)(s->{name} + {count}));"
        )
        return f"{found[0]}\n    _Alignas(64) u8 guard_{name}[64];"

    text = re.sub(r"^    _Alignas\(64\) (\w+) (\w+)\[(\d+) \+ \d+\];", room, text, flags=re.M)
    return text, "\n".join([*poison, "}", ""])


def _count_help(file):
    """Let the first thread leave the first task to the second one, and that one count its tasks."""
    text, wait = file.read_text(), "!thread && i < 5000 && !(p->ticket & 0xffff)"
    for before, more in (
        ("struct share {", "#include <unistd.h>\nunsigned helped;\n"),
        (
            "    u64 ticket = atomic_fetch_add(",
            f"    for (int i = 0; {wait}; ++i) usleep(20);\n",
        ),
        ("    run_task(p->state, ", "    if (thread) helped++;\n"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, more + before)
    file.write_text(text)


def recompile(source, folder, sanitizer, *, flags=(), change=None):
    """Compile the C of the model in folder ``source`` in another folder.

    ``change`` is told the name and the text of each file and returns another text.
    """
    cc, _ = _compiler(sanitizer)
    folder.mkdir(exist_ok=True)
    for file in Path(source).iterdir():
        if file.suffix in (".c", ".h", ".json"):
            text = file.read_text()
            (folder / file.name).write_text(change(file.name, text) if change else text)
    if sanitizer is ADDRESS:
        header, code = _guards((folder / "model.h").read_text())
        (folder / "model.h").write_text(header)
        with (folder / "model.c").open("a") as file:
            file.write(code)
    if sanitizer is THREAD:
        _count_help(folder / "model.c")
    trap = _trap(tuple(cc)) if sanitizer.traps else ()
    compile_files(folder, cc=cc, flags=(*sanitizer.flags, *trap, *flags))
    return folder


def recompile_core(source, sanitizer, flags=()):
    """The same, once for all runs of the tests: a folder of the cache."""
    files = sorted(file for file in Path(source).iterdir() if file.suffix in (".c", ".h"))
    cc, library = _compiler(sanitizer)
    key = toolchain.hash_of(
        *files, Path(__file__), sanitizer, flags, toolchain.tool_version(cc), library,
        toolchain.processor(),
    )  # fmt: skip
    return toolchain.cached(
        "sanitized", "tiny", key, lambda work: recompile(source, work, sanitizer, flags=flags)
    )


@functools.cache
def _fixed_addresses():
    """A command before a command, so that its memory lies where ThreadSanitizer expects it."""
    command = [shutil.which("setarch") or "setarch", "-R"]
    with contextlib.suppress(OSError):
        if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
            return command
    return []


def replay(kind, folder, seed, count, *, threads=1, sanitizer=PLAIN):
    """Run a model in a process of its own; return its exit status, its lines and its errors.

    Where tasks of a second thread are counted (``THREAD``), there must be some.
    """
    environment, before = dict(os.environ), []
    if sanitizer.library:
        environment["LD_PRELOAD"] = _compiler(sanitizer)[1]
        environment.update(sanitizer.options)
        before = _fixed_addresses() if sanitizer is THREAD else []
    done = subprocess.run(
        [*before, sys.executable, str(_HERE / "replay.py"), kind, str(folder), str(seed),
         str(count), str(threads)],
        env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("no ThreadSanitizer for this system's layout of memory")
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith("helped "):
        assert int(lines.pop().split()[1]) > 0, "the second thread never had anything to do"
    else:
        assert done.returncode or sanitizer is not THREAD
    return done.returncode, lines, done.stderr
