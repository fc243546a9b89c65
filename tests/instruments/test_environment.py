"""What the record says of a machine."""

from __future__ import annotations

import platform

import pytest

from d5suite.instruments import environment

GRAVITON, GRACE = (
    "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd aes {features}\nCPU implementer\t: 0x41\n"
    "CPU architecture: 8\nCPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: 1\n\n".format(**each)
    for each in (
        {"features": "atomics", "variant": "0x3", "part": "0xd0c"},
        {"features": "sve sve2 bf16 i8mm", "variant": "0x0", "part": "0xd4f"},
    )
)


def test_two_arm_processors_are_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has a name in /proc/cpuinfo, and the flags are called features."""
    found = []
    read = environment.read_text
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for content in (GRAVITON, GRACE):
        monkeypatch.setattr(
            environment, "read_text", lambda path, c=content: c if path == "/proc/cpuinfo" else read(path)
        )
        found.append(environment.describe([])["cpu"])
    assert found[0]["model"] == "aarch64 (implementer 0x41, part 0xd0c, variant 0x3, revision 1)"
    assert found[1]["model"] != found[0]["model"]
    assert found[0]["vector_extensions"] == ["asimd"]
    assert found[1]["vector_extensions"] == ["asimd", "sve", "sve2", "bf16", "i8mm"]
