"""The serialised form of a graph: an exact inverse, stable bytes, and errors for damage."""

from __future__ import annotations

import functools
import random
import struct
import zlib
from collections.abc import Iterator

import pytest
import torch
from models import CASES
from torch import fx, nn

from hetpipe.capture import capture
from hetpipe.errors import BackendError
from hetpipe.optim import adam
from hetpipe.sdk.formats.serialised import MOST_DEPTH, serialise
from hetpipe.sdk.formats.serialised_reader import deserialise
from hetpipe.sdk.graph import canonical, core_decompositions, graph_inputs, graph_rows

aten = torch.ops.aten


@functools.cache
def graphs() -> list[fx.GraphModule]:
    """Return forward, backward and update of models that use most kinds of argument and result."""
    graphs = []
    for case in CASES.values():
        torch.manual_seed(0)
        batch = case.batch(torch.Generator().manual_seed(0))
        captured = capture(case.model(), case.loss_fn, batch)
        table = core_decompositions()
        (stage,) = captured.stage_graphs([], [table], [case.mini_batch], adam(lr=1e-3))
        passes = stage.passes[case.mini_batch]
        graphs += [p.graph for p in (passes.forward, passes.backward, stage.update) if p]
    return graphs


def small() -> fx.GraphModule:
    """Return a graph with every kind of node and of argument."""
    graph = fx.Graph()
    x, index = graph.placeholder("x"), graph.placeholder("index")
    unused = graph.placeholder("getitem")  # the engine's name for a tensor saved by a forward
    unused.meta["val"] = torch.empty(0, device="meta")
    x.meta |= {"val": torch.empty(2, 3, device="meta"), "steady": True}
    index.meta["val"] = torch.empty(2, dtype=torch.int64, device="meta")
    index.meta["checked"] = (0, 3, -100)
    cast = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})
    cast.meta |= {"val": torch.empty(2, 3, dtype=torch.float64, device="meta"), "layer": "fc.0"}
    pair = graph.call_function(aten.max.dim, (x, 1, True))
    pair.meta["val"] = (
        torch.empty(2, 1, device="meta"),
        torch.empty(2, 1, dtype=torch.int64, device="meta"),
    )
    item = graph.call_function(torch.ops.aten.div.Tensor_mode, (x, x), {"rounding_mode": "floor"})
    item.meta["val"] = x.meta["val"]
    first = graph.call_function(__import__("operator").getitem, (pair, 0))
    first.meta["val"] = pair.meta["val"][0]
    put = graph.call_function(aten.index.Tensor, (x, [None, index]))
    put.meta["val"] = torch.empty(2, 2, device="meta")
    scaled = graph.call_function(aten.mul.Scalar, (put, float("-inf")))
    scaled.meta["val"] = put.meta["val"]
    graph.output((cast, first, item, scaled, x, x))
    return canonical(fx.GraphModule(nn.Module(), graph))


def with_checksum(data: bytes) -> bytes:
    """Return damaged bytes with a correct length and checksum."""
    head = data[:12] + struct.pack("<II", len(data), zlib.crc32(data[20:]))
    return head + data[20:]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3 * len(CASES)))
def test_captured_graphs_are_read_back_unchanged(number: int) -> None:
    graph = graphs()[number]
    back = deserialise(serialise(graph))
    assert graph_rows(back) == graph_rows(canonical(graph))
    assert serialise(back) == serialise(graph)


def test_every_kind_of_node_and_argument_comes_back() -> None:
    back = deserialise(serialise(small()))
    assert graph_rows(back) == graph_rows(small())
    x, index, _ = graph_inputs(back)
    assert x.meta["steady"]
    assert index.meta["checked"] == (0, 3, -100)


