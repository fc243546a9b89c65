"""Files of tuned settings: what is written is read; a stranger's sets nothing of its own."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from d5suite.errors import ConfigurationError
from d5suite.tuning import profiles
from d5suite.tuning.profiles import Tuned, kind_of_machine, read_tuned, use_tuned, write_tuned

TORCH = Tuned("small", "training_step", "torch", "0.1", "time", {"mode": "stock", "threads": "1",
              "OMP_WAIT_POLICY": "passive"}, {"versus_default": [0.8, 0.75, 0.85]})  # fmt: skip


def use(path: Path, *, anywhere: bool = False) -> profiles.TunedProfile:
    return use_tuned(path, threads=2, device="cpu", loader_workers=2, anywhere=anywhere)


def test_what_is_written_is_read_and_used(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    write_tuned(path, kind_of_machine("cpu"), [TORCH])
    assert read_tuned(path) == (kind_of_machine("cpu"), [TORCH])
    found = use(path)
    assert found.modes == {("small", "torch"): "stock"}
    assert found.settings == {
        ("small", "torch", "stock"): {
            "threads": 1, "loader_workers": 1, "environment": {"OMP_WAIT_POLICY": "passive"}
        }
    }  # fmt: skip
    assert len(found.remarks) == 1 and "was tuned with version 0.1" in found.remarks[0]


def test_another_kind_of_machine_is_refused_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    write_tuned(path, {**kind_of_machine("cpu"), "cpu": "another one", "cpus": 999}, [TORCH])
    with pytest.raises(ConfigurationError, match=r"another kind of machine \(cpu: 'another one'.*cpus: 999"):
        use(path)
    found = use(path, anywhere=True)
    assert found.settings and "of another kind of machine" in found.remarks[0]


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"LD_PRELOAD": "/tmp/mine.so"}, "there is no knob 'LD_PRELOAD'"),  # noqa: S108
        ({"PATH": "/tmp"}, "there is no knob 'PATH'"),  # noqa: S108
        ({"OMP_WAIT_POLICY": "never"}, "OMP_WAIT_POLICY has no value 'never'"),
        ({"mode": "warp"}, "mode has no value 'warp'"),
        ({"threads": "0"}, "threads has no value '0'"),
        ({"threads": "1e9"}, "threads has no value '1e9'"),
        ({"precision": "fp8"}, "has no precision 'fp8'"),
    ],
)
def test_a_file_sets_only_what_is_declared(knobs: dict[str, str], what: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    write_tuned(path, kind_of_machine("cpu"), [Tuned("small", "inference", "torch", "", "time", knobs)])
    with pytest.raises(ConfigurationError, match=what):
        use(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("schema = 1", "not a file of tuned settings"),
        ("{", "not valid TOML"),
        ('schema = "d5suite-tuned-1"\ntuned = 3\n[machine]', "not a file of tuned settings"),
        ('schema = "d5suite-tuned-1"\n[machine]\n[[tuned]]\ncase = 1', "'case' is missing or of another type"),
    ],
)
def test_a_damaged_file_has_one_clear_error(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=what):
        read_tuned(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the file"):
        read_tuned(tmp_path / "none.toml")


def test_the_kind_of_machine_has_what_decides() -> None:
    found = kind_of_machine("cpu")
    assert found["architecture"] == platform.machine() and found["cpus"] >= 1 and found["device"] == "cpu"


def test_loaders_are_used_and_ranks_are_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    knobs = {"loader_workers": "1", "D5SUITE_PREFETCH": "4", "scheme": "all_reduce:bucket_bytes=1048576"}
    entry = Tuned("small", "input_pipeline", "torch", "", "time", knobs)
    write_tuned(path, kind_of_machine("cpu"), [entry])
    found = use(path)
    (settings,) = found.settings.values()
    assert settings == {"loader_workers": 1, "environment": {"D5SUITE_PREFETCH": "4"}}
    assert any("give --scheme all_reduce:bucket_bytes=1048576, too" in each for each in found.remarks)
    write_tuned(path, kind_of_machine("cpu"), [Tuned("small", "s", "torch", "", "time", {"scheme": "a b\x1b[0m"})])
    with pytest.raises(ConfigurationError, match="scheme has no value"):
        use(path)
