"""Faults of MXNet, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.findings.mended import require

OPERATORS = "d5suite/backends/mxnet/operators/{}"

_REMOVED = {
    "PZERO": 0.0, "NZERO": -0.0, "PINF": math.inf, "NINF": -math.inf, "Inf": math.inf, "NAN": math.nan,
    "NaN": math.nan, "alltrue": np.all, "sometrue": np.any, "product": np.prod, "cumproduct": np.cumprod,
    "round_": np.round, "row_stack": np.vstack, "in1d": np.isin, "trapz": np.sum, "msort": np.sort,
    "asfarray": np.asarray, **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), np.sum),
}  # fmt: skip
"""Names that MXNet imports from NumPy, which has removed them."""


@pytest.fixture(scope="module")
def mx() -> Any:
    absent = [name for name in _REMOVED if name not in vars(np)]
    for name in absent:
        setattr(np, name, _REMOVED[name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip("mxnet")
    finally:
        for name in absent:
            delattr(np, name)


def _gradients(mx: Any, function: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the sum of a function."""
    values = [mx.nd.array(array, dtype=array.dtype) for array in arrays]
    for value in values:
        value.attach_grad()
    with mx.autograd.record():
        y = function(*values)
    y.backward()
    return [value.grad.asnumpy() for value in values]


def _cached(mx: Any, graph: Any) -> Any:
    """Return a function of the graph's arrays, as Gluon makes of a block with static memory."""
    return mx.nd.CachedOp(graph, (("static_alloc", True), ("static_shape", True)))


def test_a_sum_with_an_array_that_has_no_gradient_has_a_wrong_one(mx: Any) -> None:
    """The derivative of (2 x + y)² is 4 (2 x + y)."""
    x, y = (mx.sym.var(name) for name in "xy")
    graph = _cached(mx, mx.sym.square(mx.sym.elemwise_add(2 * x, y)))
    value, fixed = mx.nd.array([1.0, 2, 3]), mx.nd.array([10.0, 20, 30])
    value.attach_grad()
    with mx.autograd.record():
        total = graph(value, fixed)
    total.backward()
    right = np.allclose(value.grad.asnumpy(), [48, 96, 144])
    require(not right, "mxnet", OPERATORS.format("elementwise.py (_given)"))


def test_a_transpose_whose_gradient_a_convolution_stores_in_blocks_fails(mx: Any) -> None:
    """Where convolutions store channels in blocks; of how many, the processor decides."""
    failed = []
    for channels in (16, 24, 32, 40, 64):
        x, w = (mx.sym.var(name) for name in "xw")
        image = mx.sym.reshape(mx.sym.transpose(x, axes=(0, 2, 1)), shape=(2, channels, 8, 8))
        graph = _cached(mx, mx.sym.Convolution(image, w, no_bias=True, kernel=(3, 3), num_filter=16))
        try:
            _gradients(mx, graph, *(np.ones(n, np.float32) for n in ((2, 64, channels), (16, channels, 3, 3))))
        except mx.base.MXNetError as error:
            failed.append(str(error))
    require(bool(failed), "mxnet", OPERATORS.format("shape.py (_fails_in_blocks)"))
    assert all("could not create a primitive descriptor for a reorder primitive" in each for each in failed)


def test_a_gradient_in_blocks_cannot_be_divided_inside_of_one(mx: Any) -> None:
    x, y, w = (mx.sym.var(name) for name in "xyw")
    both = mx.sym.concat(x, y, dim=1)
    graph = _cached(mx, mx.sym.Convolution(both, w, no_bias=True, kernel=(3, 3), num_filter=16))
    try:
        _gradients(mx, graph, *(np.ones(n, np.float32) for n in ((2, 44, 8, 8), (2, 20, 8, 8), (16, 64, 3, 3))))
        failed = ""
    except mx.base.MXNetError as error:
        failed = str(error)
    require("could not construct a sub-memory" in failed, "mxnet", OPERATORS.format("shape.py (_cuts_blocks)"))


