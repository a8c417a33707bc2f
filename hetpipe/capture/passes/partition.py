"""Divides a joint graph into a forward and a backward, which may use different weights.

A tensor that depends on no sample is never saved: it depends only on parameters, constants,
unchanging buffers or the random counter. The backward recomputes it from the backward's arguments,
and so works with any version of the weights.

A minimum cut in the forward's graph chooses the cheapest tensors to keep. Every tensor is an edge
whose capacity is its bytes. Edges lead from the source to stage inputs and costly operators, and
from the tensors that the backward reads to the sink. The backward gets the tensors of a minimum
cut, and computes from them all nodes between the cut and the sink. torch's own
`min_cut_rematerialization_partition` works in the same way.

`halve` divides a backward into the programs B and W of Qi et al., "Zero bubble pipeline
parallelism" (ICLR 2024), so that the previous stage waits only for B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from hetpipe.capture.passes.joint_graph import Joint
from hetpipe.capture.passes.relu_masks import drop_comparisons
from hetpipe.capture.passes.views import base_of, in_graph_order, keep_bases, saves_nothing
from hetpipe.capture.program import BUFFER, CUT, GRAD, INPUT, SAVED, TANGENT, PassPrograms, Program
from hetpipe.capture.slots import (
    BACKWARD_ORDER,
    FORWARD_ORDER,
    Key,
    is_tensor,
    make_program,
    node_nbytes,
    placeholders,
    sort_by_role,
)
from hetpipe.errors import CaptureError
from hetpipe.sdk.host.parts import dependents, reachable
from hetpipe.sdk.operators.replicas import is_sum
from hetpipe.words import choices

NONE, INPUTS, MIN_CUT = "none", "inputs", "min-cut"
MODES = (NONE, INPUTS, MIN_CUT)
"""`none`: the forward keeps the tensors that autograd reads; the backward repeats almost nothing.

`inputs`: the forward keeps the stage's inputs, and the backward runs the whole forward again (Chen
et al., "Training deep nets with sublinear memory cost", 2016; GPipe keeps stage inputs too).

`min-cut`: the forward keeps as few bytes as possible (kept stage inputs count too), such that the
backward repeats no product, convolution, attention or recurrent layer. Among equal choices it
repeats the least.

