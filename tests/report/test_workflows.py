"""Lines about workflows: the bottleneck of each, and the settings that were tried."""

from __future__ import annotations

from typing import Any

from d5suite.report.workflows import workflow_lines


def planted(
    kind: str, capacity: int, median_s: float, told: str, *, placement: str = "packed"
) -> tuple[str, dict[str, Any]]:
    """A name and what a line needs of its record."""
    coupling = {"kind": kind, "capacity": capacity, "policy": "block"}
    return f"heat-{kind}/workflow, deep500-workflow-gloo-2", {
        "measurement": "workflow", "preset": "smoke", "precision": "fp32", "threads": 2, "ranks": 2,
        "median_s": median_s, "median_ci95": [0.9 * median_s, 1.1 * median_s],
        "workflow": {"placement": placement, "couplings": {"snapshots": coupling},
                     "bottleneck": {"sentence": told, "mend": "give it more"}},
    }  # fmt: skip


def test_every_bottleneck_is_said_and_what_was_tried() -> None:
    found = [planted("memory", 1, 0.2, "the buffer is full"), planted("memory", 8, 0.1, "nothing waits")]
    one, other, tried = workflow_lines(found)
    assert one == (
        "heat-memory/workflow, deep500-workflow-gloo-2 (capacity 1): the buffer is full; to mend it, give it more"
    )
    assert "(capacity 8): nothing waits" in other
    assert tried == (
        "heat, deep500-workflow-gloo-2, smoke, fp32, 1 threads per rank: makespans of 2 settings, one after the other: "
        "capacity 8 0.1 s (0.09–0.11), capacity 1 0.2 s (0.18–0.22); with the first, nothing waits"
    )


def test_couplings_and_placements_are_settings_too() -> None:
    found = [planted("memory", 2, 0.2, "a"), planted("files", 2, 0.3, "b", placement="interleaved")]
    assert "placement packed, coupling memory 0.2 s" in list(workflow_lines(found))[-1]
    (alone,) = workflow_lines(found[:1])
    assert alone.startswith("heat-memory/workflow, deep500-workflow-gloo-2: a; ")
