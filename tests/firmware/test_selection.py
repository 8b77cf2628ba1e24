"""Eight greatest, eight looked for, and the greatest of rows: results, and what is refused."""

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels import selection
from makalu.nki import KernelError, TensorSpec

F = np.float32
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def dev():
    with makalu.open("TINY", "golden", hbm=1 << 20) as device:
        yield device


@nki.jit
def eights(x, values, imm=0.0):
    """All three instructions, the values in PSUM."""
    shape = x.shape[0], 8
    tile, sought = nl.load(x), nl.load(values)
    top = nl.ndarray(shape, x.dtype, buffer=nl.sbuf)
    where = nl.ndarray(shape, nl.uint16, buffer=nl.sbuf)
    again = nl.ndarray(shape, nl.uint32, buffer=nl.sbuf)
    left = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.max8(top, tile)
    nisa.nc_find_index8(where, tile, sought)
    nisa.nc_match_replace8(left, tile, sought, imm, dst_idx=again)
    out = []
    for result in (top, where, again, left):
        out.append(nl.ndarray(result.shape, result.dtype, buffer=nl.shared_hbm))
        nl.store(out[-1], result)
    return tuple(out)


@pytest.mark.parametrize("fmt", [F, BF16, np.float16, np.int16])
def test_eight_numbers(dev, rng, fmt):
    """Repeated values, values that are not there; the indices of both ways agree."""
    x = rng.integers(-9, 9, (4, 31)).astype(fmt)
    sought = rng.integers(-12, 9, (4, 8)).astype(fmt)
    top, where, again, left = dev.run(eights, x, sought, imm=99)
    assert (top == np.sort(x.astype(F), axis=1)[:, ::-1][:, :8].astype(fmt)).all()
    want, replaced = np.full((4, 8), -1), x.copy()
    for p in range(4):
        for slot, value in enumerate(sought[p]):
            equal = [i for i in np.flatnonzero(x[p] == value) if i not in want[p]]
            if equal:
                want[p, slot] = equal[0]
                replaced[p, equal[0]] = 99
    assert (want == -1).any()
    assert (want >= 0).any()
    assert (where == want.astype(np.uint16)).all()
    assert (again == want.astype(np.uint32)).all()
    assert (left == replaced).all()


def test_special_numbers_have_their_order(dev):
    x = np.array([[1, -0.0, np.nan, 0.0, np.inf, -np.inf, -np.nan, -1, 0.0]], F)
    bits = x.view(np.uint32)
    order = [2, 4, 0, 3, 8, 1, 7, 5]
    top, where, _, left = dev.run(eights, x, x[:, order], imm=2)
    assert (top.view(np.uint32) == bits[:, order]).all()
    assert (where == order).all()
    assert np.flatnonzero(left[0] != 2).tolist() == [6]


@pytest.mark.parametrize("k", [1, 8, 9, 24, 37])
@pytest.mark.parametrize("fmt", [F, BF16])
def test_topk_is_that_of_numpy(dev, rng, fmt, k):
    """More rows than partitions, equal elements, and all of the columns."""
    x = rng.integers(-9, 9, (6, 37)).astype(fmt)
    values, indices = dev.run(selection.topk, x, k=k)
    want, order = selection.topk_reference(x, k)
    assert (values.astype(np.float64) == want).all()
    assert (indices == order).all()


def test_topk_finds_infinities_and_nan(dev):
    x = np.array([[-np.inf, 3, np.nan, -np.inf, np.inf, 0, 5, -np.inf, 2, 1]], F)
    values, indices = dev.run(selection.topk, x, k=10)
    order = [2, 4, 6, 1, 8, 9, 5, 0, 3, 7]
    assert (indices == order).all()
    assert np.array_equal(values, x[:, order], equal_nan=True)


def test_topk_takes_any_nan_and_few_columns(dev, rng):
    """NaN of either sign, which arithmetic gives, comes first; rows shorter than eight."""
    x = rng.standard_normal((3, 12)).astype(F)
    x[0, 4], x[0, 7], x[1, :] = -np.nan, np.nan, np.copysign(np.nan, np.arange(12) % 2 - 0.5)
    values, indices = dev.run(selection.topk, x, k=12)
    order = np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=1, kind="stable")
    assert (indices == order).all()
    assert np.array_equal(values, np.take_along_axis(x, order, 1), equal_nan=True)
    few = rng.integers(-3, 3, (5, 3)).astype(BF16)
    values, indices = dev.run(selection.topk, few, k=3)
    want, order = selection.topk_reference(few, 3)
    assert (values.astype(np.float64) == want).all()
    assert (indices == order).all()


