"""BaPipe's table 6: ResNet-50 on FPGA boards, as a pipeline and in data parallelism.

The shapes come from PipeDream's profile of ResNet-50; numbers have 16 bits. Only convolutions and
the linear layer are counted, with three products of equal size: forward, gradient of the input, and
gradient of the weights. The first layer needs no gradient of its input. Other layers work on the
same streams and take no extra time. Updates are not counted.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import link_costs
from hetpipe.cost.board import Board, board
from hetpipe.cost.fpga import MEMORY_SHARE, LayerShape, Rates, stage_s, throughput
from hetpipe.cost.pipedream_profile import ProfileNode, read_profile
from hetpipe.division import divide_samples
from hetpipe.papers.reproduced.table import Figure, expected
from hetpipe.schedule.generators import generate
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer, ring_s

CLUSTERS = {
    "4 vcu118": "bapipe-4-vcu118",
    "2 vcu129 + 2 vcu118": "bapipe-2-vcu129-2-vcu118",
    "4 vcu129": "bapipe-4-vcu129",
}
"""The published cluster of each row."""
PROFILED = 128
"""Samples per micro-batch of the profile, whose numbers have 4 bytes."""
NBYTES, DTYPE = 2, "float16"
MINI_BATCH = 128
"""Samples of a mini-batch; each sample is a micro-batch."""
SLICES = 8
"""Slices of a layer's output channels; a cut may separate two slices (BaPipe, section 3.3.2)."""
PRECISION = 1e-4
"""The search for cuts ends when the slowest stage's time has this relative precision."""
IMAGE = 3 * 224 * 224
_CONVOLUTION = re.compile(r"Conv2d\((\d+), (\d+), kernel_size=\((\d+), (\d+)\)")
_LINEAR = re.compile(r"Linear\(in_features=(\d+), out_features=(\d+)")


@dataclass(frozen=True)
class Assumption:
    """An assumption about the share of a board that a design uses.

    `efficiency` is the share of cycles in which the DSPs work; None means the value in the board's
    file. `memory_share` is the share of the memory's bandwidth.
    """

    name: str
    efficiency: float | None
    memory_share: float

    def rates(self, of: Board) -> Rates:
        """Return the rates at which a board computes layers."""
        assert of.fabric is not None  # the clusters have only FPGAs
        efficiency = of.fabric.efficiency if self.efficiency is None else self.efficiency
        return Rates(
            throughput(of.fabric, DTYPE, of.fabric.usable * efficiency),
            of.memory_Bps * self.memory_share,
            of.fabric.on_chip_nbytes,
        )


IDEAL = Assumption("all cycles useful", 1.0, 1.0)
CALIBRATED = Assumption("as measured products", None, MEMORY_SHARE)


@dataclass(frozen=True)
class Network:
    """The layers of a network for one sample; `cut_nbytes[n]` crosses a cut before layer n."""

    layers: tuple[LayerShape, ...]
    cut_nbytes: tuple[float, ...]

    @property
    def params_nbytes(self) -> float:
        """Bytes of all weights."""
        return sum(layer.params_nbytes for layer in self.layers)

    def sliced(self, count: int) -> Network:
        """Return the network with each layer cut into `count` slices of its output channels.

        At a cut inside a layer, the layer's input and the finished part of its output cross. The
        input is kept only once: each slice keeps a part of it.
        """
        layers = [
            LayerShape(*(value / count for value in vars(layer).values()))
            for layer in self.layers
            for _ in range(count)
        ]
        following = [*self.cut_nbytes[1:], 0.0]
        cuts = [
            before + part * after / count
            for before, after in zip(self.cut_nbytes, following, strict=True)
            for part in range(count)
        ]
        return Network(tuple(layers), tuple(cuts))


@dataclass(frozen=True)
class Speedup:
    """Seconds of a mini-batch on a cluster, in a pipeline and in data parallelism.

    Data parallelism divides the samples by the boards' speeds (`by_speed_s`) or evenly
    (`evenly_s`).
    """

    pipeline_s: float
    by_speed_s: float
    evenly_s: float

    @property
    def by_speed(self) -> float:
        """The pipeline's speed-up over data parallelism that divides samples by speed."""
        return self.by_speed_s / self.pipeline_s

    @property
    def evenly(self) -> float:
        """The pipeline's speed-up over data parallelism that divides samples evenly."""
        return self.evenly_s / self.pipeline_s


