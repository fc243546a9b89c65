"""The runtime of the faulty backend: nothing to configure."""


def configure(*, threads, seed, device):
    pass


def versions():
    return {"faulty": "1.0"}


def device_problem(device):
    return None


def device_name(device):
    return device


def device_memory(device):
    return None
