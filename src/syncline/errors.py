"""Every error this package raises on purpose.

SynclineError
  ConfigError        a setting is wrong; the job never started
  CheckpointError    a checkpoint is damaged or belongs to another job; it is not changed
  UsageError         the training loop does something that cannot be right on many ranks
  CannotWrite        a file of the run cannot be written; what was written before stays
  MeasureError       what was measured cannot be right
  RunStopped         the run ends before its last step, on purpose; ranks leave in good order
  CommError          a message did not get through
    KeyRefused       the other end of a connection does not hold the job's key
    PeerGone         a call to one peer cannot be answered; calls to other peers still can
    RankFailed       a peer is gone; the message names it
      RankDied         its process ended
      RankSilent       its heartbeat stopped: frozen, or cut off
      RankHung         it lives and others wait for it, but it makes no progress
  DeadlockError      in virtual time every process waits for another

The command line prints one line and exits with `exit_code`; `--debug` shows the traceback.
"""

from __future__ import annotations


class SynclineError(Exception):
    """Base of all errors raised on purpose.

    `is_orderly` says that no rank has failed: those that raise it leave the job in good order.
    `is_said` says that another rank prints it.
    """

    exit_code = 1
    is_orderly = False
    is_said = False


class ConfigError(SynclineError):
    """A setting is wrong. The message gives the key, what was found, the rule and the way out."""

    exit_code = 2

    def __init__(self, key: str, found: str, rule: str, fix: str) -> None:
        super().__init__(f"{key}: {found}, but {rule}. {fix}")
        self.key, self.found, self.rule, self.fix = key, found, rule, fix


class CheckpointError(SynclineError):
    """A checkpoint cannot be used. It was not changed."""

    exit_code = 2


class UsageError(SynclineError):
    """The training loop does something that has no right meaning on many ranks."""


class CannotWrite(SynclineError):
    """A file of the run cannot be written. What was written before stays."""


class MeasureError(SynclineError):
    """What was measured cannot be right, so nothing was written."""


class RunStopped(SynclineError):
    """The run ends before its last step, on purpose."""

    is_orderly = True

    def __init__(self, message: str, *, is_said: bool = False) -> None:
        super().__init__(message)
        self.is_said = is_said


class CommError(SynclineError):
    """A message did not get through."""


class KeyRefused(CommError):
    """The other end of a connection does not hold the job's key."""


class PeerGone(CommError):
    """A call to a peer cannot be answered any more. `rank` says which peer."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class RankFailed(CommError):
    """A peer is gone. `rank` says which; `is_logged` says whether the message was logged."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.is_logged = False


class RankDied(RankFailed):
    """The peer's process ended."""


class RankSilent(RankFailed):
    """The peer's heartbeat stopped: its process is frozen or its machine is cut off."""


class RankHung(RankFailed):
    """The peer lives and others wait for it, but it makes no progress."""


class DeadlockError(SynclineError):
    """Every process of the virtual clock waits for another. `waiting` says what each waits for."""

    def __init__(self, now_s: float, waiting: list[str]) -> None:
        shown = waiting[:8] + [f"and {len(waiting) - 8} more"] * (len(waiting) > 8)
        super().__init__(f"nothing can happen after {now_s:.6g} s: {'; '.join(shown)}")
        self.waiting = waiting
