"""A job as TOML text."""

from __future__ import annotations

import msgspec

from syncline.config.job import Job
from syncline.config.settings import ClusterSettings
from syncline.config.words import toml_key, toml_value


def job_to_toml(job: Job) -> str:
    """Write a job as TOML that reads back as an equal job.

    Settings that are None are left out, and so is a cluster with nothing but defaults.
    """
    lines = [f"faults = {toml_value(job.faults)}", ""] if job.faults else []
    for table in job.__struct_fields__:
        struct = getattr(job, table)
        if struct == ClusterSettings() or table == "faults":
            continue
        lines += [f"[{table}]", *_toml_lines(struct), ""]
        own = getattr(struct, "settings", None)
        if own is not None:
            lines += [f"[{table}.{toml_key(struct.name)}]", *_toml_lines(own), ""]
    return "\n".join(lines[:-1]) + "\n"


def _toml_lines(struct: msgspec.Struct) -> list[str]:
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return [
        f"{name} = {toml_value(value)}"
        for name, value in values.items()
        if name != "settings" and value is not None and value not in ({}, ())
    ]