In all modes the backward draws the same masks again, sums over replicas are kept, running
statistics change in the forward only, and a repeated forward uses the backward's parameters.
"""


def check_modes(recompute: Sequence[str], stages: int) -> tuple[str, ...]:
    """Return one mode per stage; all `none` if `recompute` is empty. Raises `CaptureError`."""
    modes = tuple(recompute) or (NONE,) * stages
    if len(modes) != stages:
        raise CaptureError(
            f"{len(modes)} recompute modes for {stages} stages; give one per stage, or none at all"
        )
    for mode in modes:
        if mode not in MODES:
            raise CaptureError(f"recompute mode {mode!r} is not known; {choices(mode, MODES)}")
    return modes


aten = torch.ops.aten
_SHAPE_ONLY = {aten.max_pool2d_with_indices_backward.default: 1}
"""For these operators, the index of an argument that is read for its shape alone."""


def partition(
    joint: Joint, samples: int, recompute: str = NONE, halves: bool = False
) -> PassPrograms:
    """Return the forward and backward of a joint graph for micro-batches of `samples`.

    `recompute` is one of `MODES`. With `halves` the backward also comes in two halves. The joint
    graph changes and cannot be used again.
    """
    drop_unread(joint.graph)
    _forget_shapes(joint.graph)
    saved = _tensors_to_save(joint, recompute) if joint.gradients else []
    stage_inputs = {node: key for node, key in joint.inputs.items() if key[0] in (INPUT, CUT)}
    kept = [((SAVED, node.name), node) for node in saved if node not in stage_inputs]
    inputs = [(key, node) for node, key in joint.inputs.items() if key[0] != TANGENT]
    forward = make_program(
        joint.graph, sort_by_role(inputs, FORWARD_ORDER), [*joint.outputs, *kept]
    )
    if not joint.gradients:
        return PassPrograms(samples, forward, None)
    drop_updates(joint.graph)
    accumulators, results = _accumulate(joint)
    arguments = [
        *((key, node) for node, key in joint.inputs.items() if not _is_sample(joint, key)),
        *((stage_inputs[node], node) for node in saved if node in stage_inputs),
        *kept,
        *accumulators,
    ]
    arguments = sort_by_role(arguments, BACKWARD_ORDER)
    backward = make_program(joint.graph, arguments, results)
    divided = halve(joint.graph, arguments, results) if halves else None
    return PassPrograms(samples, forward, backward, divided)


def _is_sample(joint: Joint, key: Key) -> bool:
    """Return whether the input differs between the micro-batches of a step."""
    updated = {name for (role, name), _ in joint.outputs if role == BUFFER}
    return key[0] in (INPUT, CUT) or (key[0] == BUFFER and key[1] in updated)


def _tensors_to_save(joint: Joint, recompute: str) -> list[fx.Node]:
    """Return the sample-dependent tensors that the forward keeps for the backward."""
    samples = {node for node, key in joint.inputs.items() if _is_sample(joint, key)}
    dependent = dependents(joint.graph, samples)
    tangents = {node for node, key in joint.inputs.items() if key[0] == TANGENT}
    forward = dependent - dependents(joint.graph, tangents)
    # The sample-dependent forward tensors that the backward and its recomputation read.
    read = in_graph_order(forward & reachable([node for _, node in joint.gradients], forward))
    if recompute == INPUTS:
        origins = samples | {node for node in joint.graph.nodes if is_sum(node)}
        return in_graph_order(origins & reachable(read, origins, sources))
    if recompute == MIN_CUT:
        return minimum_cut(samples, read, dependent)
    return drop_comparisons(keep_bases(read, joint.inputs), joint.inputs)


def _accumulate(
    joint: Joint,
) -> tuple[list[tuple[Key, fx.Node]], list[tuple[Key, fx.Node]]]:
    """Add each gradient to its accumulator as early as possible; return (accumulators, results)."""
    tangents: list[tuple[Key, fx.Node]] = []
    sums: list[tuple[Key, fx.Node]] = []
    accumulators: list[tuple[Key, fx.Node]] = []
    graph = joint.graph
    first = next(iter(graph.nodes))
    for (role, name), gradient in joint.gradients:
        if role == CUT:
            tangents.append(((TANGENT, name), gradient))
            continue
        with graph.inserting_before(first):
            accumulator = graph.placeholder("grad")
        accumulator.meta["val"] = gradient.meta["val"]
        spot = gradient if gradient.op != "placeholder" else placeholders(graph)[-1]
        with graph.inserting_after(spot):
            total = graph.call_function(aten.add.Tensor, (accumulator, gradient))
        total.meta.update(gradient.meta)
        accumulators.append(((GRAD, name), accumulator))
        sums.append(((GRAD, name), total))
    return accumulators, [*tangents, *sums]


def _forget_shapes(graph: fx.Graph) -> None:
    """Replace operands that are read for their shape alone by zeros, which need not be saved."""
    for node in list(graph.nodes):
        if (index := _SHAPE_ONLY.get(node.target)) is None:
            continue
        value = node.args[index].meta["val"]
        with graph.inserting_before(node):
            zero = graph.call_function(aten.full.default, ((), 0.0), {"dtype": value.dtype})
            wide = graph.call_function(aten.expand.default, (zero, list(value.shape)))
        zero.meta.update(node.meta, val=value.new_empty(()))
        wide.meta.update(node.meta, val=value.new_empty(()).expand(value.shape))
        node.update_arg(index, wide)


Pairs = Sequence[tuple[Key, fx.Node]]


def halve(graph: fx.Graph, arguments: Pairs, results: Pairs) -> tuple[Program, Program]:
    """Return the input half and the weight half of a backward; see `PassPrograms.halves`.

    The input half computes the outgoing TANGENTs, the weight half everything else. An operator that
    yields both kinds of gradient stays in the input half; a convolution becomes two calls.
    """
    tangents = [(key, node) for key, node in results if key[0] == TANGENT]
    sums = [(key, node) for key, node in results if key[0] == GRAD]
    outgoing = {key for key, _ in tangents}
    inputs = {node for _, node in arguments}
    # An outgoing TANGENT replaces an incoming one of the same name, which then becomes SAVED.
    replaced = {node for key, node in arguments if key in outgoing}
    first = _tangent_calls([node for _, node in tangents], inputs) | replaced
    read = _weight_half_reads(graph, arguments, [node for _, node in sums], first)
    kept = inputs - replaced
    saved = [((SAVED, n.name), n) for n in keep_bases(read, inputs) if n not in kept]
    before = [(key, node) for key, node in arguments if key[0] != GRAD]
    after = [*((key, node) for key, node in arguments if node in kept), *saved]
    return (
        make_program(graph, before, [*tangents, *saved]),
        make_program(graph, sort_by_role(after, BACKWARD_ORDER), sums),
    )


def _tangent_calls(tangents: list[fx.Node], inputs: set[fx.Node]) -> set[fx.Node]:
    """Divide convolutions' backwards, then return the calls that compute the tangents."""
    for node in in_graph_order(reachable(tangents, inputs) - inputs):
        if node.target is aten.convolution_backward.default:
            _divide(node)
    calls = {node for node in reachable(tangents, inputs) - inputs if node.op == "call_function"}
    return calls | {user for node in calls if not is_tensor(node) for user in node.users}


