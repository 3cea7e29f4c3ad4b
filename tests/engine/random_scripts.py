"""What a random training script can do: two models, their optimizers, and about thirty deeds.

Every deed works on plain PyTorch and on distributed models, so that the same list of deeds can be
run on both.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

import syncline
from syncline.checkpoint import digest_of


class Net(nn.Module):
    """A branch that is not always used, and statistics, or a norm that has none."""

    def __init__(self, *, has_statistics):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if has_statistics else nn.LayerNorm(6)
        self.aside = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x, uses_aside):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.aside(x) if uses_aside else x)


class Script:
    """A model and a critic of its output, each with an optimizer; one scheduler."""

    def __init__(self, *, is_ours, has_statistics=True, dtype=torch.float32, **options):
        """`options` are given to `distribute`."""
        torch.manual_seed(0)
        self.model = Net(has_statistics=has_statistics).to(dtype)
        self.critic = nn.Linear(2, 1).to(dtype)
        how = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **how)
        self.critics = torch.optim.AdamW(self.critic.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.is_ours = is_ours
        self.start = copy.deepcopy(self.model.state_dict())
        self.kept = None
        self.replicas = []
        if is_ours:
            for model, optimizer in ((self.model, self.optimizer), (self.critic, self.critics)):
                replica = syncline.distribute(
                    model, optimizer, bucket_bytes=64, accumulate=4, **options
                )
                self.replicas.append(replica)

    def x(self, seed):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x.to(self.model.first.weight.dtype)

    def do(self, what, seed, scale=1.0):
        """Do one deed; `scale` multiplies the losses."""
        self._DEEDS[what](self, seed, scale)

    def run(self, deeds):
        """Do deeds in turn and return what came of them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedulers before steps
            for number, deed in enumerate(deeds):
                self.do(deed, number)
        return self.digest()

    def values(self):
        """Return all that training has changed: weights, statistics, rate, optimizer state."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"critic.{name}": value for name, value in self.critic.state_dict().items()}
        rate = self.optimizer.param_groups[0]["lr"]
        found["rate"] = torch.tensor(rate, dtype=torch.float64)
        for kind, optimizer in (("sgd", self.optimizer), ("adamw", self.critics)):
            for number, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    if torch.is_tensor(value):
                        found[f"{kind}.{number}.{key}"] = value
        return found

    def digest(self):
        return digest_of(self.values())

    # Gradients.

    def _backward(self, seed, scale, uses_aside=True):
        (self.model(self.x(seed), uses_aside).square().mean() * scale).backward()

    def _backward_without_aside(self, seed, scale):
        self._backward(seed, scale, uses_aside=False)

    def _backward_both(self, seed, scale):
        (self.critic(self.model(self.x(seed), True)).square().mean() * scale).backward()

    def _backward_critic(self, seed, scale):
        fake = self.model(self.x(seed), False).detach()
        (self.critic(fake).square().mean() * scale).backward()

    def _set_gradients(self, seed, scale):
        loss = self.model(self.x(seed), True).square().mean() * scale
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, found, strict=True):
            parameter.grad = gradient

    def _each_to_none(self, *_):
        for parameter in self.model.parameters():
            parameter.grad = None

    def _one_to_none(self, *_):
        self.model.last.bias.grad = None

    def _read_gradients(self, *_):
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        sum(norms)

    def _fill_gradient(self, *_):
        if self.model.last.bias.grad is not None:
            self.model.last.bias.grad.fill_(0.5)

    def _clip(self, *_):
        if self.is_ours:
            syncline.clip_grad_value_(self.model, 0.02)
        elif any(p.grad is not None for p in self.model.parameters()):  # else torch raises
            nn.utils.clip_grad_value_(self.model.parameters(), 0.02)

    # Steps.

    def _step(self, *_):
        self.optimizer.step()

    def _step_critic(self, *_):
        self.critics.step()

    def _step_with_closure(self, seed, scale):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(self.x(seed), True).square().mean() * scale
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def _halve_rate(self, *_):
        self.optimizer.param_groups[0]["lr"] *= 0.5

    # Changes outside the optimizer.

    def _evaluate(self, seed, scale):
        self.model.eval()
        with torch.no_grad():
            self.model(self.x(seed), True)
        self.model.train()

    def _shrink(self, *_):
        with torch.no_grad():
            self.model.last.weight.mul_(0.98)

    def _shrink_data(self, *_):
        self.model.first.weight.data.mul_(0.98)

    def _shift_statistics(self, *_):
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.mul_(0.5).add_(0.25)

    def _new_memory(self, *_):
        self.model.last.weight.data = self.model.last.weight.data.clone()

    def _load(self, *_):
        self.model.load_state_dict(self.start)

    def _load_part(self, *_):
        part = {name: self.start[f"last.{name}"] for name in ("weight", "bias")}
        self.model.last.load_state_dict(part)

    def _save(self, *_):
        self.kept = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def _restore(self, *_):
        if self.kept is not None:
            self.model.load_state_dict(self.kept[0])
            self.optimizer.load_state_dict(self.kept[1])

    def _copy_and_use(self, seed, scale):
        copied = copy.deepcopy(self.model)
        with torch.no_grad():
            copied.last.weight.zero_()
            copied(self.x(seed), True)

    def _add_group(self, *_):
        extra = nn.Parameter(torch.ones(2, dtype=self.model.first.weight.dtype))
        self.model.register_parameter("extra", extra)
        self.optimizer.add_param_group({"params": [extra]})

    _DEEDS = {  # noqa: RUF012
        "backward": _backward,
        "backward without aside": _backward_without_aside,
        "backward both": _backward_both,
        "backward critic": _backward_critic,
        "set gradients": _set_gradients,
        "each to none": _each_to_none,
        "one to none": _one_to_none,
        "read gradients": _read_gradients,
        "fill a gradient": _fill_gradient,
        "clip": _clip,
        "zero": lambda self, *_: self.optimizer.zero_grad(),
        "zeros": lambda self, *_: self.model.zero_grad(set_to_none=False),
        "optimizer's zeros": lambda self, *_: self.optimizer.zero_grad(set_to_none=False),
        "zero critic": lambda self, *_: self.critic.zero_grad(),
        "step": _step,
        "step critic": _step_critic,
        "step with closure": _step_with_closure,
        "schedule": lambda self, *_: self.scheduler.step(),
        "halve rate": _halve_rate,
        "evaluate": _evaluate,
        "shrink": _shrink,
        "shrink data": _shrink_data,
        "shift statistics": _shift_statistics,
        "new memory": _new_memory,
        "cast": lambda self, *_: (self.model.double(), self.critic.double()),
        "cast back": lambda self, *_: (self.model.float(), self.critic.float()),
        "freeze": lambda self, *_: self.model.aside.requires_grad_(False),
        "thaw": lambda self, *_: self.model.aside.requires_grad_(True),
        "load": _load,
        "load part": _load_part,
        "save": _save,
        "restore": _restore,
        "copy": _copy_and_use,
        "add group": _add_group,
    }


DEEDS = list(Script._DEEDS)
USUAL = [
    ["backward", "step", "zero"],
    ["zero", "backward", "step"],
    ["zeros", "backward", "step"],
    ["backward critic", "step critic", "zero critic", "backward both", "step", "zero"],
    ["zero critic", "backward critic", "step critic", "zero", "backward both", "step"],
]
