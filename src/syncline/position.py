"""A loader's position: the epoch, and how many of its steps are done."""

from __future__ import annotations

from syncline.errors import UsageError


class Turn:
    """One loop over an epoch, from its first step or from the middle."""

    def __init__(self, position: Position, epoch: int, step: int) -> None:
        self._position = position
        self.epoch = epoch
        self._first = step
        self.step = step
        self.last = 0
        """One more than the number of the last step."""

    def advance(self) -> None:
        """Count a step."""
        self.step += 1
        if self._position.turn is self:
            self._position.step = self.step

    def end(self, *, is_begun: bool) -> None:
        """End the loop: the next one is the next epoch, if this one has done or begun a step."""
        position = self._position
        if position.turn is self:
            position.turn = None
            if is_begun or self.step > self._first or self.step >= self.last:
                position.epoch, position.step = self.epoch + 1, 0


class Position:
    """Where a loader is. At most one loop moves it: the one begun last."""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch under way, or the next one."""
        self.step = 0
        """How many steps of it are done."""
        self.turn: Turn | None = None
        self._shards: int | None = None
        """The number of shards that a loaded position was counted in."""

    def begin(self) -> Turn:
        """Begin a loop: at the position, or at the next epoch if another loop has not ended."""
        if self.turn is not None:
            self.epoch, self.step = self.turn.epoch + 1, 0
        self.turn = Turn(self, self.epoch, self.step)
        return self.turn

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop; keep a position loaded in the middle of this epoch."""
        if self.turn is not None or epoch != self.epoch:
            self.turn = None
            self.epoch, self.step = epoch, 0

    def load(self, epoch: int, step: int, shards: int) -> None:
        """Go on from a position that was saved."""
        self.turn = None
        self.epoch, self.step, self._shards = epoch, step, shards

    def check_shards(self, shards: int) -> None:
        """Refuse a number of shards that is not that of the loaded position."""
        if self._shards is not None and self._shards != shards:
            raise UsageError(
                f"the loader's state was saved with shards {self._shards}, but this loader has "
                f"{shards}: the order of data would be another. Use distribute(..., "
                f"shards={self._shards})."
            )