def table6(data: Path) -> tuple[str, list[Figure]]:
    """Return title and rows of table 6; `data` is the folder of published profiles and figures."""
    figures = expected(data, "bapipe")["resnet50_batch_time_speedup_over_dp"]
    network = resnet50(data)
    rows = []
    for key, figure in figures.items():
        cluster = Cluster.published(CLUSTERS[key])
        by = {each.name: speedup(network, cluster, each) for each in (IDEAL, CALIBRATED)}
        ours = ", ".join(f"{name} {each.by_speed:.2f}x" for name, each in by.items())
        note = "weights on the chip cause the gain, which grows with the speed of the DSPs"
        if len({member.board for member in cluster.members}) > 1:
            other = replace(cluster, members=cluster.members[::-1])
            turned = [speedup(network, other, each).by_speed for each in (IDEAL, CALIBRATED)]
            whole = speedup(network, cluster, IDEAL, slices=1).by_speed
            note = (
                f"with the smaller boards first {turned[0]:.2f}x and {turned[1]:.2f}x, with cuts "
                f"only between whole layers {whole:.2f}x. Our data parallelism divides the samples "
                "by speed; with an even division it waits for the smaller boards, and the pipeline "
                f"gains {by[IDEAL.name].evenly:.2f}x. A balanced pipeline lies near the harmonic "
                "mean of the rows with equal boards, so the paper's stages are not balanced"
            )
        rows.append(Figure(key, f"{figure:.2f}x", ours, note))
    return (
        "Speed-up of FBP-AS over data parallelism, ResNet-50 in float16, 128 samples one at a "
        "time. A pipeline's stages keep weights, gradients and features on the chip as far as they "
        "fit; data parallelism streams weights and gradients through the memory, layer by layer, "
        "and sums gradients in a ring. The paper gives neither clock nor efficiency, so there are "
        f"two assumptions: '{IDEAL.name}' (every usable DSP works in every cycle, the memory has "
        f"its data sheet's rate) and '{CALIBRATED.name}' (both have the rates of our measured "
        "matrix products)",
        rows,
    )


def resnet50(data: Path) -> Network:
    """Return ResNet-50 from the node descriptions of PipeDream's profile."""
    profile = read_profile(data / "profiles" / "pipedream" / "resnet50.txt").without_inputs()
    chain = profile.chain()
    by_name = {node.name: node for node in profile.nodes}
    writer_of = {reader: writer for writer, reader in profile.edges}
    layers: list[LayerShape] = []
    cuts: list[float] = []
    for place, name in enumerate(chain.names):
        node = by_name[name]
        weights, operations = _weights_and_operations(node)
        if not weights:
            continue
        inputs = _numbers(by_name[writer_of[name]]) if name in writer_of else IMAGE
        backward = 2 * operations if layers else operations  # the first needs no input gradient
        layers.append(LayerShape(operations, backward, weights * NBYTES, inputs * NBYTES))
        cuts.append(chain.cut_nbytes[place - 1] * NBYTES / 4 / PROFILED if place else 0.0)
    return Network(tuple(layers), tuple(cuts))


def _weights_and_operations(node: ProfileNode) -> tuple[int, float]:
    """Return a node's number of weights, and the operations of one product per sample.

    Both are 0 if the node is neither a convolution nor a linear layer.
    """
    if convolution := _CONVOLUTION.match(node.description):
        inputs, outputs, height, width = map(int, convolution.groups())
        filter_size = inputs * height * width
        return outputs * filter_size, 2 * _numbers(node) * filter_size
    if linear := _LINEAR.match(node.description):
        weights = int(linear[1]) * int(linear[2])
        return weights, 2.0 * weights
    return 0, 0.0


def _numbers(node: ProfileNode) -> float:
    """Return how many numbers the output of a node has for one sample."""
    return node.activation_nbytes / 4 / PROFILED


