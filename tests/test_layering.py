"""Who may import whom: models that import the hardware prove nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("rtl", "sim", "firmware", "host")


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path):
    """Absolute dotted parts (``("rtl", "arch", "isa")``) of every import, with its line."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                name = tuple((node.module or "").split(".")) if node.module else ()
                for alias in node.names:
                    yield (*base, *name, alias.name), node.lineno
            else:
                yield tuple((node.module or "").split(".")), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split(".")), node.lineno


SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def allowed(module, target):
    """Whether a module of this path may import that path (both inside the project)."""
    top = module[0]
    rtl_order = ("arch", "lib", "arith", "memory", "engines", "control")
    if target[:2] == ("rtl", "arch"):
        return True
    if top == "rtl":
        if target[0] != "rtl":
            return False
        if len(module) == 2 or module[1] not in rtl_order:
            return True  # core, verilog, interfaces
        if target[1] == "interfaces":
            return module[1] not in ("arch", "lib", "arith")
        if target[1] not in rtl_order:
            return False
        if module[1] == "arith":
            return target[1] in ("lib", "arith")
        if module[1] == "engines" and target[1] == "memory":
            return True
        return rtl_order.index(target[1]) <= rtl_order.index(module[1])
    models = (
        ("sim", "golden"),
        ("sim", "elementwise"),
        ("sim", "activation"),
        ("sim", "arithmetic"),
    )
    if module in models:
        return target[:2] in models
    if top == "sim":
        return target[0] in ("rtl", "sim")
    if top == "firmware":
        return target[0] == "firmware"
    if top == "host":
        if target[0] == "sim":
            return module[:2] == ("host", "devices") or "sim.toolchain" == ".".join(target[:2])
        return target[0] in ("host", "firmware") or target[:2] == ("rtl", "verilog")
    return False


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_respect_the_layers(path):
    module = module_of(path)
    if module[:2] == ("host", "front"):
        return  # the front re-exports by absolute names
    for target, line in imports_of(path):
        assert target[0] != "makalu", f"{path}:{line}: import relatively inside the package"
        if target[0] in FOLDERS:
            package = path.relative_to(ROOT).parent.parts
            assert package, path
            assert allowed(module, target), (
                f"{path.relative_to(ROOT)}:{line}: {'.'.join(module)} may not import "
                f"{'.'.join(target)}"
            )


def test_the_rule_catches_a_model_that_imports_the_hardware():
    assert not allowed(("sim", "golden"), ("rtl", "arith", "fma"))
    assert not allowed(("rtl", "arch", "isa"), ("rtl", "lib", "stream"))
    assert not allowed(("firmware", "program"), ("rtl", "core"))
    assert allowed(("sim", "golden"), ("rtl", "arch", "isa"))


def _alone(code):
    """What a Python prints that has neither this folder nor its parent on its path."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_folders_are_not_importable_by_their_bare_names():
    """However this pytest was started: `python -m pytest` has the root on its path."""
    code = (
        "import importlib.util, json\n"
        f"specs = {{name: importlib.util.find_spec(name) for name in {FOLDERS}}}\n"
        "print(json.dumps({name: str(spec.origin or spec.submodule_search_locations)"
        " for name, spec in specs.items() if spec}))"
    )
    ours = {name: where for name, where in _alone(code).items() if str(ROOT) in where}
    assert not ours


def test_the_golden_model_loads_the_contract_and_nothing_of_the_hardware():
    code = "import json, sys, makalu.sim.golden; print(json.dumps(sorted(sys.modules)))"
    loaded = set(_alone(code))
    ours = {name for name in loaded if name.split(".")[0] == "makalu"}
    assert "makalu.rtl.arch.isa" in ours
    assert {n for n in ours if not n.startswith("makalu.rtl.arch.")} <= {
        "makalu", "makalu.rtl", "makalu.rtl.arch", "makalu.sim", "makalu.sim.golden",
        "makalu.sim.elementwise", "makalu.sim.activation", "makalu.sim.arithmetic",
    }  # fmt: skip
    # Of Amaranth's own, what layouts are made of; no simulator, memory, FIFO or back end.
    amaranth = {name for name in loaded if name.startswith("amaranth.")}
    library = {name for name in amaranth if name.startswith("amaranth.lib.")}
    assert library <= {f"amaranth.lib.{name}" for name in ("data", "enum", "meta", "wiring")}
    assert not amaranth & {"amaranth.sim", "amaranth.back", "amaranth.vendor"}
