"""The latency between two machines of the lab: `python -m benchmarks.latency` (as root).

Half of the round trip of one byte over TCP, on links that carry nothing else. The time that both
kernels and programs take for it is part of it.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time

from lab.network import Lab, why_not

from benchmarks.versions import TOP_FOLDER

PORT = 29400
ROUND_TRIPS = 2000


def echo() -> None:
    """Send back whatever comes, to the first caller."""
    with socket.create_server(("", PORT)) as listener:
        print("ready", flush=True)
        channel, _ = listener.accept()
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while got := channel.recv(64):
            channel.sendall(got)


def measure(address: str, *, as_json: bool) -> None:
    """Print the quartiles of half a round trip; as JSON the median only, in seconds."""
    times_s = []
    with socket.create_connection((address, PORT)) as channel:
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            started_s = time.perf_counter()
            channel.sendall(b"x")
            channel.recv(64)
            times_s.append((time.perf_counter() - started_s) / 2)
    low, middle, high = (1e6 * found for found in statistics.quantiles(times_s, n=4))
    if as_json:
        print(json.dumps({"latency_s": middle / 1e6}))
    else:
        print(f"latency {middle:.1f} us ({low:.1f} to {high:.1f})")


def main() -> int:
    as_json = "--json" in sys.argv
    others = [one for one in sys.argv[1:] if one != "--json"]
    if others == ["echo"]:
        echo()
    elif others:
        measure(others[0], as_json=as_json)
    elif reason := why_not():
        print(f"benchmarks.latency: {reason}", file=sys.stderr)
        return 2
    else:
        command = [sys.executable, "-m", "benchmarks.latency"]
        with Lab(2, "1gbit") as lab:
            owner = lab.popen(0, [*command, "echo"], stdout=subprocess.PIPE, cwd=TOP_FOLDER)
            assert owner.stdout is not None
            owner.stdout.readline()
            question = [lab.address(0), *(["--json"] if as_json else [])]
            return lab.popen(1, [*command, *question], cwd=TOP_FOLDER).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
