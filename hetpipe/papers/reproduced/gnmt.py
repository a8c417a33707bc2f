"""GNMT-L, which is GNMT with L LSTM layers, and the most layers that devices can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.pipedream_profile import ChainCosts, read_profile
from hetpipe.cost.table import CostTable, LayerBytes
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.partition import exact
from hetpipe.study.largest import Method, fits, most, repeated
from hetpipe.study.subject import of_chain

BLOCKS = ("node11", "node37")
"""An LSTM layer of the encoder and one of the decoder in GNMT's profile."""
LAYERS, BATCH = 8, 32
"""The profile's number of LSTM layers and of samples."""
SCHEDULES = {"gpipe": "gpipe", "bapipe": "1f1b-sno"}


class Gnmt:
    """GNMT with L/2 encoder and L/2 decoder layers (BaPipe, section 4.2.2), trained with Adam."""

    def __init__(self, data: Path) -> None:
        path = data / "profiles" / "pipedream" / "gnmt.txt"
        chain = by_weights(read_profile(path).without_inputs().chain())
        self.blocks = [chain.names.index(name) for name in BLOCKS]
        self.subject = of_chain("gnmt", chain, BATCH, BATCH, state_copies=2)

    @property
    def params_nbytes(self) -> float:
        """Bytes of an LSTM layer's parameters, as the mean over encoder and decoder."""
        return sum(layer.params_nbytes for layer in self._block_layers()) / len(self.blocks)

    @property
    def saved_nbytes(self) -> float:
        """Bytes that an LSTM layer saves for 32 samples, as the mean over encoder and decoder."""
        return sum(layer.saved_nbytes for layer in self._block_layers()) / len(self.blocks)

    def params(self, layers: int) -> float:
        """Return the number of parameters with `layers` LSTM layers."""
        table = self.table(_cluster(1), BATCH, layers)
        return sum(layer.params_nbytes for layer in table.layers) / 4

    def table(self, cluster: Cluster, samples: int, layers: int) -> CostTable:
        """Return the costs with `layers` LSTM layers, at micro-batches of `samples`."""
        table = self.subject.costs(cluster, [samples])[samples]
        for block in reversed(self.blocks):  # from the end, so that `self.blocks` stay valid
            table = repeated(table, block, block, 1 + (layers - LAYERS) // 2)
        return table

    def largest(self, method: str) -> list[int]:
        """Return the most LSTM layers on 1, 2, 4 and 8 devices.

        `method` is "dp" (data parallelism), "pipedream" (with stages balanced by time), "gpipe" or
        "bapipe". A single device trains without a pipeline.
        """
        return [self._largest(method, devices) for devices in (1, 2, 4, 8)]

    def _largest(self, method: str, devices: int) -> int:
        cluster = _cluster(devices)
        if devices == 1 or method == "dp":
            training, samples, count = Method("data-parallel"), BATCH, 1
        elif method == "pipedream":
            training, samples, count = Method("pipedream", "stash"), BATCH, 1
        else:
            training, samples, count = Method(SCHEDULES[method]), BATCH // 2, 2 * devices

        def holds(pairs: int) -> bool:
            table = self.table(cluster, samples, LAYERS - 2 + 2 * pairs)
            even = even_cuts(table, cluster.ids) if method == "pipedream" else None
            return fits(table, cluster.ids, training, count, even)

        return LAYERS - 2 + 2 * most(holds)

    def _block_layers(self) -> list[LayerBytes]:
        layers = self.table(_cluster(1), BATCH, LAYERS).layers
        return [layers[block] for block in self.blocks]


def by_weights(chain: ChainCosts) -> ChainCosts:
    """Merge each layer without parameters into the layer before it, or at the start, after it."""
    starts = [n for n, nbytes in enumerate(chain.params_nbytes) if nbytes]
    ends = [*starts[1:], len(chain.names)]
    spans = [slice(lo, hi) for lo, hi in zip([0, *starts[1:]], ends, strict=True)]
    return ChainCosts(
        names=tuple(chain.names[start] for start in starts),
        forward_s=tuple(sum(chain.forward_s[span]) for span in spans),
        backward_s=tuple(sum(chain.backward_s[span]) for span in spans),
        activation_nbytes=tuple(sum(chain.activation_nbytes[span]) for span in spans),
        params_nbytes=tuple(sum(chain.params_nbytes[span]) for span in spans),
        cut_nbytes=tuple(chain.cut_nbytes[end - 1] for end in ends),
    )


def even_cuts(table: CostTable, members: Sequence[str]) -> tuple[int, ...]:
    """Return the cuts whose slowest stage is quickest, even if a stage does not fit in memory."""
    costs = StageCosts(table)
    matrices = [costs.matrix(members, n, 1, "max", bounded=False) for n in range(len(members))]
    cuts = exact(matrices)
    assert cuts is not None  # without bounds every partition is possible
    return cuts


def _cluster(devices: int) -> Cluster:
    cluster = Cluster.published("bapipe-8-v100")
    return replace(cluster, members=cluster.members[:devices])
