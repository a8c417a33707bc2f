"""Programs, which capture gives to the workers: every input and output has a role and a name.

A worker never looks inside a graph. It keeps tensors by slot: a program reads the tensors of its
input slots and writes the tensors of its output slots. Tied weights, skips, saved tensors and
optimizer state are ordinary slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetpipe.sdk.info import DTYPE_NBYTES

if TYPE_CHECKING:
    from torch import fx

Decompositions = Mapping[Any, Callable[..., Any]]
"""The operators that a backend wants decomposed, each with the function that replaces it."""

# The roles of a slot.
PARAM = "param"  # a parameter, by the model's name; an update's output is its next version
BUFFER = "buffer"  # a buffer (batch-norm statistics), by the model's name; outputs replace it
CONSTANT = "constant"  # a tensor that never changes, value in StageGraphs.constants
INPUT = "input"  # a leaf of the batch, by name ("x.0", "y", "x.mask"); dimension 0 is the samples
CUT = "cut"  # a tensor that crosses between neighbouring stages, by its node name
LOSS = "loss"  # 0-d, the micro-batch's loss: its mean over samples, or its sum (see COUNT)
OUTPUT = "output"  # a tensor of the model's output in eval mode, by number; first the samples
COUNT = "count"  # 0-d, number of terms in the loss's sum; only if loss_fn returns (sum, count)
SAVED = "saved"  # a tensor that the forward keeps for this micro-batch's backward
TANGENT = "tangent"  # gradient of the CUT tensor (or "loss") of that name
GRAD = "grad"  # gradient accumulator of the parameter of that name
STATE = "state"  # optimizer state, by "STATE/PARAMETER"; see `Optimizer.state`
SCALAR = "scalar"  # 0-d from the controller: "step", "grad_scale", "ahead" and the learning rates,
# see `Optimizer.scalars`; float32, or float64 if a parameter of the stage is float64
NORM = "norm"  # "square", 0-d, dtype of SCALAR: sum of squares of the stage's scaled gradients;
# without a clip, the sum of the gradients
RNG = "rng"  # int64 (3,): seed, mini-batch number, index of the micro-batch's first sample in it


@dataclass(frozen=True)
class Slot:
    """One input or output of a program."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> tuple[str, str]:
        """The slot's key: its role and its name."""
        return (self.role, self.name)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class Program:
    """A canonical graph (see `hetpipe.sdk.graph`) with a slot per placeholder and per output.

    A program can be pickled: its graph becomes the data of `hetpipe.sdk.graph.dump_graph`.
    """

    graph: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def __getstate__(self) -> dict[str, Any]:
        from hetpipe.sdk.graph import dump_graph

        return {"graph": dump_graph(self.graph), "inputs": self.inputs, "outputs": self.outputs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from hetpipe.sdk.graph import load_graph

        object.__setattr__(self, "graph", load_graph(state["graph"]))
        object.__setattr__(self, "inputs", state["inputs"])
        object.__setattr__(self, "outputs", state["outputs"])


@dataclass(frozen=True)
class PassPrograms:
    """The forward and backward of a stage for one micro-batch size.

    forward: PARAM, BUFFER, CONSTANT, INPUT, CUT, RNG -> CUT, LOSS, COUNT, BUFFER, SAVED
    backward: PARAM, BUFFER, CONSTANT, RNG, INPUT, CUT, SAVED, TANGENT, GRAD -> TANGENT, GRAD

    A stage input that the backward reads is an INPUT or CUT of the backward, not SAVED: the worker
    keeps it. No SAVED tensor depends on parameters, constants or RNG alone. So a backward works
    with the parameters among its inputs, whatever their version. The backward is None if nothing
    has a gradient.

    halves: the backward as two programs, if they were requested and there is a backward:
    input half: the backward's inputs without GRAD -> TANGENT, SAVED
    weight half: PARAM, BUFFER, CONSTANT, RNG, INPUT, CUT, SAVED, TANGENT, GRAD -> GRAD

    Together they compute the backward. Tensors go from the input half to the weight half as SAVED,
    by names that the forward does not use. The worker must keep the other inputs of the weight
    half, TANGENT among them, and run both halves with the same parameters. If an outgoing TANGENT
    has the name of an incoming one, the incoming one reaches the weight half as SAVED. A half may
    be empty, without inputs and outputs: the input half if no input of the stage needs a gradient,
    the weight half if the stage trains nothing.
    """

    samples: int
    forward: Program
    backward: Program | None
    halves: tuple[Program, Program] | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The forward, and the backward and its halves if they exist."""
        programs = (self.forward, self.backward, *(self.halves or ()))
        return tuple(program for program in programs if program is not None)

    @property
    def backwards(self) -> tuple[Program, ...]:
        """The whole backward, or its halves if they exist; empty without a backward."""
        return self.halves or (() if self.backward is None else (self.backward,))

    @property
    def saved_nbytes(self) -> int:
        """Bytes that one micro-batch in flight keeps: saved tensors, and kept stage inputs."""
        if self.backward is None:
            return 0
        kept = (SAVED, INPUT, CUT)
        return sum(slot.nbytes for slot in self.backward.inputs if slot.role in kept)

    @property
    def deferred_nbytes(self) -> int:
        """Bytes that one micro-batch keeps between the halves of its backward."""
        if self.halves is None:
            return 0
        kept = (SAVED, INPUT, CUT, TANGENT)
        return sum(slot.nbytes for slot in self.halves[1].inputs if slot.role in kept)


@dataclass(frozen=True)
class StageGraphs:
    """Everything that a device needs to run one stage.

    `update`: PARAM, GRAD, STATE, SCALAR -> PARAM, STATE, GRAD (zeroed). If an earlier stage owns a
    parameter (tied weights), the update only zeroes its GRAD. None if nothing is trained.
    `predict`: PARAM, STATE, SCALAR -> PARAM, the weights expected after `ahead` more updates.
    `norm`: GRAD, SCALAR -> NORM, for the parameters that the stage owns. These two are None if not
    requested, if the stage owns no parameter, or (`predict`) if the optimizer predicts nothing.
    `evaluation`: forwards in eval mode, by number of samples; they save nothing, and return the
    loss and OUTPUT. `inference`: the same without the loss. `tied` lists (parameter, owner stage,
    other stages); the owner is the first stage that reads the parameter.
    """

    stage: int
    passes: dict[int, PassPrograms] = field(default_factory=dict)
    update: Program | None = None
    constants: dict[str, Any] = field(default_factory=dict)  # name -> numpy array
    tied: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    predict: Program | None = None
    norm: Program | None = None
    evaluation: dict[int, Program] = field(default_factory=dict)
    inference: dict[int, Program] = field(default_factory=dict)

    @property
    def programs(self) -> dict[str, Program]:
        """All programs by name, such as `forward of 3 samples`."""
        named: dict[str, Program | None] = {}
        for samples, passes in self.passes.items():
            of = _of(samples)
            named |= {f"forward {of}": passes.forward, f"backward {of}": passes.backward}
            for half, program in zip(("input", "weight"), passes.halves or (), strict=False):
                named[f"{half} half of the backward {of}"] = program
        named |= {"update": self.update, "prediction": self.predict, "norm": self.norm}
        named |= {f"evaluation {_of(n)}": program for n, program in self.evaluation.items()}
        named |= {f"inference {_of(n)}": program for n, program in self.inference.items()}
        return {name: program for name, program in named.items() if program is not None}

    @property
    def forwards(self) -> tuple[tuple[int, Program], ...]:
        """All forwards, of training, evaluation and inference, each with its samples."""
        of_training = ((samples, passes.forward) for samples, passes in self.passes.items())
        return (*of_training, *self.evaluation.items(), *self.inference.items())

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that this stage reads, in the order of their first use."""
        return self._names(PARAM)

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names of the trained parameters that this stage reads and an earlier stage owns."""
        return tuple(name for name, owner, _ in self.tied if owner != self.stage)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that this stage reads or updates."""
        return self._names(BUFFER)

    def _names(self, role: str) -> tuple[str, ...]:
        backwards = (p.backward for p in self.passes.values() if p.backward is not None)
        programs = (*(forward for _, forward in self.forwards), *backwards)
        slots = [slot for p in programs for slot in (*p.inputs, *p.outputs)]
        return tuple(dict.fromkeys(slot.name for slot in slots if slot.role == role))


def sharing_stages(graphs: Iterable[StageGraphs]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the stages that share parameters: each owner with the other stages."""
    return tuple({(owner, others): None for stage in graphs for _, owner, others in stage.tied})


def _of(samples: int) -> str:
    return f"of {samples} sample{'' if samples == 1 else 's'}"
