"""Several machines with several ranks each: shared memory inside, the network across.

A bucket is cut into one column per local rank, and each column into one strip per machine. First
each rank adds up its own column over its machine's ranks, in shared memory; then it exchanges that
column with the ranks of the same local rank on other machines. So a machine sends its sum once,
not once per rank, and all its ranks share the work of sending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from syncline.comm.base import Communicator, Memory, Partials, Strips, check_owner
from syncline.comm.blocks import Blocks, Tensors, blocks_among
from syncline.comm.context import Context
from syncline.comm.many_calls import OneByOne
from syncline.comm.network import Network
from syncline.comm.operations import about, about_blocks
from syncline.comm.real import Prepared, RealCommunicator, join_plans, plan_in_two_halves
from syncline.comm.shape import choose, kind_of, positions_of, shape_of
from syncline.comm.shared_memory import SharedMemory
from syncline.comm.tree import Node, prepare_sums, sources_below
from syncline.comm.volume import Volume, sent_bytes, stages, volume_of_partials
from syncline.comm.window import Functions, Pending, Window

log = logging.getLogger("syncline")


class Hierarchical(RealCommunicator):
    """Collectives among ranks on several machines with equally many ranks each."""

    def __init__(
        self, context: Context, inside: SharedMemory, across: Network, everybody: Network
    ) -> None:
        """`inside` has this machine's ranks; `across` those of this rank's column.

        `everybody` has all ranks. All three are closed with the communicator.
        """
        super().__init__(context)
        self._inside = inside
        self._across = across
        self._everybody = everybody
        self.machines = everybody.machines
        self.num_machines = len(self.machines)
        self.name = f"{inside.name} inside machines, {across.name} across"
        # Position = strip number: the strips of a column lie side by side.
        self.ranks = positions_of(self.machines)
        self.size = len(self.ranks)
        self._machine = across.position
        self.position = self.ranks.index(context.rank)
        assert self.position == inside.position * self.num_machines + self._machine
        self.num_channels = across.num_channels
        self._shape = shape_of(self.machines)
        self._near = self._shape.machines[self._machine]
        self._far = [at for at in range(self.size) if at not in self._near]
        """Positions on this machine and on others."""
        self._routes = self._routes_of_blocks()

    @classmethod
    def of(cls, context: Context, inside: SharedMemory, everybody: Network) -> Hierarchical:
        """Make the communicator of the ranks of `everybody`. Each of them calls it.

        All machines have equally many of these ranks; `inside` has those of this machine.
        """
        column = tuple((machine[inside.position],) for machine in everybody.machines)
        across = everybody.group_of(column)
        assert isinstance(across, Network)
        return cls(context, inside, across, everybody)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self._inside.allocate(num_elements, dtype)

    def allocate_common(self, num_elements: int, dtype: torch.dtype) -> Memory:
        return self._inside.allocate_common(num_elements, dtype)

    def _strips_of_column(self, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
        first = self._inside.position * self.num_machines
        return [(cuts[first + at], cuts[first + at + 1]) for at in range(self.num_machines)]

    def plan_reduce_scatter(self, partials: Partials) -> Prepared:
        """Prepare both stages: sums of the machine's own nodes, then the exchange across."""
        check_owner(partials.sums, self._inside)
        strips, which = self._strips_of_column(partials.cuts), about(partials.sums[0])
        low, high = strips[0][0], strips[-1][1]
        machines = [range(at, self.size, self.num_machines) for at in range(self.num_machines)]
        across = partials.spread.across_groups(machines)
        sources: list[tuple[Node, torch.Tensor]] = []
        for local, position in enumerate(machines[self._machine]):
            nodes = partials.spread.nodes[position]
            for node, memory in zip(nodes, partials.sums, strict=False):
                assert memory.peers is not None
                sources.append((node, memory.peers[local][low:high]))
        ends = across.nodes[self._machine]
        columns: list[torch.Tensor] = []
        for end in ends:
            below = sources_below(end, sources)
            if len(below) == 1:
                columns.append(below[0][1])  # sent in place, without a copy
            elif len(ends) == 1:
                # In place: only this rank reads its own column of its own sum.
                columns.append(partials.sums[0].mine[low:high])
            else:
                columns.append(torch.empty(high - low, dtype=partials.result.dtype))
        add_up = prepare_sums(ends, sources, columns)
        exchange = self._across.prepare(
            across.shards,
            across.nodes,
            columns,
            [(start - low, stop - low) for start, stop in strips],
            partials.strip(self.position),
            partials.scale,
            which,
        )

        def run(what: str) -> None:
            self._inside.meet(what, which)
            add_up()
            self.traffic.spent("sum")
            exchange.run(what)

        volume = volume_of_partials(partials, self._shape)
        read_bytes = self._read_bytes("reduce_scatter", volume)
        return Prepared(run, read_bytes + exchange.num_bytes)

    def _read_bytes(self, what: str, volume: Volume) -> int:
        """Return how much of this rank's memory its peers on the machine read."""
        return sent_bytes(stages(what, self._shape, volume), self.position, "inside")

    def announce(self, partials: Partials) -> None:
        pass

    def plan_all_gather(self, strips: Strips) -> Prepared:
        check_owner([strips.memory], self._inside)
        column = self._strips_of_column(strips.cuts)
        pieces = [strips.memory.mine[start:stop] for start, stop in column]
        peers = [machine for machine in range(self.num_machines) if machine != self._machine]
        exchange = self._across.prepare_exchange(
            [(peer, pieces[self._machine]) for peer in peers],
            [(peer, pieces[peer]) for peer in peers],
            about(strips.memory),
        )
        columns = Strips(strips.memory, strips.cuts[:: self.num_machines])
        return join_plans(exchange, self._inside.plan_all_gather(columns))

    def plan_all_reduce(self, partials: Partials) -> Prepared:
        return plan_in_two_halves(self, partials)

    def plan_reduce(self, partials: Partials, root: int) -> Prepared:
        """Give the sum to all ranks: each rank of a machine receives only its own column."""
        gather = self.plan_all_gather(partials.gathered)
        return join_plans(self.plan_reduce_scatter(partials), gather)

    def copy_from(self, tensor: torch.Tensor, root: int) -> int:
        local, machine = divmod(root, self.num_machines)
        num_bytes = 0
        if self._inside.position == local:
            num_bytes = self._across.copy_from(tensor, machine)
        return num_bytes + self._inside.copy_from(tensor, local)

    def exchange_blocks(self, sends: Tensors, receives: Tensors, blocks: Blocks) -> None:
        """Send messages to other machines; while they are on their way, exchange inside."""
        which, near = about_blocks(blocks), self._near
        ends = [
            network.begin_exchange(
                [(peer, sends[at]) for at, peer in pairs],
                [(peer, receives[at]) for at, peer in pairs],
                "all_to_all",
                which,
            )
            for network, pairs in self._routes
        ]
        self._inside.exchange_blocks(
            [sends[at] for at in near], [receives[at] for at in near], blocks_among(blocks, near)
        )
        taken = blocks.takes[self.position]
        senders = [self.ranks[at] for at in self._far if blocks.gives[at] * taken]
        self._everybody.end_exchange(ends, senders)

    def _routes_of_blocks(self) -> list[tuple[Network, list[tuple[int, int]]]]:
        """Return which network carries blocks to positions of other machines, and as which peers.

        Those of this rank's column get their blocks in the column's conversation, as in other
        collectives: otherwise machines that call different ones would not notice.
        """
        column = [at for at in self._far if self.ranks[at] in self._across.ranks]
        others = [at for at in self._far if at not in column]
        return [
            (network, [(at, network.ranks.index(self.ranks[at])) for at in positions])
            for network, positions in ((self._across, column), (self._everybody, others))
        ]

    def meet(self, what: str) -> None:
        self._inside.meet(what)
        self._across.meet(what)
        self._inside.meet(what)

    def end_lending(self) -> None:
        self._inside.end_lending()  # across machines an exchange returns when all is sent

    def window(self, num_elements: int, dtype: torch.dtype, functions: Functions) -> Window:
        return _RoutedWindow(
            self.ranks,
            self._inside.ranks,
            self._inside.window(num_elements, dtype, functions),
            self._everybody.ranks,
            self._everybody.window(num_elements, dtype, functions),
        )

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        machines = choose(self.machines, ranks)
        kind = kind_of(machines)
        mine = [rank for rank in self._inside.ranks if rank in ranks]
        inside = None
        if mine and kind in ("shared memory", "hierarchical"):
            # Every rank of the machine must call it, also those outside the subgroup.
            inside = self._inside.subgroup(mine)
        if self.context.rank not in ranks or kind == "shared memory":
            return inside
        if kind != "hierarchical":
            wanted = sorted(positions_of(machines))
            if len(wanted) > len(machines) and self.context.rank == wanted[0]:
                log.info(
                    "the group of ranks %s uses the network, not shared memory: its machines have "
                    "different numbers of its ranks (%s)",
                    wanted,
                    ", ".join(str(len(machine)) for machine in machines),
                )
            return self._everybody.group_of(machines)
        everybody = self._everybody.group_of(machines)
        assert isinstance(inside, SharedMemory)
        assert isinstance(everybody, Network)
        group = Hierarchical.of(self.context, inside, everybody)
        self.adopt(group)
        return group

    def messages(self) -> Network:
        return self._everybody

    def release(self) -> None:
        self._inside.close()
        self._across.close()
        self._everybody.close()