def _divide(node: fx.Node) -> None:
    """Divide a convolution's backward: a new call computes the gradients of weight and bias."""
    args: Any = node.args
    *operands, mask = args
    values = node.meta["val"]
    if not any(mask[1:]):
        return
    with node.graph.inserting_after(node):
        weights = node.graph.call_function(
            aten.convolution_backward.default, (*operands, [False, *mask[1:]])
        )
    weights.meta = {**node.meta, "val": (None, *values[1:])}
    node.args = (*operands, [True, False, False])
    node.meta["val"] = (values[0], None, None)
    for user in list(node.users):
        if user.args[1] != 0:
            user.args = (weights, user.args[1])


def _weight_half_reads(
    graph: fx.Graph, arguments: Pairs, sums: list[fx.Node], first: set[fx.Node]
) -> list[fx.Node]:
    """Return the nodes of `first` that the weight half reads and cannot compute from parameters."""
    inputs = {node for _, node in arguments}
    starts = [node for (role, _), node in arguments if role in (INPUT, CUT, SAVED, TANGENT)]
    read = first & dependents(graph, starts)
    return in_graph_order(read & reachable(sums, read | inputs))


_UPDATING = aten._native_batch_norm_legit_functional.default


def _updates(node: fx.Node) -> bool:
    return node.target is _UPDATING and node.args[5] is True


def drop_unread(graph: fx.Graph) -> None:
    """Drop the running statistics from backwards in training, which do not use their values."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            args = list(node.args)
            args[3] = args[4] = None
            node.args = tuple(args)


def sources(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node's results, apart from new running statistics, need."""
    unread = node.args[3:5] if _updates(node) else ()
    return [source for source in node.all_input_nodes if source not in unread]


def drop_updates(graph: fx.Graph) -> None:
    """Drop the update of statistics from norms, for graphs that repeat a forward."""
    for node in graph.nodes:
        if _updates(node):
            node.target = aten._native_batch_norm_legit.no_stats
            node.args = (*node.args[:3], *node.args[5:])
            node.meta["val"] = node.meta["val"][:3]


own = torch.ops.hetpipe
COSTLY = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
        own.attention.default,
        own.masked_attention.default,
        own.lstm.default,
        own.lstm_layer.default,
        own.replica_sum.default,
    }
)
"""Operators that a minimum cut does not repeat."""


def minimum_cut(
    inputs: Collection[fx.Node], needed: Collection[fx.Node], dependent: Collection[fx.Node]
) -> list[fx.Node]:
    """Return the nodes with the fewest bytes from which all of `needed` can be computed again.

    `dependent` are the sample-dependent `inputs` and all nodes computed from them; other nodes cost
    nothing. Among several minimum cuts it chooses the one nearest to `needed`.
    """
    import networkx as nx  # type: ignore[import-untyped]

    network: Any = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    seen, stack = set[fx.Node](), list(needed)
    network.add_edges_from(((node, "out"), "sink") for node in needed)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        network.add_edge((node, "in"), (node, "out"), **_capacity(node))
        if node in inputs or node.target in COSTLY:
            network.add_edge("source", (node, "in"))
        read = [source for source in sources(node) if source in dependent]
        network.add_edges_from(((source, "out"), (node, "in")) for source in read)
        stack += read
    _, (_, behind) = nx.minimum_cut(network, "source", "sink")
    return in_graph_order(n for n in seen if (n, "in") not in behind and (n, "out") in behind)


def _capacity(node: fx.Node) -> dict[str, int]:
    """Return the tensor's bytes; {}, infinite to networkx, for tuples and full-size views."""
    if not is_tensor(node):
        return {}
    base = base_of(node)
    if base is not node and saves_nothing(node, base):
        return {}
    return {"capacity": node_nbytes(node)}
