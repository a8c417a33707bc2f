"""Reads and writes the values of the stages that workers have loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from hetpipe.capture.program import BUFFER, PARAM, STATE, Slot
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.assembly import Assembly
from hetpipe.crew.copies import Copies, Memory, arrays_in, laid_out
from hetpipe.crew.launcher import Launched
from hetpipe.crew.stage_members import StageMembers
from hetpipe.crew.workers import Workers
from hetpipe.errors import HetpipeError
from hetpipe.wire import messages as say
from hetpipe.wire.copy_messages import Copied, Copy, Key, Stored
from hetpipe.wire.messages import Array


class Loaded(Workers):
    """Workers with stages, whose parameters, buffers, gradients and states can be read and written.

    Few values travel at once, so that a model's values need not fit in the controller's memory.
    """

    def __init__(self, cluster: Cluster, launched: Launched, start_timeout_s: float) -> None:
        self._assembly: Assembly | None = None
        self._placement = StageMembers((), False)
        self.load_count = 0  # by this count a pipeline knows whether its stages are still loaded
        self._token = object()  # tells the loadings of crews apart
        self._copy_numbers = itertools.count(1)  # of copies and of lent memories
        self._copying: dict[int, Copies] = {}  # by number
        super().__init__(cluster, launched, start_timeout_s)
        self._control.on_copied = self._add_copied

    def read(
        self, role: str, names: Sequence[str] | None = None, replica: int = 0
    ) -> dict[str, Array]:
        """Return present values of PARAM, BUFFER, STATE or GRAD slots, by name; by default all.

        A value on several stages (tied weights) comes from the first, of replicas from `replica`.
        """
        return dict(self.each(role, self.slots(role) if names is None else names, replica))

    def each(
        self, role: str, names: Iterable[str], replica: int = 0
    ) -> Iterator[tuple[str, Array]]:
        """Yield the names and values that `read` returns, but read few values at a time."""
        for stage, piece in self._loaded().places.reads(role, names):
            worker = self._index[self._placement.members[stage][replica]]
            with self._conversation():
                self._fleet.send(worker, say.Read(stage, role, tuple(piece)))
                (values,) = self._control.gather([worker])
            yield from values.items()

    def copy(self, copies: Copies, mark: object) -> None:
        """Begin to copy all parameters, buffers and states to this process.

        They may arrive while later steps run. `mark` belongs to the copy.
        """
        stages = self._copied()
        slots = {key: slot for own in stages.values() for key, slot in own.items()}
        by_worker: dict[int, dict[int, dict[Key, Slot]]] = {}
        every = ((n, key, slot) for n, own in stages.items() for key, slot in own.items())
        for stage, key, slot in every:
            members = self._placement.members[stage]
            # Replicas may differ in their buffers, and `read` returns the first one's.
            member = members[0] if key[0] == BUFFER else self._nearest(members)
            by_worker.setdefault(self._index[member], {}).setdefault(stage, {})[key] = slot
        orders, arrays = [], dict[Key, Array]()
        with self._conversation():
            number = next(self._copy_numbers)
            self._copying = {n: c for n, c in self._copying.items() if c.under_way}
            self._copying[number] = copies
            for worker, owned in by_worker.items():
                places, nbytes = laid_out({k: s for own in owned.values() for k, s in own.items()})
                lend = partial(self._lend, worker, nbytes)
                memory = copies.memories.next(worker, (self._token, self.load_count), lend)
                if memory is not None:
                    arrays |= arrays_in(memory, places, slots)
                of_stages = {n: {key: places[key] for key in own} for n, own in owned.items()}
                orders.append((worker, of_stages, nbytes, memory))
            copies.begin(number, slots, arrays, mark)
            for worker, of_stages, nbytes, memory in orders:
                lent = None if memory is None else memory.number
                self._fleet.send(worker, Copy(number, of_stages, nbytes, lent))

    def _lend(self, worker: int, nbytes: int) -> Memory | None:
        number = next(self._copy_numbers)
        content = self._fleet.lend(worker, number, nbytes)
        return None if content is None else Memory(number, content)

    def _add_copied(self, news: Copied | Stored) -> None:
        if (copies := self._copying.get(news.number)) is not None:
            copies.arrived(news)

    @property
    def copied_nbytes(self) -> int:
        """The bytes of all values that `copy` copies."""
        return sum(slot.nbytes for own in self._copied().values() for slot in own.values())

    def _copied(self) -> dict[int, dict[Key, Slot]]:
        """Return the values that `copy` copies, by the stage that owns them."""
        places = self._loaded().places
        stages: dict[int, dict[Key, Slot]] = {}
        for role in (PARAM, BUFFER, STATE):
            for name, stage in places.owners(role).items():
                stages.setdefault(stage, {})[role, name] = places.slots[stage][role, name]
        return stages

    def _nearest(self, members: Sequence[str]) -> str:
        """Return a member on this process's host, if there is one."""
        hosts = self.cluster.connections
        own = {m.id for m in self.cluster.members if hosts is None or m.host == hosts.own.name}
        return next((member for member in members if member in own), members[0])

    def slots(self, role: str) -> dict[str, Slot]:
        """Return the slots whose values `read` returns, by name."""
        return self._loaded().places.owned(role)

    def buffers(self) -> list[dict[str, Array]]:
        """Return the buffers of each replica; a stage with fewer replicas has none in later ones.
        Replicas may have other buffers: batch norms know only the rows of their replica."""
        owners, members = self._loaded().places.owners(BUFFER), self._placement.members
        return [
            self.read(BUFFER, [n for n, stage in owners.items() if r < len(members[stage])], r)
            for r in range(max(map(len, members)))
        ]

    def write(self, role: str, values: Mapping[str, Array], replica: int | None = None) -> None:
        """Replace values of PARAM, BUFFER, STATE or GRAD slots, on every stage that has them, and
        on all replicas or one of them.

        A tied gradient is a sum over stages: the owner gets the value, all other stages get zero.
        """
        for stage, share in self._loaded().places.writes(role, values):
            self._tell(stage, say.Write(stage, role, share), replica)

    def swap(self, state: str) -> None:
        """Exchange every parameter with its state `state`, if it has one; twice changes nothing.

        The other stages that read a tied parameter get the owner's value.
        """
        places = self._loaded().places
        for stage, pairs in places.swaps(state).items():
            self._tell(stage, say.Swap(stage, pairs))
        for stage, values in places.borrows(self.read(PARAM, [*places.tied])):
            self._tell(stage, say.Write(stage, PARAM, values))

    def _tell(self, stage: int, message: say.Write | say.Swap, replica: int | None = None) -> None:
        """Send a message to the replicas of a stage, or one of them, one after another."""
        members = self._placement.members[stage]
        with self._conversation():
            for member in members if replica is None else members[replica : replica + 1]:
                self._fleet.send(self._index[member], message)
                self._control.gather([self._index[member]])

    def _loaded(self) -> Assembly:
        self._control.check()
        if self._assembly is None:
            raise HetpipeError("no stages are loaded; call load first")
        return self._assembly
