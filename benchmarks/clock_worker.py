"""One machine of `benchmarks/clocks.py`: forks a rank of `syncline train` for each question.

torch is loaded once. Questions and answers are lines of JSON on stdin and stdout; the log of ranks
is on stderr. A rank is what a process under torchrun would be: the same environment, the same loop.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from syncline.config import read_job
from syncline.report.progress import SilentProgress
from syncline.train import train


def run_rank(question: dict[str, Any]) -> dict[str, Any]:
    """Train as the job says, as one rank; return the summary."""
    os.environ.update(question["environment"])
    job = read_job(Path(question["job"]), question["sets"])
    trace = Path(question["trace"]) if question["trace"] else None
    summary = train(job, Path(question["out"]), False, SilentProgress(), trace)
    return summary.to_json_dict()


def answer(question: dict[str, Any]) -> str:
    """Run a rank in a process of its own; return its answer as JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            found = run_rank(question)
        except BaseException:
            found = {"error": traceback.format_exc()[-2000:]}
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text or json.dumps({"error": "the rank ended without an answer"})


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(answer(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
