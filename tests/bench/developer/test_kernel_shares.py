"""Every training kernel can be left out of a measurement, those that replace no module included."""

import pytest

from glassformer.bench.developer import kernel_shares
from glassformer.kernels import training as kernels


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    for name in ("TRAINING_KERNELS", "head_kernel", "muon_kernel", "adamw_kernel"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name))


@pytest.mark.parametrize("kernel", kernels.TRAINING_KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_is_switched_off(kernel):
    """One that replaces modules is not chosen; one that is looked up by the loss or an optimizer is not found."""
    looked_up = {"CUDA loss": "head_kernel", "CUDA Muon": "muon_kernel", "CUDA AdamW": "adamw_kernel"}
    before = {name: getattr(kernels, name) for name in looked_up.values()}
    kernel_shares.leave_out(kernel.name)
    assert kernel.name not in [left.name for left in kernels.TRAINING_KERNELS]
    assert kernel.replacements or kernel.name in looked_up or kernel.name.startswith("float8")
    for name, function in looked_up.items():
        assert (getattr(kernels, function) is not before[function]) is (name == kernel.name)