class _RoutedWindow(OneByOne):
    """Two windows as one: shared memory to ranks of this machine, the network to all others."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        inside_ranks: tuple[int, ...],
        inside: Window,
        all_ranks: tuple[int, ...],
        across: Window,
    ) -> None:
        self._windows = (inside, across)
        self._routes = [
            (inside, inside_ranks.index(rank))
            if rank in inside_ranks
            else (across, all_ranks.index(rank))
            for rank in ranks
        ]

    @property
    def num_calls(self) -> int:
        return sum(window.num_calls for window in self._windows)

    @property
    def sent_bytes(self) -> int:
        return sum(window.sent_bytes for window in self._windows)

    def publish(self, values: torch.Tensor) -> bool:
        return all([window.publish(values) for window in self._windows])

    def get(self, position: int) -> Pending:
        window, at = self._routes[position]
        return window.get(at)

    def call(
        self,
        position: int,
        function: str,
        values: Memory | None = None,
        out: Memory | None = None,
        note: bytes = b"",
    ) -> Pending:
        window, at = self._routes[position]
        return window.call(at, function, values, out, note)

    def until(
        self,
        is_true: Callable[[], bool],
        why: Callable[[], str],
        late: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._windows[0].until(is_true, why, late)

    def gone(self) -> frozenset[int]:
        gone = [window.gone() for window in self._windows]
        places = enumerate(self._routes)
        return frozenset(k for k, (w, at) in places if at in gone[self._windows.index(w)])
