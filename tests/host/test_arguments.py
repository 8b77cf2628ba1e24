"""What is no such thing is refused by name, with what to give instead."""

import re
from dataclasses import replace

import makalu
import makalu.nki as nki
import naive
import numpy as np
import pytest
from makalu.host import devices
from makalu.host.errors import (
    ArgumentError,
    DtypeError,
    MakaluError,
    ShapeError,
    TensorError,
    UsageError,
)
from makalu.rtl.arch.config import SMALL, TINY, HbmConfig

ONES = np.ones((2, 2), np.float32)


def refused(error, match):
    """The error is of this class and names all parts."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, match.split(" ... "))))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (("HUGE",), {}, UsageError, "'HUGE' ... TINY, SMALL, TRN"),
        (("",), {}, UsageError, "'' ... TINY, SMALL, TRN"),
        ((None,), {}, ArgumentError, "config must be a CoreConfig or the name of one, not None"),
        ((["TINY"],), {}, ArgumentError, "not ['TINY']"),
        ((16,), {}, ArgumentError, "not 16"),
        (("TINY", "cuda"), {}, UsageError, "'cuda' ... auto ... native, verilator, pysim, golden"),
        (("TINY", ""), {}, UsageError, "'' ... golden"),
        (("TINY", None), {}, ArgumentError, "backend must be a name, not None"),
        (("TINY", ["golden"]), {}, ArgumentError, "['golden']"),
        (("TINY", np.array(["golden", "pysim"])), {}, ArgumentError, "backend must be a name"),
        (("TINY", "golden"), {"hbm": "1 MiB"}, ArgumentError, "HbmConfig or a number of bytes"),
        (("TINY", "golden"), {"hbm": 1e6}, ArgumentError, "not 1000000.0"),
        (("TINY", "golden"), {"hbm": np.nan}, ArgumentError, "not nan"),
        (("TINY", "golden"), {"hbm": True}, ArgumentError, "not True"),
        (("TINY", "golden"), {"hbm": 0}, UsageError, "hbm=0 ... multiple of 4096"),
        (("TINY", "golden"), {"hbm": -4096}, UsageError, "hbm=-4096 ... multiple of 4096"),
        (("TINY", "golden"), {"hbm": 5000}, UsageError, "hbm=5000 ... multiple of 4096"),
        (("TINY", "golden"), {"hbm": 1 << 50}, UsageError, "up to 2**40"),
        (
            ("TINY", "golden"), {"hbm": HbmConfig(bytes_per_cycle=np.nan)}, UsageError,
            "bytes_per_cycle must be a whole number, not nan",
        ),
        (
            ("TINY", "golden"), {"hbm": HbmConfig(size_bytes=4096.0)}, UsageError,
            "size_bytes must be a whole number, not 4096.0",
        ),
        (("TINY", "golden"), {"progress": 3}, ArgumentError, "progress must be callable or None"),
        (("TINY", "golden"), {"on_build": "yes"}, ArgumentError, "on_build must be callable"),
    ],
)  # fmt: skip
def test_open_says_what_it_takes(arguments, options, error, match):
    with refused(error, match) as caught:
        makalu.open(*arguments, **options)
    assert isinstance(caught.value, MakaluError)
    assert isinstance(caught.value, ValueError if error is UsageError else TypeError)


@pytest.mark.parametrize("value", [np.nan, np.inf, 16.0, None, "16", True])
def test_a_configuration_has_whole_numbers_only(value):
    with pytest.raises(ValueError, match="rows must be an integer, not "):
        replace(SMALL, rows=value)


def test_the_names_of_backends_are_checked_everywhere():
    for use in (devices.missing, devices.choose):
        with pytest.raises(UsageError, match="golden"):
            use("silicon", TINY)
        with pytest.raises(ArgumentError, match="must be a name"):
            use(3, TINY)


@pytest.mark.parametrize(
    ("operand", "error", "match"),
    [
        (None, ArgumentError, "must be an array, or numbers in nested lists, not None"),
        ("a.npy", ArgumentError, "not 'a.npy'"),
        (b"1234", ArgumentError, "not b'1234'"),
        ({"a": 1}, ArgumentError, "not {'a': 1}"),
        ({1, 2}, ArgumentError, "not {1, 2}"),
        (object(), ArgumentError, "must be an array"),
        ((x for x in ()), ArgumentError, "must be an array"),
        (np.float32(3), ShapeError, "is a scalar"),
        (np.array(3.0), ShapeError, "is a scalar"),
        (3, ShapeError, "is a scalar"),
        ([[1, 2], [3]], ShapeError, "is no array"),
        ([["1", "2"], ["3", "4"]], DtypeError, "<U1, which is not a real number format"),
        ([[1, None], [2, 3]], DtypeError, "object, which is not a real number format"),
        ([[1j, 2], [3, 4]], DtypeError, "complex128, which is not a real number format"),
        ([[1, 2], [3, 4]], DtypeError, "is int64 ... dtype= one of fp32"),
        ([[1.0, 2], [3, 4]], DtypeError, "is float64 ... dtype= one of fp32"),
        (ONES > 0, DtypeError, "is bool ... dtype= one of fp32"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_matmul_says_what_an_operand_is(dev, operand, error, match):
    with refused(error, f"a {match}" if match.startswith("must") else f"a ... {match}"):
        dev.matmul(operand, ONES)
    with refused(error, f"b {match}" if match.startswith("must") else f"b ... {match}"):
        dev.matmul(ONES, operand)
    assert dev.last_run is None


@pytest.mark.parametrize("option", ["dtype", "out_dtype"])
@pytest.mark.parametrize("value", ["fp64", "", 7, np.nan, [1], {}, "f8, (", complex, object, "i4x"])
def test_matmul_says_which_formats_there_are(dev, option, value):
    with refused(DtypeError, f"{option}= ... bf16"):
        dev.matmul(ONES, ONES, **{option: value})


def test_lists_of_numbers_are_multiplied_once_a_format_is_named(dev):
    for a in ([[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]], ((1, 2), (3, 4))):
        assert dev.matmul(a, [[1], [1]], dtype="bf16").tolist() == [[3], [7]]
    assert dev.matmul([[True, False]], [[True], [True]], dtype="fp16").tolist() == [[1]]


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (None, "not None"), ("ab", "('a', 'b')"), (-1, "(-1,)"), ((2, -3), "(2, -3)"),
        (2.0, "not 2.0"), ((2.0, 3), "(2.0, 3)"), (np.nan, "not nan"), (True, "(True,)"),
        ((True, 2), "(True, 2)"), (np.array(3), "not array(3)"), ([[2, 3]], "([2, 3],)"),
        (object(), "object"),
    ],
    ids=lambda value: str(value)[:10],
)  # fmt: skip
def test_a_shape_consists_of_whole_numbers(dev, shape, match):
    with refused(ShapeError, match) as caught:
        dev.allocate(shape, "fp32")
    assert "whole number" in str(caught.value)


def test_a_shape_may_be_of_any_kind_of_whole_numbers(dev):
    for shape in ([2, 3], np.array([2, 3]), (np.int64(2), np.uint8(3)), range(2, 4)):
        assert dev.allocate(shape, "fp32").shape == (2, 3)
    assert dev.allocate(np.int32(4), "fp32").shape == (4,)
    assert dev.allocate((), "fp32").shape == ()


@pytest.mark.parametrize(
    "dtype", [None, 7, "fp9", np.nan, [1], bool, complex, object, str, "f8, ("]
)
def test_a_tensor_has_one_of_the_formats(dev, dtype):
    with refused(DtypeError, "dtype= ... bf16"):
        dev.allocate(4, dtype)


@pytest.mark.parametrize(
    ("array", "error", "match"),
    [
        (None, ArgumentError, "array must be an array"), ("abc", ArgumentError, "not 'abc'"),
        ([[1], [2, 3]], ShapeError, "array is no array"), (ONES > 0, DtypeError, "bool"),
        ([1, 2], DtypeError, "int64"), ([1j], DtypeError, "complex"), (["1"], DtypeError, "<U1"),
        (np.array([object()]), DtypeError, "'O'"), (np.zeros(2, "M8[s]"), DtypeError, "M8"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)  # fmt: skip
def test_a_tensor_is_made_of_an_array_of_one_of_the_formats(dev, array, error, match):
    free = dev.free_bytes
    with refused(error, match):
        dev.from_numpy(array)
    tensor = dev.allocate((2, 2), "fp32", name="x")
    with pytest.raises(MakaluError):
        tensor.write(array)
    tensor.free()
    assert dev.free_bytes == free
    with refused(DtypeError, "is a tensor on the device ... .read()"):
        dev.from_numpy(dev.from_numpy(ONES))


@pytest.mark.parametrize("program", [None, 3, naive, ONES, b"MAKALU", nki.jit(lambda x: x)])
def test_what_is_no_program_is_not_loaded(dev, program):
    with refused(ArgumentError, "a Program or the path of a program file is loaded, not"):
        dev.load(program)


def test_only_what_was_loaded_here_is_unloaded(dev):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    for wrong in (None, loaded.program, "copy"):
        with refused(ArgumentError, "what load() returned is unloaded, not"):
            dev.unload(wrong)
    with makalu.open("SMALL", "golden") as other, refused(UsageError, "another device"):
        other.unload(loaded)
    dev.unload(loaded)


@pytest.mark.parametrize("kernel", [None, "kernel.py", np.matmul, lambda x: x, ONES])
def test_what_is_no_kernel_is_not_run(dev, kernel):
    with refused(ArgumentError, "a kernel is run, not ... @nki.jit"):
        dev.run(kernel, ONES)


@pytest.mark.parametrize("given", [3, "x", ONES, [("x", ONES)], {"x"}])
def test_tensors_of_a_program_are_given_by_name(dev, given):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    with refused(ArgumentError, "inputs of copy must be a dictionary of name to tensor"):
        loaded.execute(given)
    with refused(ArgumentError, "outputs of copy must be a dictionary of name to tensor"):
        loaded.execute({"x": np.ones(8, np.float32)}, given)


def test_tensors_of_a_program_are_arrays_or_tensors(dev):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    for wrong, error in ((None, ArgumentError), ("x", ArgumentError), ([[1], [2, 3]], ShapeError),
                         (3.0, ShapeError), ([1] * 8, DtypeError)):  # fmt: skip
        with refused(error, "input x of copy"):
            loaded.execute({"x": wrong})
    with refused(TensorError, "no input 3"):
        loaded.execute({3: ONES, "x": ONES})
