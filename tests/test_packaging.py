"""Every package is shipped: a forgotten one is missing from the wheel without a warning."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (".py", ".md", ".c", ".h", ".cpp", ".json", ".toml", "")


def test_every_package_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"makalu"}
    for top in ("rtl", "sim", "firmware", "host"):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            if parts[:2] == ("host", "front"):
                parts = parts[2:]
            found.add(".".join(("makalu", *parts)))
    assert found == set(settings["packages"])


def test_every_dependency_has_a_reason_and_a_lower_bound():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    inside = False
    for line in lines:
        if line.startswith(("dependencies = [", "dev = [")):
            inside = True
        elif line.startswith("]"):
            inside = False
        elif inside:
            assert ">=" in line, line
            assert "# " in line, line


def test_python_is_typed():
    for folder in ("host/front", "rtl", "sim", "firmware", "host"):
        assert (ROOT / folder / "py.typed").exists(), folder


def test_nothing_is_said_of_the_machine_it_was_written_on():
    """Paths that exist for one person alone."""
    own = re.compile(r"(?<![\w.])/(?:opt|root|home|work|tmp)/\w")
    files = [ROOT / "README.md", ROOT / "pyproject.toml", *ROOT.glob("*.sh")]
    for folder in (".ci", "rtl", "sim", "firmware", "host", "tests"):
        files += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in TEXT and path.is_file()
        ]
    assert len(files) > 200
    assert not [str(path) for path in files if own.search(path.read_text(encoding="utf-8"))]
