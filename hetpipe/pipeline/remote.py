"""Sources of mini-batches on the hosts themselves: `pipe.run(hp.Remote("my_data:batches"))`."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hetpipe.errors import HetpipeError
from hetpipe.worker.sources import END, Recipe

if TYPE_CHECKING:
    from hetpipe.pipeline.setup import Setup

_WORKER = "hetpipe.worker.sources"


class Remote:
    """Mini-batches for `Pipeline.run` that never cross the network.

    `function` is `module:function`. Each worker whose stages read leaves imports the module on its
    host, calls the function with `arguments`, and iterates over the result: pairs (x, y), as `run`
    takes them, the same on each host. Raises `HetpipeError` for a text of another form, and for
    arguments that cannot be pickled.
    """

    def __init__(self, function: str, /, **arguments: object) -> None:
        module, colon, name = function.partition(":")
        if not (module and colon and name.isidentifier()):
            raise HetpipeError(
                f"hp.Remote({function!r}): name a function of a module, as in my_data:batches"
            )
        self.function, self.arguments = function, arguments
        try:
            pickle.dumps(arguments)
        except Exception as error:
            raise HetpipeError(f"{self}: its arguments cannot be pickled: {error}") from error

    def __repr__(self) -> str:
        return f"hp.Remote({self.function!r})"

    def __iter__(self) -> NoReturn:
        raise HetpipeError(f"{self}: only pipe.run reads mini-batches on the hosts of the workers")


def refuse_remote(*sources: object) -> None:
    """Raise `HetpipeError` for a `Remote` in a call other than `run`."""
    for source in sources:
        if isinstance(source, Remote):
            iter(source)


class Present(NamedTuple):
    """Stands for a mini-batch that the workers have read."""

    key: str
    samples: int


class RemoteBatches:
    """The mini-batches of a `Remote`, which the workers read in step."""

    def __init__(self, setup: Setup, remote: Remote) -> None:
        """Raise `HetpipeError` for a pipeline that cannot read such mini-batches."""
        captured, plan = setup.captured, setup.plan
        refused = {
            "buckets": captured.padding is not None,
            'loss_over="mini-batch"': setup.whole_loss is not None,
            f"the schedule {plan.schedule}, which does not flush": not plan.rule.flushes,
        }
        for option, is_set in refused.items():
            if is_set:
                raise HetpipeError(f"{remote} does not work with {option}: read the data here")
        self._crew, self._remote = setup.crew, remote
        self._recipe = Recipe(
            remote.function, remote.arguments, captured.example, captured.indices,
            plan.microbatches, None if captured.has_count else plan.stages[-1].shares,
        )  # fmt: skip
        self._key = secrets.token_hex(8)
        self._members: list[str] = []
        self._count = 0

    def __iter__(self) -> Iterator[Present]:
        return self

    def __next__(self) -> Present:
        members = self._crew.readers
        if members != self._members:  # at first, and after layers have moved
            self.close()
            self._members = members
            arguments = self._key, self._recipe, self._count
            for member, error in self._call("open_source", *arguments).items():
                self._check(member, error)
        drawn = self._call("draw", self._key)
        for member, (_, error) in drawn.items():
            self._check(member, error)
        samples = {member: count for member, (count, _) in drawn.items()}
        if len({*samples.values()}) > 1:
            texts = [f"{n or 'no'} samples on {self._place(m)}" for m, n in samples.items()]
            raise HetpipeError(
                f"mini-batch {self._count} of {self._remote} has {' and '.join(texts)}: the "
                "function must return the same mini-batches on each host"
            )
        (count,) = {*samples.values()}
        if count == END:
            raise StopIteration
        self._count += 1
        return Present(self._key, count)

    def close(self) -> None:
        """Let the workers forget the source."""
        if self._members:
            self._call("close_source", self._key)
            self._members = []

    def _call(self, function: str, *arguments: Any) -> dict[str, Any]:
        return self._crew.call_each(
            f"{_WORKER}:{function}", dict.fromkeys(self._members, arguments)
        )

    def _check(self, member: str, error: str) -> None:
        if error:
            number = f"mini-batch {self._count} of {self._remote}"
            raise HetpipeError(f"{number} on {self._place(member)}: {error}")

    def _place(self, member: str) -> str:
        host = next(m.host for m in self._crew.cluster.members if m.id == member)
        return f"{member} of host {host!r}" if self._crew.cluster.connections else member
