"""Max-min fair rates of many flows at once, by progressive filling on arrays.

Filling goes on at all ports at the same time: a port is full when none of its flows has less at
another port. In each round at least the port with the least share fills up. Flows through the same
two ports have the same rate, so only different pairs of ports are looked at.

`slack_of` says how many flows may change before that is done again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROUNDING = 1e-12
NEARLY = 3e-3


def slack_of(num_ranks: int) -> float:
    """Return the slack of fast links.

    Up to 16 ranks there is none: ranks that are in step would lose their step by it. Up to 32 there
    is less: with few flows at a port, each of them counts. Above 128 there is more: rates of more
    flows take longer to compute.

    >>> [slack_of(num_ranks) for num_ranks in (16, 24, 128, 256)]
    [0.0, 0.01125, 0.02, 0.04]
    """
    if num_ranks <= 16:
        return 0.0
    return 0.02 * min(1.0, (num_ranks / 32) ** 2) * max(1.0, num_ranks / 128)


def fill(
    rates: Floats, through: Ints, wide: Sequence[tuple[int, Ints]], *, exactly: bool
) -> Floats:
    """Return the rate of each flow. `rates` are those of ports.

    Flow k goes through the ports `through[:, k]`, and those of `wide` with its number. If not
    `exactly`, shares that differ by less than `NEARLY` count as equal, which saves rounds.
    """
    if wide or len(through[0]) < 2 * len(rates):
        return _fill(rates, through, np.ones(len(through[0])), wide, exactly=exactly)
    pairs = through[0] * len(rates) + through[1]
    counts = np.bincount(pairs, minlength=len(rates) ** 2)
    used = np.flatnonzero(counts)
    found = np.empty(len(counts))
    each = np.stack(np.divmod(used, len(rates)))
    found[used] = _fill(rates, each, counts[used].astype(np.float64), (), exactly=exactly)
    return found[pairs]


def _fill(
    rates: Floats,
    through: Ints,
    counts: Floats,
    wide: Sequence[tuple[int, Ints]],
    *,
    exactly: bool,
) -> Floats:
    """Return the rate of each flow; each stands for as many as `counts` says."""
    one, other = through
    num_ports = len(rates)
    found = np.empty(len(one))
    rising = np.arange(len(one))
    left = rates.copy()
    num = np.bincount(one, counts, num_ports) + np.bincount(other, counts, num_ports)
    num = num.astype(np.float64)  # without flows they are integers
    for _, ports in wide:
        num[ports] += 1
    above = 1 + (ROUNDING if exactly else NEARLY)
    while len(rising):
        share = left / np.maximum(num, 0.5)  # counts are whole: 0 may have become nearly 0
        first, second = share[one], share[other]
        low = np.minimum(first, second)
        for at, ports in wide:
            low[at] = min(low[at], share[ports].min())
        limit = low * above
        is_full = np.ones(num_ports, dtype=bool)
        is_full[one[first > limit]] = False
        is_full[other[second > limit]] = False
        for at, ports in wide:
            is_full[ports[share[ports] > limit[at]]] = False
        is_set = is_full[one] | is_full[other]
        for at, ports in wide:
            is_set[at] |= is_full[ports].any()
        now = np.flatnonzero(is_set)
        used = low[now]
        found[rising[now]] = used
        if len(now) == len(rising):
            break
        for ports in (one[now], other[now]):
            left -= np.bincount(ports, used * counts[now], num_ports)
            num -= np.bincount(ports, counts[now], num_ports)
        for at, ports in wide:
            if is_set[at]:
                left[ports] -= low[at]
                num[ports] -= 1
        np.maximum(left, rates * ROUNDING, out=left)
        kept = np.flatnonzero(~is_set)
        if wide:
            place = np.cumsum(~is_set) - 1
            wide = [(int(place[at]), ports) for at, ports in wide if not is_set[at]]
        one, other, counts, rising = one[kept], other[kept], counts[kept], rising[kept]
    return found


def mean_ages(num_ports: int, changed: Ints, ages_s: Floats, through: Ints) -> Floats:
    """Return how long ago, in the mean, flows have begun and ended at the ports of others.

    The last port is never full: what happens there does not count.
    """
    ports, ages_s = changed.ravel(), np.tile(ages_s, 2)
    num = np.bincount(ports, minlength=num_ports)
    sums = np.bincount(ports, ages_s, num_ports)
    num[-1] = sums[-1] = 0
    count = num[through[0]] + num[through[1]]
    found = sums[through[0]] + sums[through[1]]
    mean = float(ages_s.mean()) if len(ages_s) else 0.0
    return np.where(count > 0, found / np.maximum(count, 1), mean)