def test_the_bytes_match_the_documentation() -> None:
    """A change of these bytes needs a new version of the form."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.create_node("call_function", aten.relu.default, (x,), name="y")
    x.meta["val"] = y.meta["val"] = torch.empty(2, device="meta")
    graph.output((y,))
    strings = b"x\0y\0aten.relu.default\0output\0"
    none = struct.pack("<I", 0xFFFFFFFF)
    form = struct.pack("<BBq", 1, 1, 2)
    nodes = struct.pack("<BI", 1, 0) + none + b"\0" + form
    nodes += struct.pack("<BI", 2, 1) + none + struct.pack("<II", 2, 1)
    nodes += struct.pack("<BI", 6, 0) + struct.pack("<IB", 0, 0) + form
    nodes += struct.pack("<BI", 4, 3) + none + struct.pack("<II", 1, 1)
    body = struct.pack("<III", 4, len(strings), 3) + strings + nodes
    head = struct.pack("<8sIII", b"HETGRAPH", 1, 20 + len(body), zlib.crc32(body))
    assert serialise(canonical(graph)) == head + body


def damages(data: bytes) -> Iterator[bytes]:
    """Yield every truncation, every flipped bit, and meaningless bytes."""
    yield from (data[:end] for end in range(len(data)))
    for place in range(len(data)):
        for bit in range(8):
            yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
    yield from (data + b"\0", b"\0" * 100, b"")


def test_every_damage_is_an_error() -> None:
    data = serialise(small())
    for damaged in damages(data):
        with pytest.raises(BackendError):
            deserialise(damaged)


def test_damage_with_a_correct_checksum_is_an_error_or_another_graph() -> None:
    """Damage as a foreign writer could make: no other exception, no hang, no huge allocation."""
    data, generator = serialise(small()), random.Random(0)
    accepted = 0
    for _ in range(4000):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            width = generator.choice([1, 1, 4, 8])
            place = generator.randrange(8, len(damaged) - width)
            value = generator.choice([0, 1, 255, generator.randrange(256)])
            damaged[place : place + width] = bytes([value] * width)
        if generator.random() < 0.2:
            del damaged[generator.randrange(32, len(damaged)) :]
        try:
            graph = deserialise(with_checksum(bytes(damaged)))
        except BackendError:
            continue
        accepted += 1
        assert serialise(deserialise(serialise(graph))) == serialise(graph)
    assert 0 < accepted < 4000


def with_name(old: str, new: str) -> bytes:
    assert len(old) == len(new)
    return with_checksum(serialise(small()).replace(old.encode(), new.encode()))


@pytest.mark.parametrize(
    ("old", "new"),
    [("aten.mul.Scalar", "aten.mul.Scaler"), ("aten.mul.Scalar", "aten.mule.Tenso"),
     ("aten.mul.Scalar", "nowhere.mul.abc"), ("aten.mul.Scalar", "aten.mul._schem")],
)  # fmt: skip
def test_an_unknown_operator_is_an_error_by_name(old: str, new: str) -> None:
    with pytest.raises(BackendError, match=f"{new!r}.*no operator"):
        deserialise(with_name(old, new))


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(BackendError, match=r"Tensor_mode has no argument 'rounding_mood'"):
        deserialise(with_name("rounding_mode", "rounding_mood"))


def test_an_invalid_name_is_refused() -> None:
    with pytest.raises(BackendError, match=r"has the name 'ind\(x'"):
        deserialise(with_name("index\0", "ind(x\0"))


def test_another_version_is_refused() -> None:
    data = bytearray(serialise(small()))
    data[8] = 2
    with pytest.raises(BackendError, match=r"version 2 of the serialised form.* reads 1"):
        deserialise(bytes(data))


def test_unsupported_values_are_refused() -> None:
    def graph_with(*args: object) -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(aten.mul.Scalar, (x, *args))
        x.meta["val"] = y.meta["val"] = torch.empty(2, device="meta")
        graph.output((y,))
        return graph

    nested: object = 1
    for _ in range(MOST_DEPTH + 1):
        nested = [nested]
    for value, message in ((1 << 63, "64 bits"), (1j, "complex"), (nested, "deeper"),
                           ("\0", "zero byte"), (torch.complex64, "complex64")):  # fmt: skip
        with pytest.raises(BackendError, match=message):
            serialise(graph_with(value))
