"""Command line of the lab: up, exec, status, fault, down."""

from __future__ import annotations

import argparse
import signal
import sys

from lab.network import Lab, LabError, lab_names, take_down_all, why_not

_FAULTS = ("cut", "restore", "kill", "freeze", "thaw")


def _read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="make a lab; prints its name")
    up.add_argument("--machines", type=int, default=2)
    up.add_argument("--rate", default="1gbit", help="of every link, both ways")
    up.add_argument("--mtu", type=int, default=1500)
    up.add_argument("--name")
    run = verbs.add_parser("exec", help="run a command on a machine")
    run.add_argument("name")
    run.add_argument("machine", type=int)
    run.add_argument("command", nargs=argparse.REMAINDER)
    status = verbs.add_parser("status", help="links, rates, bytes, processes")
    status.add_argument("name", nargs="?")
    fault = verbs.add_parser("fault", help="do something to a machine while it runs")
    fault.add_argument("name")
    fault.add_argument("machine", type=int)
    fault.add_argument("what", help=f"{', '.join(_FAULTS)}, or a rate such as 100mbit")
    down = verbs.add_parser("down", help="remove a lab")
    down.add_argument("name", nargs="?")
    down.add_argument("--all", action="store_true", help="every lab, and nothing else")
    keep = verbs.add_parser("keep")  # for the context manager
    keep.add_argument("name")
    return parser.parse_args()


def _up(job: argparse.Namespace) -> None:
    lab = Lab(job.machines, job.rate, job.mtu, job.name)
    if lab.name in lab_names():
        raise LabError(f"there is a lab named {lab.name} already. Take it down, or choose another.")
    lab.up()
    print(f"lab {lab.name}: {lab.machines} machines, {lab.rate}, {lab.congestion_control(0)}")


def _status(job: argparse.Namespace) -> None:
    for name in [job.name] if job.name else lab_names():
        lab = Lab.find(name)
        print(
            f"lab {name}: {lab.machines} machines, congestion control {lab.congestion_control(0)}"
        )
        for machine in range(lab.machines):
            link = lab.traffic(machine)
            state = "cut" if lab.is_cut(machine) else lab.rate_of(machine)
            print(
                f"  {machine}  {lab.address(machine):<10}  {state:<9}"
                f"  sent {link.sent_bytes:>12,} B in {link.sent_packets:,}"
                f"  received {link.received_bytes:>12,} B in {link.received_packets:,}"
                f"  {len(lab.processes(machine))} processes"
            )


def _fault(job: argparse.Namespace) -> None:
    lab = Lab.find(job.name)
    if job.what in _FAULTS:
        getattr(lab, job.what)(job.machine)
    else:
        lab.set_rate(job.machine, job.what)


def _down(job: argparse.Namespace) -> None:
    if job.all == bool(job.name):
        raise LabError("down: give a lab's name, or --all")
    if job.all:
        for name in take_down_all():
            print(f"lab {name} is gone")
    else:
        Lab.find(job.name).down()


def _exec(job: argparse.Namespace) -> int:
    return Lab.find(job.name).popen(job.machine, job.command).wait()


def _keep(job: argparse.Namespace) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    Lab(name=job.name).down()


def main() -> int:
    job = _read()
    try:
        if reason := why_not():
            raise LabError(reason)
        verbs = {"up": _up, "exec": _exec, "status": _status, "fault": _fault, "down": _down}
        return {**verbs, "keep": _keep}[job.verb](job) or 0
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
