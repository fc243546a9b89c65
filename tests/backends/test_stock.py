"""Every built-in backend has a mode with no option set, or says which of its modes is that."""

from __future__ import annotations

import pytest

from d5suite.backends import discover
from d5suite.errors import BackendError

BUILT_IN = ("deep500", "jax", "keras", "mxnet", "onnxruntime", "tensorflow", "torch")


@pytest.mark.parametrize("name", BUILT_IN)
def test_stock_is_a_mode_and_not_the_default_or_the_reason_names_a_mode(name: str) -> None:
    backend = discover()[0][name]
    if "stock" in backend.modes:
        assert backend.default_mode != "stock"
        assert backend.environment.get("stock") == backend.environment.get(backend.default_mode)  # one process has both
        return
    with pytest.raises(BackendError, match=f"{name}' has no mode 'stock': ") as refused:
        backend.check(mode="stock")
    assert any(f"mode {mode} " in str(refused.value) for mode in backend.modes)