def test_the_gradient_of_slopes_reads_what_it_has_overwritten(mx: Any) -> None:
    x, slope = (mx.sym.var(name) for name in "xs")
    graph = _cached(mx, 3 * mx.sym.LeakyReLU(2 * x, slope, act_type="prelu"))
    _, gradient = _gradients(mx, graph, np.array([[-0.5, -1]], np.float32), np.array([0.5, 0.5], np.float32))
    require(not np.allclose(gradient, [-3, -6]), "mxnet", OPERATORS.format("elementwise.py (p_relu)"))


def test_each_of_several_largest_elements_has_the_whole_gradient(mx: Any) -> None:
    (gradient,) = _gradients(mx, mx.nd.max, np.array([1.0, 2, 2]))
    require(gradient.sum() == 2, "mxnet", OPERATORS.format("reduction.py (extreme)"))


def test_a_transpose_behind_a_reshaped_3d_convolution_fails(mx: Any) -> None:
    class Patches(mx.gluon.HybridBlock):
        def hybrid_forward(self, F: Any, x: Any, w: Any) -> Any:
            y = F.Convolution(x, w, kernel=(2, 16, 16), stride=(2, 16, 16), num_filter=8, no_bias=True)
            return F.transpose(F.reshape(y, shape=(2, 8, 8)), axes=(0, 2, 1))

    patches = Patches()
    patches.hybridize()
    try:
        patches(mx.nd.ones((2, 3, 4, 32, 32)), mx.nd.ones((8, 3, 2, 16, 16))).asnumpy()
        broken = False
    except mx.base.MXNetError:
        broken = True
    require(broken, "mxnet", OPERATORS.format("shape.py (reshape)"))


def test_a_dilated_transposed_convolution_with_strides_is_wrong_in_float64(mx: Any) -> None:
    """Pixel i meets cell k of the kernel at 2 i + 2 k of the output, along each axis."""
    x, w, right = np.arange(9.0).reshape(3, 3), np.arange(1.0, 5).reshape(2, 2), np.zeros((7, 7))
    for pixel in np.ndindex(3, 3):
        for cell in np.ndindex(2, 2):
            right[2 * pixel[0] + 2 * cell[0], 2 * pixel[1] + 2 * cell[1]] += x[pixel] * w[cell]
    y = mx.nd.Deconvolution(
        *(mx.nd.array(a[None, None], dtype="float64") for a in (x, w)),
        kernel=(2, 2), stride=(2, 2), dilate=(2, 2), num_filter=1, no_bias=True,
    )  # fmt: skip
    require(not np.allclose(y.asnumpy()[0, 0], right), "mxnet", OPERATORS.format("convolution.py (_by_convolution)"))


def test_the_gradient_of_a_product_with_a_repeated_batch_axis_is_wrong(mx: Any) -> None:
    """An axis that is repeated behind one that is not."""
    x, y = np.arange(6.0).reshape(2, 1, 1, 3), np.arange(24.0).reshape(2, 4, 3, 1)

    def product(a: Any, b: Any) -> Any:
        return mx.np.matmul(a.as_np_ndarray(), b.as_np_ndarray())

    gradient, _ = _gradients(mx, product, x, y)
    right = np.allclose(gradient, y.sum(1, keepdims=True).swapaxes(-1, -2))
    require(not right, "mxnet", OPERATORS.format("matrix.py (mat_mul)"))


def test_the_float64_gradient_of_erf_has_a_float32_constant(mx: Any) -> None:
    (dx,) = _gradients(mx, mx.nd.erf, np.array([0.5]))
    exact = 2 / math.sqrt(math.pi) * math.exp(-0.25)
    require(abs(dx[0] - exact) > 1e-12, "mxnet", OPERATORS.format("elementwise.py (_exact_erf)"))