def speedup(
    network: Network, cluster: Cluster, assumption: Assumption, slices: int = SLICES
) -> Speedup:
    """Return the times of a mini-batch on a chain of boards, with each layer in `slices` slices."""
    rates = [assumption.rates(board(member.board)) for member in cluster.members]
    links = link_costs(cluster)
    between = [links[pair] for pair in zip(cluster.ids, cluster.ids[1:], strict=False)]
    sliced = network.sliced(slices)
    cuts = balanced(sliced.layers, rates)
    ends = [0, *cuts, len(sliced.layers)]
    passes = [
        stage_s(sliced.layers[lo:hi], each, in_flight(stage, len(rates)))
        for stage, (lo, hi, each) in enumerate(zip(ends, ends[1:], rates, strict=False))
    ]
    hops = tuple(
        Transfer(link.latency_s, sliced.cut_nbytes[cut] / link.bandwidth_Bps)
        for cut, link in zip(cuts, between, strict=True)
    )
    forward_s, backward_s = zip(*passes, strict=True)
    chunks = (math.inf,) * len(rates)
    times = StageTimes(forward_s, backward_s, (), hops, hops, chunks=chunks)
    pipeline_s = simulate(generate("fbp", len(rates), MINI_BATCH), times).step_s

    samples_s = [sum(stage_s(network.layers, each, 1, weights_on_chip=False)) for each in rates]
    slowest = min(link.bandwidth_Bps for link in between)
    sum_s = ring_s(len(rates), round(network.params_nbytes), 0.0, slowest)
    by_speed = divide_samples(MINI_BATCH, [1 / each_s for each_s in samples_s])
    busy_s = max(count * each_s for count, each_s in zip(by_speed, samples_s, strict=True))
    evenly_s = MINI_BATCH / len(rates) * max(samples_s)
    return Speedup(pipeline_s, busy_s + sum_s, evenly_s + sum_s)


def in_flight(stage: int, stages: int) -> int:
    """Return how many micro-batches a stage of FBP-AS keeps (BaPipe, table 1)."""
    return 2 * (stages - stage)


def balanced(layers: Sequence[LayerShape], rates: Sequence[Rates]) -> tuple[int, ...]:
    """Return the cuts whose slowest stage is quickest, by bisection to a relative `PRECISION`.

    The bisection tries times. Each stage takes as many layers as it can compute in the tried time.
    A stage's time is not the sum of its layers' times, because the layers share the chip.
    """
    depth = in_flight(0, len(rates))
    shortest_s, longest_s = 0.0, max(sum(stage_s(layers, each, depth)) for each in rates)
    cuts = _filled(layers, rates, longest_s)
    while longest_s - shortest_s > PRECISION * longest_s:
        limit_s = (shortest_s + longest_s) / 2
        trial = _filled(layers, rates, limit_s)
        if trial is None:
            shortest_s = limit_s
        else:
            cuts, longest_s = trial, limit_s
    assert cuts is not None  # the longest time allows all layers on any board
    return cuts


def _filled(
    layers: Sequence[LayerShape], rates: Sequence[Rates], limit_s: float
) -> tuple[int, ...] | None:
    """Return cuts into non-empty stages of `limit_s` or less; None if there are no such cuts."""
    cuts = [0]
    for stage, each in enumerate(rates):
        taken = _taken(layers[cuts[-1] :], each, in_flight(stage, len(rates)), limit_s)
        rest = len(rates) - 1 - stage
        taken = min(taken, len(layers) - rest - cuts[-1])
        if not taken:
            return None
        cuts.append(cuts[-1] + taken)
    return tuple(cuts[1:-1]) if cuts[-1] == len(layers) else None


def _taken(layers: Sequence[LayerShape], rates: Rates, depth: int, limit_s: float) -> int:
    """Return how many of the first layers a stage can compute within a time."""

    def seconds(count: int) -> float:
        return sum(stage_s(layers[:count], rates, depth))

    return bisect_right(range(1, len(layers) + 1), limit_s, key=seconds)
