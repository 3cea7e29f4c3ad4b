"""Settings of strategies in which ranks have a place in a group. No torch here: see config."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from syncline.comm.shape import Machines
from syncline.errors import ConfigError
from syncline.strategies.settings import OwnSettings


class LayeredSettings(OwnSettings, frozen=True, kw_only=True):
    """Which ranks form a group, and who speaks for it.

    `groups` is "machine" for a group of each machine's ranks, a number of groups of neighbouring
    ranks, or the groups themselves. `leaders` are "shared", ranks that compute too, or "dedicated":
    the last rank of each group computes nothing. With `as_published` leaders begin when backward
    is over, with all gradients at once, and every rank updates all parameters.
    """

    groups: (
        Literal["machine"]
        | Annotated[int, Meta(ge=1, examples=[2])]
        | Annotated[tuple[tuple[int, ...], ...], Meta(min_length=1)]
    ) = "machine"
    leaders: Literal["shared", "dedicated"] = "shared"
    as_published: bool = False

    @property
    def fixes_overlap(self) -> bool:
        return self.as_published

    @property
    def fixes_buckets(self) -> bool:
        return self.as_published

    def check(self, ranks: int) -> None:
        groups = self.groups
        if isinstance(groups, int) and groups > ranks:
            raise ConfigError(
                "strategy.layered.groups",
                f"got {groups} with {ranks} rank{'s' if ranks > 1 else ''}",
                "each group has a rank",
                f"Use at most {ranks}.",
            )
        if isinstance(groups, tuple):
            named = sorted(rank for group in groups for rank in group)
            if named != list(range(ranks)) or not all(groups):
                raise ConfigError(
                    "strategy.layered.groups",
                    f"got {[list(group) for group in groups]} with {ranks} ranks",
                    f"each rank from 0 to {ranks - 1} is in one group, and no group is empty",
                    'Name every rank once, or use "machine".',
                )

    def in_groups(self, machines: Machines) -> Machines:
        """Return the ranks of each group, in the order of their leaders."""
        groups, ranks = self.groups, sorted(rank for machine in machines for rank in machine)
        if groups == "machine":
            found = machines
        elif isinstance(groups, int):
            cuts = [len(ranks) * at // groups for at in range(groups + 1)]
            found = tuple(tuple(ranks[low:high]) for low, high in pairwise(cuts))
        else:
            found = groups
        if self.leaders == "dedicated" and min(map(len, found)) < 2 <= len(ranks):
            raise ConfigError(
                "strategy.layered.leaders",
                f'got "dedicated" with a group of one rank ({_listed(found)})',
                "a dedicated leader computes nothing, so its group needs a rank that does",
                'Use leaders = "shared", or groups of two ranks and more.',
            )
        return tuple(sorted((tuple(sorted(group)) for group in found), key=self.leader_of))

    def leader_of(self, group: tuple[int, ...]) -> int:
        """Return the rank that speaks for a group."""
        return min(group) if self.leaders == "shared" else max(group)

    def workers(self, machines: Machines) -> tuple[int, ...]:
        groups = self.in_groups(machines)
        everybody = tuple(sorted(rank for group in groups for rank in group))
        if self.leaders == "shared" or len(everybody) == 1:
            return everybody
        leaders = {self.leader_of(group) for group in groups}
        return tuple(rank for rank in everybody if rank not in leaders)


def _listed(groups: Machines) -> str:
    return ", ".join("-".join(map(str, group)) for group in groups)


class HybridSettings(OwnSettings, frozen=True, kw_only=True):
    """How many groups ranks form, and which layers each group splits.

    `groups` is a number that divides that of the ranks: 1 splits layers over all ranks, as many
    groups as ranks split nothing. "auto" takes the number whose step is simulated to be shortest.
    `layers` are names of linear layers; "auto" takes those for which it pays, or all that can be
    split if `groups` is given.
    """

    splits_layers: ClassVar[bool] = True

    groups: Literal["auto"] | Annotated[int, Meta(ge=1, examples=[2])] = "auto"
    layers: Literal["auto"] | Annotated[tuple[str, ...], Meta(min_length=1)] = "auto"

    @property
    def must_choose(self) -> bool:
        return self.groups == "auto"

    @property
    def fixes_overlap(self) -> bool:
        return True

    def check(self, ranks: int) -> None:
        if self.groups != "auto" and ranks % self.groups:
            fitting = [str(one) for one in range(1, ranks + 1) if ranks % one == 0]
            raise ConfigError(
                "strategy.hybrid.groups",
                f"got {self.groups} with {ranks} rank{'s' if ranks > 1 else ''}",
                "groups have equally many ranks",
                f"Use {', '.join(fitting[:-1])} or {fitting[-1]}." if ranks > 1 else "Use 1.",
            )

    def check_shards(self, shards: int, ranks: int) -> None:
        if self.groups not in ("auto", ranks):
            refuse_uneven(shards, ranks)


def refuse_uneven(shards: int, ranks: int) -> None:
    """Refuse split layers on ranks that do not have equally many shards."""
    if shards % ranks:
        raise ConfigError(
            "strategy.shards",
            f"got {shards} with {ranks} ranks and split layers",
            "the ranks of a group compute on their samples together, so all ranks have "
            "equally many shards",
            f"Use a multiple of {ranks}.",
        )
