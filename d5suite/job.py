"""Jobs and results as files: what a worker is asked, and what it answers.

Imports the standard library, jsonschema (late), `d5suite.errors` and `d5suite.files`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.files import read_json, write_json

SCHEMA = "d5suite-job-1"
RESULT_SCHEMA = "d5suite-worker-result-1"


@dataclass(frozen=True)
class Job:
    """One workload on one backend; every field is a name or a number (``schemas/job.json`` describes them).

    Attributes
    ----------
    recipe, preset : str
    task : str
        ``measure``, ``memory``, or ``reference`` for the references of level 0.
    measurements : list of str
    backend : dict
        ``name`` and ``mode``.
    device, precision : str
    threads, seed, batch_size, loader_workers, validation_steps, ranks : int
    network : dict
        ``zoo`` (a name) or ``onnx`` (a path), with ``classes``, ``image_size`` in pixels, ``label_smoothing`` and
        ``several_labels`` (per image, verified or unknown).
    dataset : dict
        ``kind`` and ``root``.
    optimizer, sampling : dict
        Settings of the optimizer and of the sampler.
    training : dict
        What ``time_to_accuracy`` needs, as `d5suite.recipe.Training.to_dict` writes it; empty without it.
    operations : list of dict
        Level 0: what is measured instead of a network, as `d5suite.network.operation.Operation.to_dict` writes it; then
        ``network``, ``dataset`` and ``optimizer`` are empty.
    peers : list of str
        Float64 trajectory files to agree with.
    trajectory : str or None
        Where to leave this backend's float64 trajectory.
    reference : str or None
        Where the reference evaluator's answers are, or are to be left, for the backends of the same workload.
    """

    recipe: str
    task: str
    measurements: list[str]
    backend: dict[str, str]
    device: str
    precision: str
    threads: int
    seed: int
    preset: str
    sampling: dict[str, Any]
    network: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, str] = field(default_factory=dict)
    batch_size: int = 1
    optimizer: dict[str, Any] = field(default_factory=dict)
    loader_workers: int = 0
    validation_steps: int = 1
    training: dict[str, Any] = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)
    ranks: int = 1
    peers: list[str] = field(default_factory=list)
    trajectory: str | None = None
    reference: str | None = None

    def save(self, path: Path) -> None:
        """Write the job file atomically."""
        write_json(path, {"schema": SCHEMA, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read and check a job file.

        Raises
        ------
        JobError
            If it cannot be read or does not fit the schema; every fault is named.
        """
        import jsonschema

        content = read_json(path)
        schema = json.loads((Path(__file__).parent / "schemas" / "job.json").read_text(encoding="utf-8"))
        faults = [
            f"{'.'.join(str(p) for p in error.absolute_path) or 'the file'}: {error.message}"
            for error in jsonschema.Draft202012Validator(schema).iter_errors(content)
        ]
        if faults:
            raise JobError("not a valid job: " + "; ".join(faults), where=str(path))
        content.pop("schema")
        return cls(**content)
