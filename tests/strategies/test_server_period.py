"""The server with a period: a push carries the gradients and the weight decay of several steps."""

from __future__ import annotations

import pytest
import torch

from strategies.toys import play
from syncline.contract import Saved
from syncline.errors import UsageError
from syncline.strategies import Server, ServerSettings

EVERY_2 = ServerSettings(period=2, early=False)


def alone(optimizer, steps, settings=EVERY_2, start=8.0, gradient=1.0):
    """Return the values of one rank after each step, and what represents the run at the end."""
    rounds, strategies = play(
        lambda: Server(settings), [[start]], [[[gradient]] * steps], optimizer=optimizer
    )
    return [values[0][0] for values in rounds], strategies[0].last[0][0].item()


def sgd(lr, **settings):
    return lambda _: lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


def test_sgd_decays_weights_for_every_step_of_a_push():
    rounds, whole = alone(sgd(0.5, weight_decay=0.1), 2)
    # Alone: 8 - (1 + 0.8) / 2. Pushed: gradients 1 + 1, and the decay of two steps, 2 x 0.1 x 8.
    assert rounds == [pytest.approx(7.1), pytest.approx(8 - 0.5 * (2 + 1.6))]
    assert whole == pytest.approx(6.2)


def test_momentum_takes_the_gradients_and_the_decay_of_a_push_as_one():
    _, whole = alone(sgd(0.5, weight_decay=0.1, momentum=0.5), 4)
    # First push: velocity 2 + 1.6, to 6.2. Second: 1.8 + 2 + 1.24.
    assert whole == pytest.approx(6.2 - 0.5 * (1.8 + 2 + 0.2 * 6.2))


def adamw(_):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.5)


def test_adamw_decays_weights_for_every_step_of_a_push():
    rounds, whole = alone(adamw, 2)
    # Adam's first step is lr. Alone: 8 x 3/4 - 1/2. Pushed: 8 x (3/4)^2 - 1/2.
    assert rounds == [pytest.approx(5.5), pytest.approx(4.0)]
    assert whole == pytest.approx(4.0)


def adam(_):
    return lambda parameters: torch.optim.Adam(parameters, lr=0.5, weight_decay=0.5)


def test_adam_has_the_decay_in_its_gradient():
    # -2.5 - 2.5 and a decay of 2 x 1/2 x 8 is above 0, so the first step, lr, goes down. With the
    # decay of one step it would go up.
    assert alone(adam, 2, gradient=-2.5)[1] == pytest.approx(7.5)


class OddDecay(torch.optim.SGD):
    """Takes the root of a weight off it: neither a factor nor a part of the gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    root = parameter.abs().sqrt()
                    parameter -= group["lr"] * parameter.grad + group["weight_decay"] * root


def odd(weight_decay):
    return lambda _: lambda parameters: OddDecay(parameters, lr=0.5, weight_decay=weight_decay)


def test_a_decay_that_cannot_be_applied_for_several_steps_is_refused():
    with pytest.raises(UsageError, match="Use period=1, or weight_decay=0"):
        alone(odd(0.1), 2)
    assert alone(odd(0.0), 2)[1] == 7.0
    assert alone(odd(0.1), 1, ServerSettings(early=False))[1] == pytest.approx(7.5 - 0.1 * 8**0.5)


def test_the_last_step_of_a_run_pushes_what_is_left():
    _, whole = alone(sgd(0.5, weight_decay=0.1), 3)
    # One gradient, and the decay of one step.
    assert whole == pytest.approx(6.2 - 0.5 * (1 + 0.62))
    _, strategies = play(
        lambda: Server(ServerSettings(period=4, early=False)), [[8.0]] * 2, [[[1.0]] * 6] * 2
    )
    assert strategies[0].last[0][0].item() == 8.0 - 12.0


GRADIENTS = [[[1.0 + step, 0.5], [0.0, 2.0 - step]] for step in range(8)]
OF_RANK = [[of_step[rank] for of_step in GRADIENTS] for rank in range(2)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("stop", range(1, 8))
def test_a_run_that_is_resumed_between_pushes_has_lost_nothing(stop, early):
    make = lambda: Server(ServerSettings(period=3, early=early))  # noqa: E731
    options = {
        "optimizer": sgd(0.1, momentum=0.5, weight_decay=0.1),
        "delays": [0.0, 0.1],
        "total_steps": 8,
    }
    starts = [[4.0, 8.0]] * 2
    through, whole = play(make, starts, OF_RANK, **options)
    first, rest = ([of_rank[part] for of_rank in OF_RANK] for part in (slice(stop), slice(stop, 8)))
    half, before = play(make, starts, first, keeps_state=True, **options)
    saved = [Saved(one.whole.state(), {"x": one.last[0][0]}) for one in before]
    states = [one.last_state for one in before]
    after, ended = play(make, half[-1], rest, saved=saved, states=states, first=stop, **options)
    assert half + after == through
    assert ended[0].last[0][0].tolist() == whole[0].last[0][0].tolist()
