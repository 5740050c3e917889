"""Steps are those of torch.optim.AdamW bit for bit, and so is the state."""

import pytest
import torch

from glassformer.training.optimizers import AdamW

SHAPES = [(3,), (17, 5), (4, 6), (64,), (2, 3, 4)]


def groups(dtypes=(torch.float32,)):
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=draw).to(dtypes[n % len(dtypes)]) for n, s in enumerate(SHAPES)]
    parameters = [torch.nn.Parameter(p) for p in made]
    return [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "weight_decay": 0.0}]


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def give(optimizer, step):
    """Draw gradients. The last parameter has none in the first step."""
    draw = torch.Generator().manual_seed(step)
    given = parameters(optimizer)
    for p in given:
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
    if step == 0:
        given[-1].grad = None


def assert_equal(ours, theirs):
    for p, q in zip(parameters(ours), parameters(theirs), strict=True):
        assert torch.equal(p, q)
        a, b = ours.state.get(p, {}), theirs.state.get(q, {})
        assert list(a) == list(b)
        for key, value in a.items():
            assert (value.dtype, value.device, value.shape) == (b[key].dtype, b[key].device, b[key].shape)
            assert torch.equal(value, b[key]), key


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64,), (torch.float32, torch.bfloat16)])
def test_steps_and_state_are_those_of_torch(rate, dtypes):
    ours = AdamW(groups(dtypes), rate, (0.9, 0.95))
    theirs = torch.optim.AdamW(groups(dtypes), lr=rate, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        for optimizer in (ours, theirs):
            give(optimizer, step)
            for group in optimizer.param_groups:
                group["lr"] = rate * (step + 1) / 4
            optimizer.step()
        assert_equal(ours, theirs)
    assert len(ours.state) == len(SHAPES)


@pytest.mark.parametrize("failed", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_shrunk_and_a_step_can_fail(failed, fused):
    ours, theirs = (
        AdamW(groups(), 0.01, (0.9, 0.95)),
        torch.optim.AdamW(groups(), lr=0.01, betas=(0.9, 0.95), fused=True),
    )
    for group in ours.param_groups:
        group["fused"] = fused
    for step in range(3):
        for optimizer in (ours, theirs):
            give(optimizer, step)
        ours.step(torch.tensor(failed if step == 1 else 0.0), torch.tensor(0.25))
        for p in parameters(theirs):
            p.grad = None if p.grad is None else p.grad * 0.25
        if step != 1 or not failed:
            theirs.step()
    if fused:
        assert_equal(ours, theirs)
    for p, q in zip(parameters(ours), parameters(theirs), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert ours.state[p]["step"] == theirs.state[q]["step"]


def test_devices_without_the_operator_update_one_parameter_after_the_other():
    """The definition of torch, which is not fused either."""
    ours = AdamW(groups(), 0.01, (0.9, 0.95))
    for group in ours.param_groups:
        group["fused"] = False
    theirs = torch.optim.AdamW(groups(), lr=0.01, betas=(0.9, 0.95), fused=False, foreach=False)
    for step in range(4):
        for optimizer in (ours, theirs):
            give(optimizer, step)
            optimizer.step()
        assert_equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_step_counters_are_where_the_update_reads_them(device):
    """On the device for the operator, else on the CPU: meta stands for a device without it."""
    optimizer = AdamW([{"params": [torch.nn.Parameter(torch.zeros(2, 3, device=device))]}], 0.1, (0.9, 0.95))
    (group,) = optimizer.param_groups
    held = optimizer.state_of(group["params"][0], group)
    assert group["fused"] is (device == "cpu")
    assert (held["step"].device.type, held["exp_avg"].device.type) == ("cpu", device)
    assert optimizer.state_of(group["params"][0], group) is held