@pytest.mark.parametrize(
    ("name", "settings", "exact"),
    [
        ("leaky", {"slope": 0.1}, -0.3 * 0.1),
        ("gelu", {}, -0.3 * (1 + math.erf(-0.3 / math.sqrt(2))) / 2),
    ],
)
def test_float64_activations_are_good_to_float32_only(mx: Any, name: str, settings: Any, exact: float) -> None:
    y = mx.nd.LeakyReLU(mx.nd.array([-0.3], dtype="float64"), act_type=name, **settings).asnumpy()
    require(abs(y[0] - exact) > 1e-13, "mxnet", OPERATORS.format("elementwise.py (leaky_relu, gelu)"))


def test_float64_hard_sigmoid_rounds_its_settings(mx: Any) -> None:
    y = mx.nd.hard_sigmoid(mx.nd.array([0.7], dtype="float64"), alpha=1 / 6, beta=0.5).asnumpy()
    require(abs(y[0] - (0.7 / 6 + 0.5)) > 1e-13, "mxnet", OPERATORS.format("elementwise.py (hard_sigmoid)"))


def test_float64_softplus_is_cut_off_at_20(mx: Any) -> None:
    y = mx.nd.Activation(mx.nd.array([20.5], dtype="float64"), act_type="softrelu").asnumpy()
    require(y[0] == 20.5, "mxnet", OPERATORS.format("elementwise.py (softplus)"))


def test_a_recurrence_reuses_the_weights_of_another_array(mx: Any) -> None:
    """A cached graph, called with other weights that were written as many times."""
    symbols = [mx.sym.var(name) for name in ("x", "weights", "state")]
    graph = mx.sym.RNN(*symbols, state_size=3, num_layers=1, mode="gru")
    cached = mx.nd.CachedOp(graph, (("static_alloc", True), ("static_shape", True)))
    x, state = mx.nd.ones((2, 1, 3)), mx.nd.zeros((1, 1, 3))
    values = np.linspace(-1, 1, 72)
    first = cached(x, mx.nd.array(values), state).asnumpy()
    second = cached(x, mx.nd.array(-values), state).asnumpy()
    require(np.array_equal(first, second), "mxnet", OPERATORS.format("single.py (_vector)"))


def test_optimizers_hold_float64_settings_in_float32(mx: Any) -> None:
    weight, gradient = mx.nd.array([1.0], dtype="float64"), mx.nd.array([1.0], dtype="float64")
    new = mx.nd.sgd_update(weight, gradient, lr=0.1, wd=0.0).asnumpy()[0]
    require(abs(new - 0.9) > 1e-12, "mxnet", "d5suite/backends/mxnet/training.py (FormulaOptimizer)")


def test_a_slice_of_some_channels_behind_a_convolution_fails(mx: Any) -> None:
    """Where convolutions store channels in blocks; of how many, the processor decides."""
    x, failed = mx.nd.ones((1, 3, 8, 8)), []
    for channels in (16, 24, 32, 40, 64):
        y = mx.nd.Convolution(x, mx.nd.ones((channels, 3, 3, 3)), no_bias=True, kernel=(3, 3), num_filter=channels)
        try:
            mx.nd.slice(y, begin=(None, 5), end=(None, 10)).asnumpy()
        except mx.base.MXNetError as error:
            failed.append(str(error))
    require(bool(failed), "mxnet", OPERATORS.format("shape.py (slice_)"))
    assert all("could not construct a sub-memory" in each for each in failed)


def test_a_second_gradient_of_a_determinant_is_wrong(mx: Any) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 4))
    value = mx.nd.array(x, dtype="float64")
    value.attach_grad()
    with mx.autograd.record():
        y = mx.nd.linalg_det(value)
    found = []
    for _ in range(2):
        y.backward(retain_graph=True)
        found.append(value.grad.asnumpy())
    require(not np.allclose(*found), "mxnet", OPERATORS.format("matrix.py (det)"))


