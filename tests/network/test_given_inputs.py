"""What a user gives the inputs of a network, and how batches are filled with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given as tried
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from d5suite.data.random_inputs import RandomInput, rows_of
from d5suite.errors import ConfigurationError, ValidationError
from d5suite.network.given_inputs import LARGEST_SAMPLE, described, parse_inputs, read_sample
from d5suite.network.user_network import UserNetwork, load_user_network
from d5suite.validate.network.inference import check_reading

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TABLE = np.arange(20 * 3, dtype=np.float32).reshape(20, 3) / 7 - 4


def voice(folder: Path) -> Path:
    """Tokens and a signal, whose weights a branch on the sampling rate chooses."""
    node, info = helper.make_node, helper.make_tensor_value_info
    branches = {
        f"{name}_branch": helper.make_graph(
            [node("Mul", ["joined", factor], [f"{name}.y"])], name, [], [info(f"{name}.y", FLOAT, None)]
        )
        for name, factor in (("then", "high"), ("else", "low"))
    }
    nodes = [
        node("Gather", ["table", "ids"], ["words"]),
        node("Where", ["kept", "signal", "zero"], ["heard"]),
        node("Add", ["words", "heard"], ["joined"]),
        node("Equal", ["sr", "rate"], ["is_high"]),
        node("If", ["is_high"], ["y"], **branches),
    ]
    weights = {"table": TABLE, "high": np.full(3, 2, np.float32), "low": np.ones(3, np.float32),
               "rate": np.int64(16000), "zero": np.float32(0)}  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "voice",
        [info("ids", INT64, ["N", 4]), info("signal", FLOAT, ["N", 4, 3]), info("kept", BOOL, ["N", 4, 3]),
         info("sr", INT64, [])],
        [info("y", FLOAT, ["N", 4, 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )  # fmt: skip
    path = folder / "voice.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def _read(folder: Path, **values: Any) -> UserNetwork:
    return load_user_network(voice(folder), shapes={}, batch_size=2, given={"sr": 16000, **values})


def test_values_and_ranges_are_read() -> None:
    texts = ["sr=16000", "x=-0.5", "ids=0..256", "a=b=-1.5..1e3", "mask=true"]
    assert parse_inputs(texts) == {"sr": 16000, "x": -0.5, "ids": (0, 256), "a=b": (-1.5, 1000.0), "mask": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "is not an input with its value") for text in ("sr", "=3", "sr=", "sr=x", "sr=1..", "sr=..2")),
        ("sr=nan", "must be finite"),
        ("sr=0..inf", "must be finite"),
        ("sr=" + "9" * 400 + ".0", "must be finite"),
        ("ids=5..5", "this range is empty"),
        ("ids=6..5", "this range is empty"),
    ],
)
def test_other_texts_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_inputs([text])


def test_an_input_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'sr' is given twice"):
        parse_inputs(["sr=1", "sr=2"])
    with pytest.raises(ConfigurationError, match="'ids' is given twice: by --input and by --inputs"):
        _read(tmp_path).check_inputs({"ids": 3}, {"ids": np.zeros((1, 4), np.int64)})


def test_a_value_of_one_element_decides_branches_and_frees_the_batch(tmp_path: Path) -> None:
    found = _read(tmp_path)
    assert found.fixed == ("sr",) and found.network.inputs == ("ids", "signal", "kept")
    assert found.network.batched and found.network.batch_size is None
    assert "If" not in {node.op_type for node in found.network.nodes}
    assert found.network.parameters and "sr" not in found.network.parameters
    batch = np.zeros(2, [("ids", np.int64, (4,)), ("signal", np.float32, (4, 3)), ("kept", np.bool_, (4, 3))])
    batch["signal"], batch["kept"] = 0.5, True
    assert check_reading(tmp_path / "voice.onnx", found.network, batch, threads=1, given={"sr": 16000}) == ""
    other = load_user_network(tmp_path / "voice.onnx", shapes={}, batch_size=2, given={"sr": 8000})
    with pytest.raises(ValidationError, match="d5suite reads the network wrongly"):
        check_reading(tmp_path / "voice.onnx", other.network, batch, threads=1, given={"sr": 16000})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hz": 3}, "has no input 'hz'\n.*ids, kept, signal, sr"),
        ({"ids": 2.5}, "'ids' is int64: it takes whole numbers"),
        ({"ids": (0, 2**64)}, "'ids' is int64, from -9223372036854775808 to 9223372036854775807"),
        ({"ids": (0, 21)}, "counts the rows of a table, from 0 to 19"),
        ({"ids": 20}, "counts the rows of a table, from 0 to 19"),
        ({"kept": 2}, "'kept' is bool, from 0 to 1"),
        ({"signal": 1e39}, "'signal' is float32, which has no such number"),
        ({"ids": 1, "signal": 0.5, "kept": 1}, "every input has one value"),
    ],
)
def test_values_that_do_not_fit_are_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        _read(tmp_path).check_inputs(values, {})


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((1, 5, 3), np.float32), r"array 'signal': its shape is \(1, 5, 3\); the input's is \(N, 4, 3\)"),
        (np.zeros((0, 4, 3), np.float32), "its shape is"),
        (np.zeros((1, 4, 3), np.complex64), "its type is complex64; the input's is float32"),
        (np.full((1, 4, 3), np.nan, np.float32), "it holds NaN"),
        (np.full((1, 4, 3), 1e300), "it holds numbers that float32 has not"),
    ],
)
def test_samples_that_do_not_fit_are_refused(tmp_path: Path, array: np.ndarray, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        _read(tmp_path).check_inputs({}, {"signal": array})


def test_samples_of_integers_are_checked(tmp_path: Path) -> None:
    found = _read(tmp_path)
    found.check_inputs({}, {"ids": np.full((3, 4), 19, np.int32)})
    for array, said in (
        (np.full((1, 4), 20), "counts the rows of a table"),
        (np.ones((1, 4), np.float32), "its type is float32"),
        (np.ones((1, 4), np.bool_), "its type is bool"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            found.check_inputs({}, {"ids": array})
    signal = np.arange(24, dtype=np.float64).reshape(2, 4, 3)
    with pytest.raises(ConfigurationError, match="different numbers of rows: 1, 2"):
        found.check_inputs({}, {"ids": np.ones((1, 4), np.int64), "signal": signal})
    with pytest.raises(ConfigurationError, match="every array of the sample holds one value"):
        found.check_inputs({"kept": 1}, {"ids": np.ones((2, 4), np.int64), "signal": np.ones((2, 4, 3))})
    found.check_inputs({"kept": 1}, {"ids": np.ones((2, 4), np.int64), "signal": signal})


def test_a_sample_is_read_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    np.savez(path, ids=np.arange(4), x=np.float32(0.5))
    assert {name: each.tolist() for name, each in read_sample(path).items()} == {"ids": [0, 1, 2, 3], "x": 0.5}
    np.savez(path, ids=np.array([_Touches(tmp_path / "executed")], object))
    with pytest.raises(ConfigurationError, match="not a file of arrays"):
        read_sample(path)
    assert not (tmp_path / "executed").exists()
    for content in (b"", b"PK\x03\x04 cut short", b"text"):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="not a file of arrays"):
            read_sample(path)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        read_sample(tmp_path / "pipe.npz")
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_sample(tmp_path / "none.npz")


class _Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_sample_that_unpacks_to_more_than_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LARGEST_SAMPLE == 2**31
    monkeypatch.setattr("d5suite.network.given_inputs.LARGEST_SAMPLE", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 20))
    with pytest.raises(ConfigurationError, match=r"the sample has 8,388,\d+ bytes; at most 1,048,576 are read"):
        read_sample(tmp_path / "bomb.npz")


@tried(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(2, 30))
def test_batches_begin_with_the_sample_and_differ(rows: int, samples: int, number: int, length: int) -> None:
    sample = np.arange(rows * length).reshape(rows, length)
    batch = rows_of(sample, samples, number)
    assert batch.shape == (samples, length)
    assert {tuple(sorted(row)) for row in batch.tolist()} <= {tuple(sorted(row)) for row in sample.tolist()}
    np.testing.assert_array_equal(rows_of(sample, samples, 0)[:rows], sample[:samples])
    assert (batch != rows_of(sample, samples, number + 1)).any()
    if samples <= min(rows, length):
        assert len({tuple(row) for row in batch.tolist()}) == samples


def test_a_range_of_the_user_is_drawn_as_it_is() -> None:
    """Without the 1 at the first place that keeps a token visible."""
    generator, whole = np.random.default_rng(0), np.dtype(np.int64)
    drawn = RandomInput("mask", (50,), whole, (0, 2), given=True).draw(40, generator)
    assert set(drawn[:, 0].tolist()) == {0, 1}
    assert (RandomInput("mask", (50,), whole, (0, 2)).draw(40, generator)[:, 0] == 1).all()
    floats = RandomInput("x", (1000,), np.dtype(np.float32), (-1.5, 2.5), given=True).draw(1, generator)
    assert -1.5 <= floats.min() < -1.4 and 2.4 < floats.max() <= 2.5 and floats.dtype == np.float32


def test_what_is_given_is_described_by_name() -> None:
    told = described({"sr": 16000, "ids": [0, 256]}, {"x": np.zeros(2, np.float32)})
    assert told == {"ids": "0..256", "sr": "16000", "x": told["x"]} and told["x"].startswith("sample ")
    assert told["x"] != described({}, {"x": np.zeros((2, 1), np.float32)})["x"] != described({}, {"x": np.ones(2)})["x"]
