"""Products that need several programs: the bits of one, in any HBM, with an account of all."""

import itertools

import makalu
import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.host import slabs
from makalu.host.device import Device
from makalu.host.errors import DeviceFaulted, HbmOutOfMemory
from makalu.host.slabs import PROGRAM_WORDS, Product, Slabs, plan
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, TRN, HbmConfig

MIB = 1 << 20


def operands(rng, m, k, n, fmt=formats.BF16):
    return tuple(fmt.encode(rng.standard_normal(shape)) for shape in ((m, k), (k, n)))


@pytest.fixture
def plans(monkeypatch):
    """The slabs that products were cut into."""
    made = []

    def noted(*args):
        made.append(plan(*args))
        return made[-1]

    monkeypatch.setattr("makalu.host.device.plan", noted)
    return made


# Results ------------------------------------------------------------------------------------------

TIGHT = {
    "rows": ((64, 8, 16), formats.BF16, 8192, {"down"}),
    "rows, ragged": ((61, 9, 13), formats.FP16, 8192, {"down"}),
    "columns": ((4, 8, 200), formats.BF16, 8192, {"across"}),
    "columns, ragged": ((3, 7, 203), formats.FP8_E5M2, 8192, {"across"}),
    "both": ((33, 20, 50), formats.BF16, 16384, {"down", "across"}),
    "binary32": ((21, 18, 37), formats.FP32, 32768, set()),
    "less than a tile": ((8, 500, 8), formats.BF16, 49152, {"down", "across"}),
}


@pytest.mark.parametrize("case", TIGHT, ids=lambda case: case.replace(" ", "_"))
def test_a_product_that_hbm_does_not_hold_has_the_bits_of_one_that_it_does(rng, plans, case):
    shape, fmt, hbm, cut = TIGHT[case]
    a, b = operands(rng, *shape, fmt)
    expected = matmul_reference(a, b, TINY.rows)
    with makalu.open(TINY, "golden", hbm=hbm) as dev:
        for _ in range(2):
            assert dev.matmul(a, b).tobytes() == expected.tobytes()
            assert dev.last_run.runs == plans[-1].runs > 1
            assert all(getattr(plans[-1], direction) > 1 for direction in cut)
    with makalu.open(TINY, "golden", hbm=MIB) as dev:
        assert dev.matmul(a, b).tobytes() == expected.tobytes()
        assert dev.last_run.runs == 1


@pytest.mark.parametrize("words", [1, 60, 150])
@pytest.mark.parametrize("fmt", [formats.BF16, formats.FP32], ids=lambda fmt: fmt.name)
def test_programs_are_bounded_and_change_no_bit(rng, plans, monkeypatch, words, fmt):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", words)
    a, b = operands(rng, 21, 9, 50, fmt)
    with makalu.open(TINY, "golden") as dev:
        c = dev.matmul(a, b, out_dtype="bf16")
        assert c.tobytes() == matmul_reference(a, b, TINY.rows, out_dtype="bf16").tobytes()
        # K, of which three tiles are made, may ask for more.
        most = max(1.3 * words, 150)
        assert all(p.program.image_bytes <= 128 * most for p in dev._matmuls.values())
    assert dev.last_run.runs == plans[-1].runs > 1


@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 20, 6), (3, 6, 30)), ((20, 6), (2, 6, 30)), ((4, 20, 6), (6, 30)), ((60,), (60, 40)),
     ((2, 40, 60), (60,))],
)  # fmt: skip
def test_batches_and_vectors_are_cut_too(rng, monkeypatch, left, right):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 50)
    a, b = (rng.integers(-9, 9, shape).astype(np.float16) for shape in (left, right))
    with makalu.open(TINY, "golden") as dev:
        c = dev.matmul(a, b)
        np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32))
        assert dev.last_run.runs > len(a.reshape(-1, *a.shape[-2:]))
        assert dev.last_run.macs == c.size * a.shape[-1]


def test_mixed_operands_and_views_are_cut_as_well(rng, monkeypatch):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 100)
    a = formats.FP8_E4M3.encode(rng.standard_normal((12, 40)))[::-1].T
    b = formats.FP8_E5M2.encode(rng.standard_normal((40, 12))).T
    with makalu.open(TINY, "golden") as dev:
        c = dev.matmul(a, b)
        assert dev.last_run.runs > 1
    assert c.tobytes() == matmul_reference(a, b, TINY.rows).tobytes()


