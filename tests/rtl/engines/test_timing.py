"""The closed forms of ``makalu.sim.timing`` on the RTL of the engines, to the cycle."""

import pytest
from makalu.rtl.arch.formats import BF16, FP32
from makalu.rtl.arch.isa import (
    Activation,
    DmaStart,
    EventSemaphore,
    Function,
    LoadStationary,
    MatmulMoving,
    Space,
)
from makalu.sim import timing

from . import test_gpsimd, test_scalar, test_vector
from .vector_bench import CONFIG, Bench, line, update


def measured(bench, instruction):
    """Latency of an instruction that meets an idle engine, and the interval of its copies."""
    program = [instruction.replace(update=update(i)) for i in range(3)]
    bench.execute(program)
    cycles = [cycle for cycle, *_ in bench.updates]
    return cycles[0] - bench.issues[0], cycles[2] - cycles[1]


def check(bench_class, program, rng):
    for instruction in program:
        found = measured(bench_class(CONFIG, rng), instruction)
        want = timing.latency(instruction), timing.interval(instruction, CONFIG)
        assert found == want, str(instruction)


def test_copies_and_fills(rng):
    check(Bench, test_vector.random_program(rng, CONFIG, 25, 40), rng)


def test_arithmetic_reductions_scans_and_predicated_copies(rng):
    """Sources that meet in a bank and scalars that do, too."""
    program = test_vector.random_arithmetic(rng, CONFIG, 60, 30)
    assert len({type(i) for i in program}) == 6
    check(Bench, program, rng)


def test_instructions_on_eight_numbers(rng):
    program = test_vector.random_eights(rng, CONFIG, 30, 40)
    assert len({type(i) for i in program}) == 3
    check(Bench, program, rng)


def test_gpsimd_instructions(rng):
    program = test_gpsimd.random_program(rng, CONFIG, 50, 30)
    assert len({type(i) for i in program}) == 5
    check(test_gpsimd.Bench, program, rng)


@pytest.mark.parametrize("place", Space, ids=lambda s: s.name.lower())
@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 16])
def test_functions(rng, place, own, count):
    bench = test_scalar.Bench.shared()
    size = min(count, 8) if place == Space.PSUM else count
    src = line(FP32, 0, size, space=place)
    instruction = Activation(
        dst=line(BF16, 512, size), src=src, function=int(Function.SQUARE),
        scale=256, scale_pointer=own > 0, bias=272, bias_pointer=own > 1,
    )  # fmt: skip
    seen = bench.run(rng, [instruction.replace(update=update(i)) for i in range(3)])
    updates = test_scalar.cycles(seen, "update")
    issued = test_scalar.cycles(seen, "issued")
    assert updates[0] - issued[0] == timing.latency(instruction)
    assert updates[2] - updates[1] == timing.interval(instruction, CONFIG)


def test_what_has_no_interval_is_refused():
    for instruction in (EventSemaphore(), DmaStart(table=0, engines_used=1)):
        with pytest.raises(TypeError, match="has no interval"):
            timing.interval(instruction, CONFIG)
        with pytest.raises(TypeError, match="has no lanes"):
            timing.latency(instruction)
    load = LoadStationary(src=line(BF16, 0, 4))
    with pytest.raises(TypeError, match="loadstationary on PE"):
        timing.latency(load)


def test_the_array_as_its_sequencer_is_tested():
    """``test_tensor_sequencer.py`` holds the RTL to the same numbers."""
    for n in (1, 4, 6, 7, 128):
        matmul = MatmulMoving(
            dst=line(FP32, 0, n, space=Space.PSUM), src=line(BF16, 0, n), accumulate=0
        )
        assert timing.interval(matmul, CONFIG) == max(n, 6)
    for m, cycles in ((1, 1), (4, 1), (5, 2), (128, 32)):
        assert timing.interval(LoadStationary(src=line(BF16, 0, m)), CONFIG) == cycles


def test_the_page_is_fresh():
    assert timing.PAGE.read_text() == timing.page(), "run python -m makalu.sim.timing"


def test_a_row_that_is_slower_needs_its_reason(monkeypatch):
    what, instruction, _, _ = next(timing._cases(64))
    monkeypatch.setattr(timing, "_cases", lambda n: [(what, instruction, 1, "")])
    with pytest.raises(AssertionError, match="slower is True"):
        timing.page()
