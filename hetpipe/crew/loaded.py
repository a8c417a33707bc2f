"""Reads and writes the values of the stages that workers have loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hetpipe.capture.program import BUFFER, PARAM, STATE, Slot
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.assembly import Assembly
from hetpipe.crew.copies import Copies
from hetpipe.crew.launcher import Launched
from hetpipe.crew.stage_members import StageMembers
from hetpipe.crew.workers import Workers
from hetpipe.errors import HetpipeError
from hetpipe.wire import messages as say
from hetpipe.wire.copy_messages import Copy
from hetpipe.wire.messages import Array
from hetpipe.worker.bind import Key


class Loaded(Workers):
    """Workers with stages, whose parameters, buffers, gradients and states can be read and written.

    Few values travel at once, so that a model's values need not fit in the controller's memory.
    """

    def __init__(self, cluster: Cluster, launched: Launched, start_timeout_s: float) -> None:
        self._assembly: Assembly | None = None
        self._placement = StageMembers((), False)
        super().__init__(cluster, launched, start_timeout_s)

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

        They arrive while later steps run. `mark` belongs to the copy.
        """
        places, own = self._loaded().places, self._own_host
        values: dict[int, list[Key]] = {}
        for role in (PARAM, BUFFER, STATE):
            for name, stage in places.owners(role).items():
                values.setdefault(stage, []).append((role, name))
        with self._conversation():
            self._control.on_copied = copies.arrived
            number = copies.begin([key for keys in values.values() for key in keys], mark)
            for stage, keys in values.items():
                members = self._placement.members[stage]
                near = next((member for member in members if member in own), members[0])
                self._fleet.send(self._index[near], Copy(number, {stage: keys}))

    def slots(self, role: str) -> dict[str, Slot]:
        """Return the slots whose values `read` returns, by name."""
        return self._loaded().places.owned(role)

    def write(self, role: str, values: Mapping[str, Array]) -> None:
        """Replace values of PARAM, BUFFER, STATE or GRAD slots, on every stage that has them.

        A tied gradient is a sum over stages: the owner gets the value, all other stages get zero.
        """
        for stage, share in self._loaded().places.writes(role, values):
            self._tell(stage, say.Write(stage, role, share))

    def swap(self, state: str) -> None:
        """Exchange every parameter with its state `state`, if it has one; twice changes nothing.

        The other stages that read a tied parameter get the owner's value.
        """
        places = self._loaded().places
        for stage, pairs in places.swaps(state).items():
            self._tell(stage, say.Swap(stage, pairs))
        for stage, values in places.borrows(self.read(PARAM, [*places.tied])):
            self._tell(stage, say.Write(stage, PARAM, values))

    @property
    def _own_host(self) -> set[str]:
        """The members on this process's host."""
        hosts = self.cluster.connections
        return {m.id for m in self.cluster.members if hosts is None or m.host == hosts.own.name}

    def _tell(self, stage: int, message: say.Write | say.Swap) -> None:
        """Send a message to the replicas of a stage, one after another."""
        with self._conversation():
            for member in self._placement.members[stage]:
                self._fleet.send(self._index[member], message)
                self._control.gather([self._index[member]])

    def _loaded(self) -> Assembly:
        self._control.check()
        if self._assembly is None:
            raise HetpipeError("no stages are loaded; call load first")
        return self._assembly
