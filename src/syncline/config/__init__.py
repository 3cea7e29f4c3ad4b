"""The job: what to train, on what, how. Typed, frozen, read from TOML here and nowhere else.

Every mistake in a job raises a `ConfigError` of one line: the dotted key, what was found, the rule
and what to do. Nothing is ignored: an unknown key is refused, and so is a setting without effect
under the other settings. `job_to_toml` writes what `parse_job` reads back as an equal job.

words.py       pieces of error messages
settings.py    the tables of a job
rules.py       rules between settings
job.py         the tables together
describe.py    the type of a setting in words
convert.py     plain values to typed ones
reading.py     TOML to a job
writing.py     a job to TOML

Each imports only from those above it. No torch here: the command line checks a job before it
imports torch, which takes seconds.
"""

from syncline.config.job import Job, keys, what_changed
from syncline.config.reading import parse_job, read_job
from syncline.config.settings import (
    ClusterSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    StrategySettings,
)
from syncline.config.words import printable
from syncline.config.writing import job_to_toml
from syncline.strategies.registry import STRATEGIES

__all__ = [
    "STRATEGIES",
    "ClusterSettings",
    "DataSettings",
    "Job",
    "ModelSettings",
    "OptimizerSettings",
    "RunSettings",
    "StrategySettings",
    "job_to_toml",
    "keys",
    "parse_job",
    "printable",
    "read_job",
    "what_changed",
]