def test_a_large_product_in_the_amaranth_simulator_has_the_same_bits(rng):
    a, b = operands(rng, 6, 4, 20)
    with makalu.open(TINY, "pysim", hbm=HbmConfig(size_bytes=4096, latency_cycles=10)) as dev:
        c = dev.matmul(a, b)
        report = dev.last_run
    assert report.runs > 1
    assert report.cycles == report.counters["core_cycles"] > 0
    assert c.tobytes() == matmul_reference(a, b, TINY.rows).tobytes()


# Memory -------------------------------------------------------------------------------------------


def test_everything_in_hbm_but_slabs_stays_as_it_is(rng):
    """With a tensor in the middle, so that free memory is in pieces."""
    a, b = operands(rng, 40, 12, 40)
    with makalu.open(TINY, "golden", hbm=32768) as dev:
        low, middle, high = (dev.allocate(5000, "uint8") for _ in range(3))
        low.free()
        high.free()
        middle.write(rng.integers(0, 256, 5000).astype(np.uint8))
        kept, free = middle.read(), dev.free_bytes
        for _ in range(2):
            assert dev.matmul(a, b).tobytes() == matmul_reference(a, b, TINY.rows).tobytes()
        assert dev.last_run.runs > 1
        np.testing.assert_array_equal(middle.read(), kept)
        for program in dev._movable():
            program._lift()
        assert dev.free_bytes == free


def test_operands_are_written_once_where_one_of_them_fits(rng, plans, monkeypatch):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 40)
    a, b = operands(rng, 24, 8, 64)
    with makalu.open(TINY, "golden") as dev:
        dev.matmul(a, b)
        written, write = [], dev._runner.hbm_write

        def noted(address, data):
            written.append(len(data))
            write(address, data)

        monkeypatch.setattr(dev._runner, "hbm_write", noted)
        dev.matmul(a, b)
    assert plans[-1].down > 1
    assert plans[-1].across > 1
    images = sum(size for size in written if size > 1024)
    assert sum(written) - images == a.nbytes + b.nbytes


def test_equal_slabs_share_a_program_and_programs_are_kept(rng, plans, monkeypatch):
    made, compile_ = [], Device._compile

    def counted(self, *args):
        made.append(args[:2])
        return compile_(self, *args)

    monkeypatch.setattr(Device, "_compile", counted)
    a, b = operands(rng, 33, 20, 50)
    with makalu.open(TINY, "golden", hbm=16384) as dev:
        dev.matmul(a, b)
        ran = {((m, 20), (20, n)) for m, n in plans[-1].shapes}
        assert len(ran) <= 4 < plans[-1].runs
        assert set(made) >= ran
        tried = len(made)
        assert tried <= len(ran) + 3  # and some that turned out too large
        dev.matmul(b.T[:33], a.T[:, :21])  # takes their places in HBM
        made.clear()
        dev.matmul(a, b)
        assert made == []
        assert dev.last_run.compile_s == 0


@pytest.mark.parametrize("hbm", [4096, 1 << 16])
def test_a_product_whose_k_is_too_large_says_what_would_have_to_fit(hbm):
    k = 1 << 16
    a, b = np.ones((2, k), np.float32), np.ones((k, 3), np.float32)
    with makalu.open(TINY, "golden", hbm=hbm) as dev:
        tensor = dev.from_numpy(np.ones(7, np.float32))
        with pytest.raises(HbmOutOfMemory) as caught:
            dev.matmul(a, b)
        error, text = caught.value, str(caught.value)
        assert error.needed > 2 * 4 * k
        assert error.free == hbm - 256
        for part in ("2 x 65536 x 3, float32", "one row of a (262,144 bytes)", "K is never cut",
                     "larger hbm=", "dtype="):  # fmt: skip
            assert part in text
        np.testing.assert_array_equal(tensor.read(), np.ones(7))
        np.testing.assert_array_equal(dev.matmul(a[:, :4], b[:4]), np.full((2, 3), 4))