def test_indices_may_take_the_place_of_the_values(dev, rng):
    @nki.jit
    def kernel(x, values):
        tile, sought = nl.load(x), nl.load(values)
        left = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        where = sought.view(nl.uint32)
        nisa.nc_match_replace8(left, tile, sought, -7.0, dst_idx=where)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        places = nl.ndarray((x.shape[0], 8), nl.uint32, buffer=nl.shared_hbm)
        nl.store(out, left)
        nl.store(places, where)
        return out, places

    x = rng.permuted(np.arange(40, dtype=F).reshape(2, 20), axis=1)
    order = np.stack([rng.permutation(20)[:8] for _ in range(2)])
    left, places = dev.run(kernel, x, np.take_along_axis(x, order, 1))
    want = x.copy()
    np.put_along_axis(want, order, -7, 1)
    assert (left == want).all()
    assert (places == order).all()


@pytest.mark.parametrize("imm", [2, 2.0, np.float32(2), BF16(2), np.int8(2)])
def test_numbers_of_any_kind_replace(dev, imm):
    x = np.arange(9, dtype=F)[None]
    *_, left = dev.run(eights, x, x[:, :8], imm=imm)
    assert left[0].tolist() == [2] * 8 + [8]


def refused(body, *shapes, dtype=F):
    @nki.jit
    def kernel(*tensors):
        out = nl.ndarray(tensors[0].shape, tensors[0].dtype, buffer=nl.shared_hbm)
        tiles = [nl.load(tensor) for tensor in tensors]
        body(*tiles)
        nl.store(out, tiles[0])
        return out

    with pytest.raises(KernelError) as caught:
        kernel.compile(makalu.TINY, *(TensorSpec(shape, dtype) for shape in shapes))
    return str(caught.value)


def test_what_the_instructions_refuse():
    few, eight, many = (4, 7), (4, 8), (4, 20)
    assert "dst" in refused(lambda x, y: nisa.max8(x, y), many, many)
    assert "8 elements per partition" in refused(lambda x, y: nisa.max8(x, y), many, many)
    assert "8 to 16384" in refused(lambda x, y: nisa.max8(x, y), eight, few)
    assert "partitions" in refused(lambda x, y: nisa.max8(x, y), eight, (3, 9))
    message = refused(lambda x, y: nisa.nc_find_index8(x, y, x), eight, many)
    assert "nl.uint16 or nl.uint32" in message
    message = refused(lambda x, y: nisa.nc_match_replace8(y, y, x[:, :7], 0), eight, many)
    assert "vals" in message
    message = refused(lambda x, y, z: nisa.nc_match_replace8(z, y, x, 0), eight, many, (4, 21))
    assert "as many elements" in message
    message = refused(lambda x, y: nisa.nc_match_replace8(y, y, x, x), eight, many)
    assert "imm must be a number, not" in message
    message = refused(
        lambda x, y: nisa.nc_match_replace8(y, y, x, 0, dst_idx=x[:, :7]), eight, many
    )
    assert "nc_match_replace8: dst_idx" in message

    def both_in_psum(x, y):
        a, b = (nl.ndarray(shape, F, buffer=nl.psum) for shape in ((4, 9), (4, 8)))
        for tile in (a, b):
            nisa.nc_matmul(tile, x[:, :4], y[:, : tile.shape[1]])
        where = nl.ndarray((4, 8), nl.uint32, buffer=nl.sbuf)
        nisa.nc_find_index8(where, a, b)

    assert "both in psum" in refused(both_in_psum, eight, many)


@pytest.mark.parametrize("k", [0, 21, 2.5, "a", None])
def test_topk_refuses_what_there_is_not(k):
    with pytest.raises(KernelError, match="must be an integer from 1 to 20"):
        selection.topk.compile(makalu.TINY, TensorSpec((4, 20), F), k=k)


@pytest.mark.parametrize("shape", [(20,), (2, 3, 20)])
def test_topk_wants_rows(shape):
    with pytest.raises(KernelError, match="two axes"):
        selection.topk.compile(makalu.TINY, TensorSpec(shape, F))


def test_options_may_be_numbers_of_numpy(dev, rng):
    x = rng.standard_normal((2, 9)).astype(F)
    for a, b in zip(dev.run(selection.topk, x, k=np.int64(5)), dev.run(selection.topk, x, k=5),
                    strict=True):  # fmt: skip
        assert (a == b).all()
