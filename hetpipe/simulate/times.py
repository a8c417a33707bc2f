"""StageTimes: the costs of a pipeline's passes and transfers; the input of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Message, Op


class Transfer(NamedTuple):
    """One message on an edge: it holds the edge for `occupancy_s`, and arrives `latency_s` after
    that.

    `media` are the names of media that the message shares with messages on other edges: a bus, a
    half-duplex link, the link of a device into a switch. `occupancy_s` is the time of a message
    that is alone on its media.
    """

    latency_s: float = 0.0
    occupancy_s: float = 0.0
    media: tuple[str, ...] = ()


FREE = Transfer()


def ring_s(replicas: int, nbytes: int, latency_s: float, bandwidth_Bps: float) -> float:
    """Return the seconds in which a ring sums `nbytes` over r replicas: 2 (r - 1) (latency + nbytes
    / (r bandwidth)). Raises `ScheduleError` for impossible numbers."""
    if replicas < 1 or bandwidth_Bps <= 0:
        raise ScheduleError(
            f"a ring of {replicas} replicas at {bandwidth_Bps} bytes/s: give 1 replica or more, "
            "and more than 0 bytes/s"
        )
    return 2 * (replicas - 1) * (latency_s + nbytes / (replicas * bandwidth_Bps))


@dataclass(frozen=True)
class StageTimes:
    """Seconds per stage for one micro-batch, and per cut (stage n to n+1) for one transfer.

    `input_s` and `weight_s` are the two halves of a backward, in zero-bubble schedules. `chunks` is
    BaPipe's execution model (section 3.2): with 1, a stage sends the result of a pass after the
    pass (synchronous); with n, it sends n equal chunks, each right after the chunk's computation
    (asynchronous); with `math.inf`, the chunks are infinitely small. `tied` has the transfers of
    shared gradients or parameters, by (source stage, target stage). A transfer without an entry is
    free.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...] = ()  # empty: free
    forward_links: tuple[Transfer, ...] = ()  # empty: free
    backward_links: tuple[Transfer, ...] = ()
    tied: Mapping[tuple[int, int], Transfer] = field(default_factory=dict)
    step_overhead_s: float = 0.0
    input_s: tuple[float, ...] = ()  # empty: half of backward_s
    weight_s: tuple[float, ...] = ()  # empty: the other half
    chunks: tuple[float, ...] = ()  # empty: 1
    all_reduce_s: tuple[float, ...] = ()  # empty: free
    gradient_links: tuple[Transfer, ...] = ()  # between replicas of a stage; empty: free
    loss_s: float = 0.0  # from the last forward to the first backward, for a loss of all outputs
    sums: tuple[Transfer, ...] = ()  # sums over replicas; give these or `all_reduce_s`, not both

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        lengths = {
            "backward_s": (len(self.backward_s), stages),
            "update_s": (len(self.update_s) or stages, stages),
            "input_s": (len(self.input_s) or stages, stages),
            "weight_s": (len(self.weight_s) or stages, stages),
            "chunks": (len(self.chunks) or stages, stages),
            "all_reduce_s": (len(self.all_reduce_s) or stages, stages),
            "gradient_links": (len(self.gradient_links) or stages, stages),
            "sums": (len(self.sums) or stages, stages),
            "forward_links": (len(self.forward_links) or stages - 1, stages - 1),
            "backward_links": (len(self.backward_links) or stages - 1, stages - 1),
        }
        for name, (count, needed) in lengths.items():
            if count != needed:
                raise ScheduleError(f"{name} has {count} entries, {stages} stages need {needed}")
        if min(self.chunks, default=1) < 1:
            raise ScheduleError(f"chunks {list(self.chunks)}: each must be 1 or more")
        if self.sums and self.all_reduce_s:
            raise ScheduleError("sums and all_reduce_s price the same sums: give one of them")

    @property
    def shares_media(self) -> bool:
        """Whether any message or sum uses a medium that other messages may use."""
        links = *self.forward_links, *self.backward_links, *self.gradient_links
        return any(each.media for each in (*links, *self.tied.values(), *self.sums))

    def compute_s(self, action: Action) -> float:
        """Return the seconds of a pass, sum or update that is alone on its device or media, or of
        the wait for a loss."""
        stage, op = action.stage, action.op
        if op is Op.FORWARD:
            return self.forward_s[stage]
        if op is Op.BACKWARD:
            return self.backward_s[stage]
        if op is Op.BACKWARD_INPUT:
            return self.input_s[stage] if self.input_s else self.backward_s[stage] / 2
        if op is Op.BACKWARD_WEIGHT:
            return self.weight_s[stage] if self.weight_s else self.backward_s[stage] / 2
        if op is Op.LOSS:
            return self.loss_s
        if op is Op.ALL_REDUCE:
            transfer = self.sum_of(stage)
            return transfer.latency_s + transfer.occupancy_s
        return self.update_s[stage] if self.update_s else 0.0

    def sum_of(self, stage: int) -> Transfer:
        """Return the cost of a sum over the stage's replicas."""
        if self.sums:
            return self.sums[stage]
        return Transfer(0.0, self.all_reduce_s[stage]) if self.all_reduce_s else FREE

    def transfer(self, message: Message) -> Transfer:
        """Return the cost of a message on its edge."""
        if message.kind == "F":
            return self.forward_links[message.source] if self.forward_links else FREE
        if message.kind == "B":
            return self.backward_links[message.target] if self.backward_links else FREE
        if message.kind == "A":
            return self.gradient_links[message.source] if self.gradient_links else FREE
        return self.tied.get((message.source, message.target), FREE)
