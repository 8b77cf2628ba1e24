"""The same C compiled in other ways does the same: sanitizers, never skipping, two threads."""

import re
import signal

import pytest
from makalu.rtl.arch.config import TINY
from makalu.sim import toolchain
from makalu.sim.backends import native
from makalu.sim.native import emit

from .lockstep import build
from .sanitized import ADDRESS, PLAIN, THREAD, UNDEFINED, recompile, recompile_core, replay
from .test_cells import WIDTHS, RandomLogic, RandomMemory
from .test_lanes import Grid, Pairs, Ripple

PROGRAMS, FEW = 50, 8

TRAPS = (-signal.SIGILL, -signal.SIGTRAP)

names = pytest.mark.parametrize("sanitizer", [UNDEFINED, ADDRESS], ids=["undefined", "address"])
threads = pytest.mark.parametrize("threads", [1, 2], ids=["one", "two"])


def check(result, expected):
    code, lines, errors = result
    assert code not in TRAPS, f"undefined behaviour: the model trapped after {len(lines)} lines"
    assert code == 0, errors[-6000:]
    assert len(lines) == len(expected)
    for line, wanted in zip(lines, expected, strict=True):
        assert line == wanted


# The core -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core():
    """Folder of TINY."""
    try:
        return native.build(TINY)
    except toolchain.ToolMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def usual(core, request):
    """What TINY does in random programs: memories and counters, a line for each program."""
    seed = request.config.getoption("--seed")
    code, lines, errors = replay("machine", core, seed, PROGRAMS)
    assert code == 0, errors
    assert len(set(lines)) == PROGRAMS
    return lines


@threads
@pytest.mark.parametrize("skip", [0, 1], ids=["always", "skipping"])
def test_skipping_and_a_second_thread_change_nothing(core, usual, seed, skip, threads):
    folder = recompile_core(core, PLAIN, (f"-DSKIP={skip}", "-DWORTH=0"))
    check(replay("machine", folder, seed, PROGRAMS, threads=threads), usual)


@names
def test_sanitizers_find_nothing_in_the_core(core, usual, seed, sanitizer):
    folder = recompile_core(core, sanitizer)
    check(replay("machine", folder, seed, FEW, sanitizer=sanitizer), usual[:FEW])


def test_threads_of_the_core_do_not_race(core, usual, seed):
    folder = recompile_core(core, THREAD)
    check(replay("machine", folder, seed, FEW, threads=2, sanitizer=THREAD), usual[:FEW])


# Other designs ------------------------------------------------------------------------------------

DESIGNS = {
    **{f"logic{n}": lambda seed, n=n: RandomLogic(3000 * seed + n, WIDTHS[n % 3], 40)
       for n in range(4)},
    **{f"memory{n}": lambda seed, n=n: RandomMemory(3000 * seed + n) for n in range(3)},
    "grid": lambda _: Grid(12, 3, [None, 0, 1, None, 3, 2, 5, None, 7, 4, 9, 9]),
    "pairs": lambda _: Pairs(9),
    "ripple": lambda _: Ripple(9),
}  # fmt: skip

CYCLES = 200


def designed(design, folder, seed, block=4):
    """Compile a design, ``block`` lanes to a task; return the folder and what it does."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit, "BLOCK", block)
        build(DESIGNS[design](seed), folder, flags=("-O0",)).close()
    code, lines, errors = replay("design", folder, seed, CYCLES)
    assert code == 0, errors
    assert len(lines) == CYCLES // 50
    return folder, lines


@pytest.mark.parametrize("design", DESIGNS)
def test_sanitizers_find_nothing_in_designs(tmp_path, seed, design):
    folder, lines = designed(design, tmp_path / "usual", seed)
    for sanitizer in (UNDEFINED, ADDRESS):
        recompile(folder, tmp_path / sanitizer.name, sanitizer)
        result = replay("design", tmp_path / sanitizer.name, seed, CYCLES, sanitizer=sanitizer)
        check(result, lines)


@pytest.mark.parametrize("spins", [1, 20000])
def test_threads_of_a_grid_do_not_race(tmp_path, seed, spins):
    folder, lines = designed("grid", tmp_path / "usual", seed)
    recompile(folder, tmp_path / "raced", THREAD, flags=(f"-DSPINS={spins}",))
    check(
        replay("design", tmp_path / "raced", seed, CYCLES, threads=2, sanitizer=THREAD), lines
    )  # fmt: skip


# The tests can fail -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Folder of a small grid, and what it does."""
    return designed("grid", tmp_path_factory.mktemp("grid") / "usual", 1)


