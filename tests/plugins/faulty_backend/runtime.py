"""The runtime of the faulty backend: nothing to configure."""

import os


def configure(*, threads: int, seed: int, device: str) -> None:
    pass


def versions() -> dict[str, str]:
    rank = os.environ.get("D5SUITE_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    library = "1.0" if os.environ.get("RANKED_FAULT") != "disagrees" else f"1.{rank}"
    return {"faulty": os.environ.get("FAULTY_VERSION", "1.0"), "library": library}


def device_problem(device: str) -> None:
    return None


def device_name(device: str) -> str:
    return device


def device_memory(device: str) -> None:
    return None