def test_what_would_have_to_fit_is_known_to_the_byte(rng):
    """Where the program alone turns out to be too large, once it is compiled."""
    a, b = operands(rng, 7, 500, 5)
    with makalu.open(TINY, "golden", hbm=36864) as dev, pytest.raises(HbmOutOfMemory) as caught:
        dev.matmul(a, b)
    assert caught.value.needed > caught.value.free == 36864
    hbm = -(-caught.value.needed // 4096) * 4096
    with makalu.open(TINY, "golden", hbm=hbm) as dev:
        assert dev.matmul(a, b).tobytes() == matmul_reference(a, b, TINY.rows).tobytes()


# The account --------------------------------------------------------------------------------------


def test_the_report_sums_all_runs(any_dev, rng, monkeypatch):
    a, b = operands(rng, 70, 20, 400)
    any_dev.matmul(a, b)
    whole = any_dev.last_run
    assert whole.runs == 1
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 30)
    seen = []
    any_dev.on_run = lambda name, report: seen.append(report)
    any_dev.matmul(a, b, check=True)
    report = any_dev.last_run
    assert report.runs == len(seen) > 4
    assert report.macs == whole.macs == 70 * 20 * 400
    assert report.instructions == sum(r.instructions for r in seen)
    assert report.counters["pe_passes"] == sum(r.counters["pe_passes"] for r in seen)
    assert report.passes == whole.passes
    assert report.hbm_bytes_written == whole.hbm_bytes_written
    assert report.max_abs_error < 1e-4
    assert report.compile_s > 0
    if whole.cycles is not None:
        assert report.cycles == sum(r.cycles for r in seen)
        assert report.pe_utilization == report.passes / (report.cycles * 256)


def test_progress_goes_from_the_first_run_to_the_last(any_dev, rng, monkeypatch):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 30)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 40, 20), (2, 20, 512)))
    seen = []
    any_dev.progress = lambda *args: seen.append(args)
    any_dev.matmul(a, b)
    issued, total, cycles = seen[-1]
    assert any_dev.last_run.runs > 4
    assert issued == total == any_dev.last_run.instructions
    assert cycles == any_dev.last_run.cycles
    assert all(x[0] <= y[0] for x, y in itertools.pairwise(seen))
    assert all(x[0] <= x[1] for x in seen)
    assert len({x[0] for x in seen}) >= any_dev.last_run.runs
    assert max(abs(x[1] - total) for x in seen) < total / 10