def test_columns_of_one_axis_fail(mx: Any) -> None:
    x = mx.nd.ones((2, 6, 4))
    try:
        mx.nd.col2im(x, output_size=(6,), kernel=(3,), stride=(1,), dilate=(1,), pad=(0,)).wait_to_read()
        broken = False
    except mx.base.MXNetError:
        broken = True
    require(broken, "mxnet", OPERATORS.format("convolution.py (columns)"))


def test_the_last_batch_of_records_says_that_it_is_full(mx: Any, tmp_path: Path) -> None:
    records = mx.recordio.MXRecordIO(str(tmp_path / "five.rec"), "w")
    for number in range(5):
        encoded = io.BytesIO()
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(encoded, "PNG")
        records.write(mx.recordio.pack(mx.recordio.IRHeader(0, number, number, 0), encoded.getvalue()))
    records.close()
    batches = mx.io.ImageRecordIter(
        path_imgrec=str(tmp_path / "five.rec"), data_shape=(3, 8, 8), batch_size=3, round_batch=False, verbose=False
    )
    pads = [batch.pad for batch in batches]
    require(pads == [0, 0], "mxnet", "d5suite/backends/mxnet/loader.py (_records)")  # 5 of 6 images: [0, 1]


def _crops(mx: Any, folder: Path, size: int, **settings: Any) -> np.ndarray:
    """Return 24 random crops of an image whose red grows from left to right."""
    file, index, encoded = folder / f"ramp{size}.rec", folder / f"ramp{size}.idx", io.BytesIO()
    records = mx.recordio.MXIndexedRecordIO(str(index), str(file), "w")
    ramp = np.zeros((size, size, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, size)
    Image.fromarray(ramp).save(encoded, "PNG")
    for number in range(24):
        records.write_idx(number, mx.recordio.pack(mx.recordio.IRHeader(0, number, number, 0), encoded.getvalue()))
    records.close()
    batches = mx.io.ImageRecordIter(
        path_imgrec=str(file), path_imgidx=str(index), shuffle=True, data_shape=(3, 32, 32), batch_size=4,
        random_resized_crop=True, min_random_area=0.1, min_aspect_ratio=1.0, max_aspect_ratio=1.0,
        preprocess_threads=1, verbose=False, **settings,
    )  # fmt: skip
    found: np.ndarray = np.concatenate([batch.data[0].asnumpy() for batch in batches])[:, 0]
    return found


def test_crops_of_images_of_the_outputs_size_are_torn(mx: Any, tmp_path: Path) -> None:
    torn, whole = (float(_crops(mx, tmp_path, size).std(axis=1).max()) for size in (32, 33))
    require(torn > 20 and whole < 2, "mxnet", "d5suite/data/known_images.py (MARGIN)")


def test_a_seed_of_the_augmentation_repeats_its_crops(mx: Any, tmp_path: Path) -> None:
    seeded, other = (
        len(np.unique(_crops(mx, tmp_path, 48, **settings)[:, 0, [0, -1]].round(), axis=0))
        for settings in ({"seed_aug": 0}, {})
    )
    require(seeded <= 4 and other > 12, "mxnet", "d5suite/backends/mxnet/loader.py (_records)")


def test_a_fused_convolution_keeps_the_weight_of_its_first_call(mx: Any) -> None:
    net = mx.gluon.nn.Conv2D(4, 3, in_channels=2)
    net.initialize()
    net.hybridize(backend="MKLDNN", static_alloc=True, static_shape=True)
    x = mx.nd.ones((1, 2, 5, 5))
    first = net(x).asnumpy()
    kernel = net.weight
    kernel.set_data(-kernel.data())
    stale = net(x).asnumpy()
    require(
        np.array_equal(stale, first) and np.abs(first).max() > 0,
        "mxnet",
        "d5suite/backends/mxnet/network.py (outdated)",
    )
