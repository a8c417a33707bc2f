"""The started workers of a cluster, one per member, with their devices open."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.parts import with_speed
from hetpipe.cost.loss import Label
from hetpipe.crew.feeding import Feeding
from hetpipe.crew.launcher import Launched, Timing, launch
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host.references import operator_origins
from hetpipe.sdk.info import DeviceInfo
from hetpipe.wire import messages as say
from hetpipe.worker.emulation import Emulation

if TYPE_CHECKING:
    from typing_extensions import Self

    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import StageGraphs


COPY_S = 600.0
"""Seconds without a value of an awaited copy after which the workers that copy are lost."""


class Workers:
    """Workers with their devices open. A context manager; no process outlives `close`.

    The first failure of a worker ends all workers. The present call and every later call raise it
    as `WorkerError`.
    """

    def __init__(self, cluster: Cluster, launched: Launched, start_timeout_s: float) -> None:
        self._fleet, self._control = launched
        self._close = weakref.finalize(self, self._fleet.close)
        self.cluster = cluster
        self.feeding = Feeding(cluster, lambda m, feed: self._fleet.send(self._index[m], feed))
        self._index = {member.id: i for i, member in enumerate(cluster.members)}
        self._opened: dict[str, DeviceInfo] | None = None
        # Calls whose replies are still to come.
        self._pending_calls: deque[Callable[[], object]] = deque()
        self._start_timeout_s = start_timeout_s

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        *,
        heartbeat_s: float = 1.0,
        silence_s: float = 4.0,
        start_timeout_s: float = 120.0,
        wait: bool = True,
    ) -> Self:
        """Start one worker per member and open its device.

        Without `wait` the first use waits for the start. A worker that gives no sign of life for
        `silence_s` counts as dead. Raises `BackendError` for a missing device, `HetpipeError` for a
        backend that no process can import, `WorkerError` if a worker does not start.
        """
        launched = launch(cluster, Timing(heartbeat_s, silence_s, start_timeout_s))
        workers = cls(cluster, launched, start_timeout_s)
        if wait:
            workers._await_devices()
        return workers

    @property
    def have_replied(self) -> bool:
        """Whether all devices are open, and all workers have done the calls that were begun with
        all of them. Never waits. Raises the error of a start or a call that failed."""
        self._control.check()
        return self._control.has_replies((self._opened is None) + len(self._pending_calls))

    @property
    def infos(self) -> dict[str, DeviceInfo]:
        """The open devices, by member."""
        self._await_devices()
        assert self._opened is not None
        return self._opened

    @property
    def label(self) -> Label:
        """The label of speeds that are measured with all members."""
        emulated = any(self.label_of(m) == "emulated" for m in self.cluster.members)
        links = any(self.cluster.emulated_link(*pair) for pair in self.cluster.links)
        return "emulated" if emulated or links else "measured"

    def label_of(self, member: Member) -> Label:
        """Return the label of speeds of this member."""
        emulated = member.speed != 1.0 or self.infos[member.id].capabilities.emulated
        return "emulated" if emulated else "measured"

    @property
    def emulations(self) -> dict[str, Emulation]:
        """The emulated speeds, by member."""
        sharing = self.cluster.members_sharing_cores
        return {
            m.id: Emulation(m.speed, m.id in sharing and self.infos[m.id].on_cores)
            for m in self.cluster.members
        }

    def call(self, members: Sequence[str], function: str, *args: Any) -> list[Any]:
        """Run `module:function` as `function(device, *args)` on these workers at the same time.

        Return the results in the order of `members`; arguments and results must pickle. Emulated
        speeds do not apply.
        """
        return list(self.call_each(function, dict.fromkeys(members, args)).values())

    def call_each(self, function: str, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Do the same as `call`, with `arguments` for each member; return results by member."""
        return self.begin_each(function, arguments)()

    def begin_each(
        self, function: str, arguments: Mapping[str, Sequence[Any]]
    ) -> Callable[[], dict[str, Any]]:
        """Begin `call_each`, and return a function that waits for its results.

        The workers may still be starting. Later requests to the workers wait for these calls. If
        the workers are threads of this process, `begin_each` itself waits for the results, because
        calls and a trace on this thread would share torch's global state.
        """
        workers = [self._worker(member) for member in arguments]
        with self._sending():
            for worker, args in zip(workers, arguments.values(), strict=True):
                self._fleet.send(worker, say.Call(function, tuple(args)))
        results: dict[str, Any] = {}

        def receive() -> None:
            results.update(zip(arguments, self._control.gather(workers), strict=True))

        def finish() -> dict[str, Any]:
            with self._conversation():  # receives the replies of all calls, in their order
                return results

        self._pending_calls.append(receive)
        if not self._fleet.apart:
            finish()
        return finish

    def compiles_ahead(self, member: str) -> bool:
        """Return whether a member gains from `compile_ahead`."""
        return self._fleet.apart and self.infos[member].capabilities.compiles_ahead

    def compile_ahead(self, stages: Mapping[str, Sequence[StageGraphs]]) -> None:
        """Let members begin to compile stages. Members that cannot compile ahead do nothing."""
        able = {
            member: (stage_list,)
            for member, stage_list in stages.items()
            if self.compiles_ahead(member)
        }
        self.begin_each("hetpipe.worker.divided:compile_ahead", able)

    def set_speed(self, member: str, speed: float) -> None:
        """Emulate another speed on a member from its next action on, even while a step runs.

        The crew's `cluster` has the new speed afterwards. Raises `ClusterError` for a speed above
        1, or not above 0.
        """
        worker = self._worker(member)
        self.cluster = with_speed(self.cluster, member, speed)
        self._control.check()
        with self._sending():  # no reply comes, so another thread may wait for replies
            self._fleet.send(worker, say.Speed(speed))

    @property
    def clock_error_s(self) -> float:
        """The greatest error, in seconds, of times from other hosts; 0 without other hosts."""
        hosts = self.cluster.connections
        return 0.0 if hosts is None else hosts.clock_error_s

    def check(self) -> None:
        """Raise `WorkerError` if a worker has failed."""
        self._control.check()

    def check_copying(self, silent_s: float) -> None:
        """Raise `WorkerError` if a worker has failed, or if no value of a copy has come for
        `COPY_S`: then the workers that copy are lost."""
        control = self._control
        control.check()
        if silent_s > COPY_S:
            workers = range(len(self.cluster.members))
            control.fail(
                f"no copied value has come for {COPY_S:.0f} s, so all workers are ended: "
                f"{control.describe(workers)}",
                lost=[worker for worker in workers if control.doing_of(worker) == "copy"],
            )
            control.check()

    def be_quiet(self) -> None:
        """Do not warn of a failure at once; the next use raises it anyway."""
        self._control.quiet = True

    @property
    def lost(self) -> list[str]:
        """The members whose loss has ended the crew; none if it ended for another reason."""
        return [self.cluster.members[worker].id for worker in sorted(self._control.lost)]

    @property
    def raised(self) -> bool:
        """Whether an open device's worker reported an error; it has not just ended."""
        return self._opened is not None and self._control.raised

    def close(self) -> None:
        """End all workers; safe to call twice. Does nothing in a fork of the process."""
        self._end("these workers are closed: make another pipeline, or start another crew")

    def _end(self, reason: str) -> None:
        if self._control.owns:
            self._close()
            self._control.end(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise HetpipeError(
            "a crew cannot be pickled or copied, since its workers are processes or threads: start "
            "another crew"
        )

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        """Talk to the workers, after all calls that were begun earlier."""
        self._control.check()
        with self._sending():
            self._await_devices()
            while self._pending_calls:
                self._pending_calls.popleft()()
            self._control.check()
            yield

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """End the workers after an error inside, since their replies would no longer match."""
        try:
            yield
        except BaseException as error:
            self._end(f"the crew is closed: {type(error).__name__} broke off a call")
            raise

    def _await_devices(self) -> None:
        """Receive the first reply of every worker, once."""
        if self._opened is None:
            try:
                opened = self._control.gather(list(self._index.values()), self._start_timeout_s)
            except BaseException:
                self.close()
                raise
            self._opened = {
                member.id: _placed(info, member.machine)
                for member, info in zip(self.cluster.members, opened, strict=True)
            }

    def _worker(self, member: str) -> int:
        if member not in self._index:
            raise HetpipeError(f"no member {member!r}; the crew has {', '.join(self._index)}")
        return self._index[member]


def _placed(info: DeviceInfo, machine: str) -> DeviceInfo:
    """Return a device's facts with names that are unique among machines."""
    if not machine:
        return info
    address = info.address and f"{info.address}@{machine}"
    return replace(info, memory_domain=f"{info.memory_domain}@{machine}", address=address)


def share_operators(captured: Captured, crew: Workers) -> None:
    """Let all workers import the modules that define the model's custom operators.

    Raises `BackendError` for an operator whose module is unknown.
    """
    layers = captured.layer_graph(captured.samples).layers
    operators = list(dict.fromkeys(name for layer in layers for name in layer.operators))
    if origins := operator_origins(operators):
        function = "hetpipe.sdk.host.references:import_operators"
        crew.call(list(crew.infos), function, operators, origins)
