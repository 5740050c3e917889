"""Install float8 kernels on a CPU, where their operators run by their definitions."""

from unittest import mock

import torch

from glassformer.kernels.cuda.training import fp8
from glassformer.kernels.training import TrainingRequest, install_training_kernels
from glassformer.model import Model


def install(model: Model) -> list[str]:
    """As `install_training_kernels` on a GPU with float8."""
    with mock.patch.object(fp8, "unsupported_device", return_value=None):
        return install_training_kernels(model, TrainingRequest(torch.device("cpu"), native=False, float8=True))
