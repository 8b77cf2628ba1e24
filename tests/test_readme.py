"""The READMEs: their status, links, paths, commands and Python do what they say."""

import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import makalu
import ml_dtypes
import numpy as np
import pytest
import typer
from makalu.host.cli import app
from makalu.host.devices import BACKENDS

ROOT = Path(__file__).parent.parent
FOLDERS = ("rtl", "sim", "firmware", "host", "tests")
PAGES = [ROOT / "README.md", *sorted(p for f in FOLDERS for p in (ROOT / f).rglob("README.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|&& |\| )(?:\S*/)?(makalu [^&|\n]+)", re.MULTILINE)
FILE = re.compile(r"[\w/.]+(?<!\.)(?:\.(?:py|md|json|cpp|toml)|/)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def status():
    spec = importlib.util.spec_from_file_location("status", ROOT / "tests/bench/status.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page):
    return FENCE.sub("", page.read_text())


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


# Status -------------------------------------------------------------------------------------------


def test_the_status_is_what_the_code_says():
    module = status()
    _, inside, _ = module.section(module.README.read_text())
    assert inside == module.render(), "run python tests/bench/status.py"


def test_a_change_of_the_code_or_of_a_figure_changes_the_status():
    module = status()
    figures = {
        "backend": "pysim", "dtype": "float16",
        "products": [{"machine": "TINY", "m": 4, "k": 4, "n": 8, "cycles": 16}],
        "resident": [{"machine": "SMALL", "m": 4, "k": 4, "n": 16, "cycles": 2}],
        "in_sbuf": [{"machine": "TINY", "k_tiles": 3, "utilization": 0.5}],
        "kernels": [{"machine": "SMALL", "kernel": "softmax, 4 x 8", "cycles": 5}],
    }  # fmt: skip
    text = module.render(figures)
    assert "| `TINY` | 4 x 4 x 8, `float16`, from HBM to HBM | 16 | 50.00 % |" in text
    assert "| `SMALL` | 4 x 4 x 16, `float16`, from SBUF to SBUF | 2 | 50.00 % |" in text
    assert "| `TINY` | 4 x 12 x 16," in text
    assert "| `SMALL` | softmax, 4 x 8 | 5 |" in text
    module.MACHINES = module.MACHINES[:2]
    assert "TRN" not in module.render(figures)


COLLECT = """
import inspect, json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        found = []
        for item in session.items:
            fixtures = [d[-1].func for d in item._fixtureinfo.name2fixturedefs.values()]
            sources = [inspect.getsource(f) for f in (item.function, *fixtures)]
            params = vars(item).get("callspec") and item.callspec.params.values() or ()
            found.append({
                "test": item.nodeid.partition("[")[0],
                "params": [str(getattr(value, "name", value)) for value in params],
                "marks": [mark.name for mark in item.iter_markers()],
                "source": "\\n".join(sources),
            })
        print("collected", json.dumps(found))

options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", "."]
sys.exit(pytest.main([*options, *sys.argv[1:]], [Collected()]))
"""
"""Prints what pytest collects of some tests: parameters, marks, the code of tests and fixtures."""


def collect(tests, folder=ROOT):
    """The cases of each test."""
    command = [sys.executable, "-P", "-c", COLLECT, *dict.fromkeys(tests)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {test: [] for test in tests}
    for case in json.loads(done.stdout.partition("collected ")[2].splitlines()[0]):
        cases[case["test"]].append(case)
    return cases


def runs(cases, name, names):
    """Whether one of the cases of a test is about the machine or backend ``name`` of ``names``.

    Its parameters say so, if those of any case name one of them; else its marks, or its code.
    """
    live = [case for case in cases if not {"skip", "xfail"} & {*case["marks"]}]
    if any({*names} & {*case["params"]} for case in cases):
        return any(name in case["params"] for case in live)
    words = (re.findall(r"\w+", case["source"]) + case["marks"] for case in live)
    return any(name in found for found in words)


def test_what_the_status_calls_tested_is_tested():
    """By tests that pytest collects with that machine and backend, and does not always skip."""
    module = status()
    machines = [machine.name for machine in module.MACHINES]
    claims = [
        (machine, backend, test)
        for backend, proved in module.PROVED.items()
        for machine, test in proved.items()
    ]
    claims += [(machine, None, test) for machine, (_, test) in module.EXPORTED.items()]
    assert set(module.PROVED) <= set(BACKENDS)
    cases = collect([test for _, _, test in claims])
    for machine, backend, test in claims:
        assert machine in machines
        assert runs(cases[test], machine, machines), f"{test} does not run {machine}"
        assert backend is None or runs(cases[test], backend, BACKENDS), f"{test}: no {backend}"


def test_a_claim_without_a_test_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # quicker
    machines = "TINY", "SMALL", "TRN"
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('backend', ['golden', pytest.param('pysim', marks="
        "[pytest.mark.skip])])\n"
        "def test_one(backend): assert 'SMALL' and 'native'\n"
        "@pytest.mark.xfail\n"
        "def test_two(): assert 'TRN'\n"
    )
    one, two = collect(["test_some.py::test_one", "test_some.py::test_two"], tmp_path).values()
    assert runs(one, "golden", BACKENDS)
    assert not runs(one, "pysim", BACKENDS)  # is skipped
    assert not runs(one, "native", BACKENDS)  # is spoken of, but is no parameter
    assert runs(one, "SMALL", machines)
    assert not runs(one, "TRN", machines)
    assert not runs(two, "TRN", machines)
    with pytest.raises(AssertionError, match="not found"):
        collect(["test_some.py::test_three"], tmp_path)


def test_every_kernel_is_in_the_table_of_kernels():
    from makalu.firmware import kernels, nki

    text = (ROOT / "firmware" / "README.md").read_text()
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        contents = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        found |= {
            (module.name, item.__name__)
            for item in contents.values()
            if isinstance(item, nki.Kernel) and item.function.__module__.endswith(module.name)
        }
    assert len(found) > 15
    for module, name in found:
        assert f"`{name}(" in text, f"{name} of kernels/{module}.py is not in firmware/README.md"


def test_figures_are_kept_as_they_are_written():
    module = status()
    text = module.FIGURES.read_text()
    assert module._json(json.loads(text)) == text


# Links and paths ----------------------------------------------------------------------------------


def anchors(page):
    """Names under which GitHub reaches the headings of a page."""
    found = set()
    for line in prose(page).splitlines():
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(title.replace(" ", "-"))
    return found


@pages
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


@pages
def test_files_that_are_named_exist(page):
    """A code span that is nothing but a path below the README or below the root."""
    for span in SPAN.findall(prose(page)):
        if FILE.fullmatch(span) and not span.startswith("/"):
            assert any((folder / span).exists() for folder in (page.parent, ROOT)), span


@pages
def test_lines_are_not_too_long(page):
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            assert len(line) <= 100, line


# Commands and Python ------------------------------------------------------------------------------


def commands(page):
    """Every ``makalu`` command that a page shows."""
    shown = [c for kind, text in FENCE.findall(page.read_text()) if not kind for c in
             COMMAND.findall(text)]  # fmt: skip
    return shown + [span for span in SPAN.findall(prose(page)) if span.startswith("makalu ")]


def parse(command):
    """Read a command as the command line does, without running it."""
    _, *words = shlex.split(command, comments=True)
    group = typer.main.get_command(app)
    context = group.make_context("makalu", words[:1])
    chosen = group.get_command(context, words[0])
    assert chosen is not None, f"there is no command {words[0]}"
    if words[1:]:  # else it may only be spoken of
        chosen.make_context(words[0], words[1:], parent=context)


@pages
def test_commands_are_understood(page):
    for command in commands(page):
        try:
            parse(command)
        except Exception as error:
            pytest.fail(f"{command}: {error!r} {getattr(error, 'message', '')}")


@pytest.mark.parametrize(
    "command", ["makalu matmul a.npy b.npy", "makalu demo --fast", "makalu dance", "makalu info x"]
)
def test_commands_that_do_not_exist_are_noticed(command):
    with pytest.raises(Exception, match=r"Missing|No such|no command|unexpected"):
        parse(command)


def test_commands_are_found():
    found = [command.split() for page in PAGES for command in commands(page)]
    assert {"demo", "matmul", "run", "export", "bench", "info", "doctor"} <= {c[1] for c in found}


@pytest.fixture
def names(monkeypatch, tmp_path, rng):
    """What the Python of the READMEs takes for granted, on the golden model."""
    import makalu.nki as nki
    import makalu.nki.isa as nisa
    import makalu.nki.language as nl

    @nki.jit
    def kernel(a, b):
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        tile = nl.load(a)
        nisa.tensor_copy(tile, nl.load(b))
        nl.store(out, tile)
        return out

    def array(*shape):
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    monkeypatch.chdir(tmp_path)
    with makalu.open("SMALL", "golden") as dev:
        yield {
            "makalu": makalu, "np": np, "dev": dev, "kernel": kernel, "a": array(16, 16),
            "b": array(16, 16), "array": array(16, 16), "y": array(16, 16),
            "lhsT": array(16, 16), "rhs": array(16, 128),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("page", "number"),
    [(p, i) for p in PAGES for i, _ in enumerate(blocks(p, "python"))],
    ids=lambda x: str(x.relative_to(ROOT)) if isinstance(x, Path) else str(x),
)
def test_python_runs(page, number, names):
    source = blocks(page, "python")[number].replace('backend="auto"', 'backend="golden"')
    exec(compile(source, f"{page.name}, block {number}", "exec"), names)


def test_the_readme_multiplies(names):
    (source,) = blocks(ROOT / "README.md", "python")
    exec(source.replace('backend="auto"', 'backend="golden"'), names)
    exact = names["a"].astype(np.float64) @ names["b"].astype(np.float64)
    np.testing.assert_allclose(names["c"], exact, rtol=1e-4, atol=1e-3)


def test_the_kernel_of_the_guide_multiplies(names):
    source = blocks(ROOT / "firmware/README.md", "python")[0]
    exec(source, names)
    left, right = names["lhsT"], names["rhs"]
    found = names["dev"].run(names["product"], left, right)
    exact = left.astype(np.float64).T @ right.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    assert Path("product.mkp").stat().st_size > 0
