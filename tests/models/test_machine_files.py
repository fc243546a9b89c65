"""Machine files that a stranger writes by hand: what is odd gets one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.models.ceilings import Roof, read_ceilings
from d5suite.models.published import read_published
from d5suite.models.site import read_site


def figure(value: Any, source: str = "data sheet") -> dict[str, Any]:
    return {"value": value, "source": source}


def step(network: str, rate: float, batch: int = 64) -> dict[str, Any]:
    return {"network": network, "batch": batch, "images_per_s": rate, "source": "a table"}


V100 = {
    "schema": "d5suite-machine-1", "name": "4 × V100 a node, InfiniBand", "devices_per_node": figure(4),
    "peak_flops": figure(125e12), "memory_bytes": figure(16 * 2**30), "memory_bandwidth": figure(900e9),
    "link_bandwidth": figure(120e9), "network_bandwidth": figure(3.125e9), "network_latency_s": figure(2e-6),
    "ceilings": [{"what": "flops", "precision": "fp32", "device": "cuda", "value": 15.7e12, "source": "data sheet"}],
    "steps": [step("alexnet", 3000), step("vgg16", 240), step("resnet18", 1100)],
}  # fmt: skip


def written(folder: Path, **edit: Any) -> Path:
    path = folder / "v100.json"
    content = {key: value for key, value in (V100 | edit).items() if value is not None}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_figures_of_devices_and_ceilings_are_one_roof(tmp_path: Path) -> None:
    path = written(tmp_path)
    ceilings = read_ceilings(path)
    single, half = (ceilings.roof(device="cuda", precision=each, threads=1) for each in ("fp32", "fp16"))
    assert isinstance(single, Roof) and single.flops_per_s == 15.7e12 and single.levels[0].bytes_per_s == 900e9
    assert isinstance(half, Roof) and half.flops_per_s == 125e12
    near, far = (read_site(path, ceilings, nodes=nodes, device="cuda", precision="fp32", threads=1) for nodes in (1, 8))
    assert near.devices == 4 and near.link is not None and near.link.beta_s_per_byte == pytest.approx(1 / 120e9)
    assert far.devices == 32 and far.link is not None  # a ring crosses the network once a node, by all its adapters
    assert far.link.beta_s_per_byte == pytest.approx(1 / 12.5e9) and far.link.alpha_s == 2e-6
    assert [each.network for each in read_published(path)] == ["alexnet", "vgg16", "resnet18"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"network_bandwith": figure(1e9)}, "is network_bandwith meant to be network_bandwidth?"),
        ({"memory_bandwidth": figure(900)}, "900 cannot be: this figure is in bytes per second"),
        ({"memory_bytes": figure(16)}, "16 cannot be: this figure is in bytes"),
        ({"peak_flops": figure(125)}, "125 cannot be: this figure is in operations per second"),
        ({"network_latency_s": figure(2)}, "2 cannot be: this figure is in seconds"),
        ({"memory_bytes": "16 GiB"}, 'this must be {"value": NUMBER, "source": TEXT}'),
        ({"memory_bytes": figure("16 GiB")}, "'16 GiB' is not a positive number"),
        ({"link_bandwidth": figure(120e9, "")}, "this figure has no source"),
        ({"devices_per_node": figure(3.5)}, "this must be a whole number"),
        ({"memory_bytes": None}, "does not say a device's memory"),
        ({"ceilings": None}, "no ceiling of arithmetic in fp32 of 1 thread on cuda"),
        ({"ceilings": {"fp32": 15.7e12}}, "this must be a list of ceilings"),
        ({"network_latency_s": None}, "says nothing of the network between nodes"),
        ({"steps": {}}, "this must be a list of steps"),
        ({"steps": [step("vgg16", 240) | {"gpu": 1}]}, "and nothing else"),
        ({"steps": [{"network": "vgg16", "batch": 64, "source": "x"}]}, "this step has no images_per_s"),
        ({"steps": [step("vgg16", -240)]}, "-240 is not a positive number"),
        ({"steps": [step("vgg99", 240)]}, "the zoo has no network 'vgg99'"),
        ({"steps": [step("squeezenet1_0", 900)]}, "1 measured network are too few"),
        ({"steps": None}, "only GPT-like transformers are known without results"),
    ],
)
def test_what_is_odd_gets_one_clear_error(
    tmp_path: Path, edit: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, **edit)
    assert main(["advise", "squeezenet1_1", "--machine", str(path), "--nodes", "2", "--batch", "8"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert said in text and "a fault of d5suite" not in text


def test_a_file_that_is_no_object_or_has_numbers_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "v100.json"
    for text in ("[]", "null", '{"schema": "d5suite-machine-2", "name": "x"}'):
        path.write_text(text, encoding="utf-8")
        assert main(["advise", "squeezenet1_1", "--machine", str(path), "--batch", "8"]) == 2
        assert "this is not a machine file" in capsys.readouterr().err
    path.write_text(json.dumps(V100 | {"memory_bytes": figure(float("nan"))}), encoding="utf-8")
    assert main(["advise", "squeezenet1_1", "--machine", str(path), "--batch", "8"]) == 2
    assert "fault of d5suite" not in capsys.readouterr().err