def test_ctrl_c_in_the_middle_leaves_a_device_that_a_reset_revives(rng, monkeypatch):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 60)
    a, b = operands(rng, 24, 8, 64)
    expected = matmul_reference(a, b, TINY.rows).tobytes()
    with makalu.open(TINY, "golden") as dev:
        x = dev.from_numpy(np.arange(5, dtype=np.float32))
        assert dev.matmul(a, b).tobytes() == expected
        free, run, runs = dev.free_bytes, dev._runner.run, []

        def interrupted(queues, progress=None):
            runs.append(queues)
            if len(runs) == 3:
                raise KeyboardInterrupt
            return run(queues, progress)

        with monkeypatch.context() as patch:
            patch.setattr(dev._runner, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                dev.matmul(a, b)
        assert dev.free_bytes == free
        with pytest.raises(DeviceFaulted, match="KeyboardInterrupt"):
            dev.matmul(a, b)
        dev.reset()
        assert dev.matmul(a, b).tobytes() == expected
        np.testing.assert_array_equal(x.read(), np.arange(5))


def test_ctrl_c_between_two_runs_needs_no_reset(rng, monkeypatch):
    monkeypatch.setattr(slabs, "PROGRAM_WORDS", 60)
    a, b = operands(rng, 24, 8, 64)

    def interrupted(address, size):
        raise KeyboardInterrupt

    with makalu.open(TINY, "golden") as dev:
        dev.matmul(a, b)
        free = dev.free_bytes
        with monkeypatch.context() as patch:
            patch.setattr(dev._runner, "hbm_read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                dev.matmul(a, b)
        assert dev.free_bytes == free
        assert dev.matmul(a, b).tobytes() == matmul_reference(a, b, TINY.rows).tobytes()


# The plan -----------------------------------------------------------------------------------------


def product_of(config, m, k, n, fmt=formats.BF16):
    return Product(
        m, k, n, fmt.bytes, fmt.bytes, 4, passes=4 if fmt is formats.FP32 else 1, config=config
    )


def planned(product, hbm):
    """The plan in an HBM without anything else, with programs a little larger than expected."""
    return plan(
        product,
        lambda sizes: sum(-(-size // 256) * 256 for size in sizes) <= hbm,
        lambda slabs: int(1.1 * max(product.image_bytes(m, n) for m, n in slabs.shapes)),
    )


@pytest.mark.parametrize("fmt", [formats.BF16, formats.FP32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("edge", [1, 16, 256, 512])
def test_what_fits_one_program_is_one_program(edge, fmt):
    """The published cycles are those of whole products."""
    product = product_of(SMALL, edge, edge, edge, fmt)
    assert planned(product, 64 * MIB) == Slabs(product, edge, edge, "a")


@pytest.mark.parametrize(
    ("config", "mkn", "fmt", "hbm"),
    [
        (TINY, (1, 1, 1), formats.BF16, 4096),
        (TINY, (96, 96, 96), formats.FP32, MIB),
        (SMALL, (2048, 2048, 2048), formats.FP32, 64 * MIB),
        (SMALL, (2048, 2048, 2048), formats.BF16, 64 * MIB),
        (SMALL, (10_000, 4000, 10_000), formats.FP32, 64 * MIB),
        (SMALL, (1_000_000, 16, 16), formats.BF16, 64 * MIB),
        (SMALL, (16, 16, 1_000_000), formats.BF16, 64 * MIB),
        (SMALL, (17, 300_000, 129), formats.BF16, 64 * MIB),
        (TRN, (20_000, 8192, 30_001), formats.BF16, 256 * MIB),
    ],
    ids=str,
)  # fmt: skip
def test_slabs_cover_the_product_and_fit(config, mkn, fmt, hbm):
    m, k, n = mkn
    product = product_of(config, m, k, n, fmt)
    found = planned(product, hbm)
    image = max(product.image_bytes(*shape) for shape in found.shapes)
    assert sum(found.buffers) + image <= hbm
    tile = found.rows <= config.rows and found.cols <= config.psum_bank_words
    assert tile or product.words(found.rows, found.cols) <= PROGRAM_WORDS
    order = found.order()
    assert sorted(order) == list(itertools.product(range(found.down), range(found.across)))
    rows = [found.part(i, 0)[0] for i in range(found.down)]
    cols = [found.part(0, j)[1] for j in range(found.across)]
    for parts, total in ((rows, m), (cols, n)):
        assert parts[0].start == 0
        assert parts[-1].stop == total
        assert all(x.stop == y.start for x, y in itertools.pairwise(parts))
    sizes = {
        (x.stop - x.start, y.stop - y.start)
        for x, y in itertools.product((rows[0], rows[-1]), (cols[0], cols[-1]))
    }
    assert sizes == set(found.shapes)


def test_an_operand_is_kept_if_it_fits_and_the_other_streams_past_it(rng):
    def writes(found):
        """Slabs of A and B that are written, in bytes."""
        there, written = {}, [0, 0]
        for i, j in found.order():
            for which, index in enumerate((i, j)):
                slot = index if found.keep == "ab"[which] else 0
                if there.get((which, slot)) != index:
                    there[which, slot] = index
                    written[which] += found.slots[which]
        return written

    product = product_of(SMALL, 4096, 1024, 512)
    for keep in ("a", "b"):
        found = Slabs(product, 512, 128, keep)
        assert writes(found) == [found.slots[0] * found.down, found.slots[1] * found.across]
    found = Slabs(product, 512, 128)
    assert writes(found) == [found.slots[0] * found.down, found.slots[1] * 4 * found.down]
    assert Slabs(product_of(SMALL, 512, 1024, 4096), 128, 512).order()[1] == (1, 0)


def test_a_better_choice_is_not_passed_over_for_a_program_that_is_large():
    """How large a program is shows once it is compiled; slabs that then do not fit are dropped."""
    product, tried = product_of(TINY, 64, 64, 64), []

    def image_bytes(found):
        tried.append((found.rows, found.cols))
        return 3 * product.image_bytes(found.rows, found.cols)

    def room(sizes):
        return sum(sizes) <= 60_000

    found = plan(product, room, image_bytes)
    assert found is not None
    assert room([*found.buffers, image_bytes(found)])
    assert 1 < len(tried) <= 5
    assert plan(product, lambda sizes: sum(sizes) <= 1000, image_bytes) is None