def spoiled(grid, folder, sanitizer, code):
    """Compile a grid that does something wrong as its outputs settle; return how it ends.

    ``code`` may use the name and the length of an array of the state.
    """
    arrays = re.findall(
        r"^    _Alignas\(64\) u\d+ (\w+)\[(\d+) \+ (\d+)\];",
        (grid[0] / "model.h").read_text(),
        re.M,
    )
    array, length, apart = arrays[len(arrays) // 2]
    assert int(apart) == 0
    before, done = "void settle(struct state *s) { ", []

    def change(name, text):
        if name == "model.c":
            done.append(text.count(before))
            return text.replace(before, before + code.format(array=array, length=length))
        return text

    recompile(grid[0], folder, sanitizer, change=change)
    assert done == [1]
    return replay("design", folder, 1, CYCLES, sanitizer=sanitizer)


@pytest.mark.parametrize(
    "code",
    [
        "volatile int n = 40; n = 1 << n; ",
        "volatile int n = 0x7fffffff; n = n + 1; ",
        "volatile int n = {length}; s->{array}[n] = 1; ",
    ],
    ids=["shift", "overflow", "bounds"],
)
def test_undefined_behaviour_is_found(grid, tmp_path, code):
    code, lines, _ = spoiled(grid, tmp_path, UNDEFINED, code)
    assert code in TRAPS
    assert not lines


@pytest.mark.parametrize(
    "code",
    [
        "volatile int n = {length}; (&s->{array}[0])[n] = 1; ",
        "volatile char *p = malloc(8); p[8] = 1; ",
    ],
    ids=["between arrays", "outside"],
)
def test_a_wrong_address_is_found(grid, tmp_path, code):
    code, _, errors = spoiled(grid, tmp_path, ADDRESS, code)
    assert code
    assert "AddressSanitizer" in errors
    assert "in settle" in errors


def test_a_race_is_found(grid, tmp_path):
    """The first thread does not wait for the second, which is slow."""
    run, done = "    run_task(p->state, ", "atomic_load(&p->done) < p->count"

    def change(name, text):
        if name == "model.c":
            assert text.count(run) == text.count(done) == 1
            slow = "    if (thread) for (volatile int i = 0; i < 100000; ++i) {}\n"
            return text.replace(run, slow + run).replace(done, "0")
        return text

    recompile(grid[0], tmp_path, THREAD, change=change)
    code, _, errors = replay("design", tmp_path, 1, CYCLES, threads=2, sanitizer=THREAD)
    assert code == 66
    assert "data race" in errors
    assert re.search(r"#\d (commit|memory)\d", errors), errors


# Names --------------------------------------------------------------------------------------------


def test_what_is_called_like_a_function_of_the_system_is_not_it(grid, tmp_path):
    """The C library of Linux has a function ``step``, too, and it comes first."""
    before = "void settle(struct state *s) { "
    more = "u64 c = s->cycles; step(s, 1); if (s->cycles != c + 1) abort(); "

    def change(name, text):
        if name == "model.c":
            assert text.count(before) == 1
            return text.replace(before, f"void step(struct state *, u64);\n{before}{more}")
        return text

    recompile(grid[0], tmp_path, PLAIN, flags=("-O0",), change=change)
    code, lines, _ = replay("design", tmp_path, 1, CYCLES)
    assert code == 0
    assert len(lines) == CYCLES // 50
