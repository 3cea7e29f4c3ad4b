"""Models on a device are refused; whether the machine has one changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.errors import UsageError
from syncline.session import current_session


class OnAnyDevice(torch.Tensor):
    """A tensor that says it is on a device that this machine does not have."""

    @staticmethod
    def __new__(cls, shape, device):
        return torch.Tensor._make_wrapper_subclass(cls, shape, device=device, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        assert function is torch.ops.aten.detach.default, f"{function} touches the device"
        return cls(arguments[0].shape, arguments[0].device)


def refusal(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        syncline.distribute(model, optimizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WAY_OUT = (
    "but this version trains models in the memory of the CPU only. Call model.cpu() before the"
    " optimizer is made and before distribute(), or train on devices with torch's"
    " DistributedDataParallel."
)


def test_a_parameter_on_a_device_is_refused_in_one_line(alone):
    syncline.init()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert refusal(model) == f"parameter 1.weight is on the device meta, {WAY_OUT}"


@pytest.mark.parametrize("device", ["cuda:1", "privateuseone:0", "xpu", "mps"])
def test_every_kind_of_device_is_refused(alone, device):
    syncline.init()
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(OnAnyDevice((2, 2), device))
    assert refusal(model).startswith(f"parameter weight is on the device {device}, but this")


def test_a_buffer_on_a_device_is_refused(alone):
    syncline.init()
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2, device="meta"))
    assert refusal(model) == f"buffer mean is on the device meta, {WAY_OUT}"


@pytest.mark.processes
@pytest.mark.parametrize("comm", ["auto", "network", "torch"])
def test_a_device_is_refused_whatever_the_communicator(comm):
    def work():
        syncline.init(comm=comm)
        return refusal(nn.Linear(2, 2, device="meta"))

    assert run_ranks(2, work) == [f"parameter weight is on the device meta, {WAY_OUT}"] * 2


@pytest.mark.processes
def test_the_communicator_does_not_depend_on_the_machines_devices():
    def work():
        torch.cuda.is_available = lambda: True
        syncline.init()
        return current_session().comm.name

    assert run_ranks(2, work) == ["shared memory"] * 2
