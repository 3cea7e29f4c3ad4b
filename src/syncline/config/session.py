"""What a script may set when it joins its job with `syncline.init()`."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.config.settings import HUNG_S, MAX_MEET_S, MEET_S, SILENT_S
from syncline.errors import ConfigError

KINDS = ("auto", "shared_memory", "network", "torch")
"""`network` is our own TCP streams; `torch` is messages in torch.distributed's process group."""


@dataclass(frozen=True)
class SessionSettings:
    """The arguments of `init`, which explains them."""

    comm: str = "auto"
    silent_s: float = SILENT_S
    hung_s: float = HUNG_S
    meet_s: float = MEET_S
    threads: int | None = None
    """torch's intra-op threads; the session itself does not set them."""

    def check(self) -> None:
        if self.comm not in KINDS:
            raise ConfigError("comm", f"got {self.comm!r}", f"it is one of {', '.join(KINDS)}", "")
        if self.threads is not None and self.threads < 1:
            rule = "a rank computes with at least one thread"
            raise ConfigError("threads", f"got {self.threads}", rule, "Use 1.")
        for name, most in (("silent_s", None), ("hung_s", None), ("meet_s", MAX_MEET_S)):
            seconds = getattr(self, name)
            if not seconds > 0 or (most is not None and seconds > most):
                limit = "" if most is None else f" and at most {most:g}"
                rule = f"it is a number of seconds, above 0{limit}"
                fix = f"The default is {getattr(SessionSettings, name):g}."
                raise ConfigError(name, f"got {seconds}", rule, fix)
