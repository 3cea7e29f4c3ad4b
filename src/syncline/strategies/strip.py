"""The strip of a bucket that a rank serves: the user's optimizer runs on it for every push."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from syncline.comm.window import Call, Counted, Functions
from syncline.contract import Held, Model, Saved, UpdateSettings
from syncline.engine.bucket import Bucket
from syncline.strategies.replicas import run_values
from syncline.strategies.rule_trial import decay_of_steps
from syncline.strategies.terms import TermsTold


class ServedStrip:
    """A rank's strip of one bucket's parameters."""

    def __init__(
        self,
        model: Model,
        bucket: Bucket,
        low: int,
        high: int,
        decays_apart: bool | None,
        saved: Saved,
    ) -> None:
        """`low` and `high` are its ends; `decays_apart` says how weight decay acts
        (`rule_trial.py`)."""
        # Laid out like the bucket, for the optimizer; pages outside the strip are never allocated.
        values = torch.empty_like(bucket.parameters.memory.mine)
        gradient = torch.empty_like(values)
        self._values, self._gradient = values[low:high], gradient[low:high]
        self._values.copy_(run_values(bucket, saved)[low:high])
        self.optimizer = model.optimizer_of(bucket, values, gradient, low, high)
        self._low, self._high = low, high
        self._decays_apart = decays_apart
        self._version = 0
        self.terms = TermsTold()
        self.functions: Functions = {
            "tell": self.terms.serve_part,
            "push": Counted(self._serve_push),
            "read": self._serve_read,
        }

    def _serve_push(self, call: Call) -> int:
        assert call.values is not None
        assert call.out is not None
        terms = self.terms.terms_of(call)
        self._gradient.copy_(call.values)
        groups = [
            decay_of_steps(group, terms.steps, apart=self._decays_apart)
            for group in terms.settings(self.optimizer.settings)
        ]
        self.optimizer.run(UpdateSettings(groups, frozenset(terms.without)))
        self._version += 1
        call.out.copy_(self._values)
        return self._version

    def held(self) -> Iterator[Held]:
        """Yield this rank's strip as it is now (`Whole.held`)."""
        yield Held(self._low, self._high, self._values)

    def _serve_read(self, call: Call) -> int:
        assert call.out is not None
        call.out.copy_(self._values)
        return self._version
