"""A small job in TOML, with settings laid over it, and the line it is refused with."""

from __future__ import annotations

import pytest

from syncline.config import Job, parse_job
from syncline.errors import ConfigError

SMALL = """
[model]
name = "cnn"

[data]
name = "digits"
batch = 64

[optimizer]
lr = 0.05

[run]
steps = 30
"""


SYNTHETIC = SMALL.replace("digits", "synthetic")
"""The same on data that need not be read."""


def small(**sets: object) -> Job:
    """The small job with settings such as run__steps="30" laid over it."""
    return parse_job(
        SMALL, sets=[f"{key.replace('__', '.')}={value}" for key, value in sets.items()]
    )


def refusal(text: str, *sets: str, ranks: int | None = None) -> str:
    """The one line with which a job is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_job(text, source="job.toml", sets=sets).resolved(ranks)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(caught.value.key + ": ")
    return line
