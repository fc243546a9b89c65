"""The runtime of the faulty backend: nothing to configure."""


def configure(*, threads: int, seed: int, device: str) -> None:
    pass


def versions() -> dict[str, str]:
    return {"faulty": "1.0"}


def device_problem(device: str) -> None:
    return None


def device_name(device: str) -> str:
    return device


def device_memory(device: str) -> None:
    return None
