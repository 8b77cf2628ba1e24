"""Runs shipped tests on hardware with one line changed; ``test_faults.py`` says which, and why.

This file is a program as well: it imports the tests once, then forks for every fault, so that
nothing which a fault leaves behind reaches the next one.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``where``; ``judge`` must notice.

    Attributes
    ----------
    where : :class:`str`
        Module below ``makalu.rtl``, colon, function or method.
    name : :class:`str`
        What the hardware then does.
    old, new : :class:`str`
        ``old`` is in the source of ``where`` exactly once.
    judge : :class:`str`
        The test, or file of tests, that must fail: as pytest names it, below ``tests/rtl``.
    """

    where: str
    name: str
    old: str
    new: str
    judge: str

    @property
    def module(self):
        """The module of ``where``."""
        return self.where.partition(":")[0]

    def plant(self):
        """Give the function the code that it would have if its file said ``new``."""
        function, code = self.planted()
        function.__code__ = code

    def planted(self):
        """The function, and the code that it would have."""
        owner = importlib.import_module(f"makalu.rtl.{self.module}")
        for part in self.where.partition(":")[2].split("."):
            owner = inspect.getattr_static(owner, part)
        function = owner.fget if isinstance(owner, property) else owner
        file = Path(inspect.getsourcefile(function))
        lines = file.read_text().splitlines(keepends=True)
        first = function.__code__.co_firstlineno - 1
        body = inspect.getsource(function)
        last = first + body.count("\n")
        assert "".join(lines[first:last]) == body
        assert body.count(self.old) == 1, f"{self.old!r} is {body.count(self.old)} times there"
        text = "".join([*lines[:first], body.replace(self.old, self.new), *lines[last:]])
        codes = [compile(text, str(file), "exec", dont_inherit=True)]
        for code in codes:
            if code.co_qualname == function.__code__.co_qualname:
                return function, code
            codes += [part for part in code.co_consts if inspect.iscode(part)]
        raise LookupError(self.where)


@dataclass
class Verdict:
    """What became of the tests.

    Attributes
    ----------
    ran : :class:`list`
        Names of the tests that ran, up to the first that failed.
    failed : :class:`dict`
        Name of the exception of each that failed.
    log : :class:`str`
        The end of what pytest printed.
    seconds : :class:`float`
        Of processor time.
    """

    ran: list = field(default_factory=list)
    failed: dict = field(default_factory=dict)
    log: str = ""
    seconds: float = 0.0


class Jury:
    """The program, from outside."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self):
        """End the program."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def verdict(self, *judges, fault=None):
        """Run tests, or files of tests, on the hardware with ``fault``."""
        request = {"judges": judges, "fault": fault and asdict(fault)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Verdict(**json.loads(self.process.stdout.readline()))


# The program --------------------------------------------------------------------------------------

_PYTEST = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]


class _Outcomes:
    """A pytest plugin that keeps what became of the tests."""

    def __init__(self):
        self.verdict = Verdict()

    def pytest_runtest_makereport(self, item, call):
        if call.when == "call":
            self.verdict.ran.append(item.nodeid)
        if call.excinfo is not None:
            self.verdict.failed[item.nodeid] = call.excinfo.typename


def _deliberate(request):
    """In a process of its own: plant, run, tell."""
    import pytest

    outcomes = _Outcomes()
    try:
        if request["fault"]:
            Fault(**request["fault"]).plant()
        tests = [f"tests/rtl/{test}" for test in request["judges"]]
        pytest.main([*_PYTEST, "-x", "--timeout", "120", *tests], plugins=[outcomes])
    except BaseException:
        # After a failure pytest itself may stumble over components that are left unused.
        if not outcomes.verdict.failed:
            outcomes.verdict.failed["jury"] = traceback.format_exc()
    return outcomes.verdict


def _fork(request):
    """The verdict on a request, from a fork of this process."""
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as result:
        child = os.fork()
        if not child:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            result.write(json.dumps(asdict(_deliberate(request))))
            result.flush()
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
        log.seek(0)
        result.seek(0)
        verdict = Verdict(failed={"process": f"ended with status {status}"})
        if status == 0:
            verdict = Verdict(**json.loads(result.read()))
        verdict.log = log.read()[-4000:]
        verdict.seconds = usage.ru_utime + usage.ru_stime
        return verdict


def main():
    import pytest

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    imported = set()
    for line in sys.stdin:
        request = json.loads(line)
        files = {f"tests/rtl/{test.partition('::')[0]}" for test in request["judges"]} - imported
        if files:
            imported |= files
            pytest.main([*_PYTEST, "--collect-only", *sorted(files)])
        answers.write(json.dumps(asdict(_fork(request))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
