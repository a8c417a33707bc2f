"""A backend for Skeleton devices. It runs on numpy: replace numpy with your driver."""

import numpy as np

from hetpipe import sdk
from hetpipe.sdk import dtype_name, operator_name


def along(index, dim):
    """Return numpy's indices of the elements that `index` names along `dim`."""
    return tuple(index if d == dim else each for d, each in enumerate(np.indices(index.shape)))


def scatter(x, dim, index, value):
    x = x.copy()
    x[along(index, dim) if index.size else np.zeros(x.shape, bool)] = value
    return x


# Operator -> your kernel, which takes the operator's arguments. These train a perceptron;
# `hetpipe coverage MODEL skeleton:cpu:0` names the operators that another model needs.
KERNELS = {
    "aten._to_copy.default": lambda x, **_: x,  # all results are cast below
    "aten.add.Tensor": lambda a, b, alpha=1: a + alpha * b,
    "aten.addmm.default": lambda bias, a, b, beta=1, alpha=1: beta * bias + alpha * (a @ b),
    "aten.amax.default": lambda x, dims=(), k=False: x.max(tuple(dims) or None, keepdims=k),
    "aten.div.Tensor": np.true_divide,
    "aten.exp.default": np.exp,
    "aten.full_like.default": lambda x, value, **_: np.full(x.shape, value),
    "aten.gather.default": lambda x, d, i, **_: x[along(i, d)] if i.size else i,  # i may be empty
    "aten.le.Scalar": np.less_equal,
    "aten.log.default": np.log,
    "aten.mm.default": np.matmul,
    "aten.mul.Tensor": np.multiply,
    "aten.ne.Scalar": np.not_equal,
    "aten.neg.default": np.negative,
    "aten.permute.default": np.transpose,
    "aten.relu.default": lambda x: np.maximum(x, 0),
    "aten.scalar_tensor.default": lambda value, **_: value,
    "aten.scatter.value": scatter,
    "aten.squeeze.dims": lambda x, dims: np.squeeze(x, tuple(d for d in dims if x.shape[d] == 1)),
    "aten.sub.Tensor": lambda a, b, alpha=1: a - alpha * b,
    "aten.sum.dim_IntList": lambda x, dims, k=False, **_: x.sum(tuple(dims) or None, keepdims=k),
    "aten.unsqueeze.default": np.expand_dims,
    "aten.view.default": np.reshape,
    "aten.where.self": np.where,
}
DTYPES = ("float32", "int64", "bool")


class SkeletonBuffer(sdk.Buffer):
    """A row-major tensor; `array` stands for the device's memory."""

    def __init__(self, device, array):
        self.device, self.array = device, array
        self.shape, self.dtype = array.shape, array.dtype.name


class SkeletonDevice(sdk.BlockingDevice):
    """Calls return when their work is done. If your device queues work, derive from sdk.Device."""

    def __init__(self, info):
        self.info = info

    def supports(self, node):
        if operator_name(node) not in KERNELS:
            return "no kernel for it yet"
        dtypes = {dtype_name(each.meta["val"].dtype) for each in (node, *node.all_input_nodes)}
        return None if dtypes <= set(DTYPES) else f"no kernel for {dtypes}"

    def _compile(self, graph):
        return sdk.graph_inputs(graph), list(sdk.graph_calls(graph)), sdk.graph_outputs(graph)

    def _run(self, program, inputs, donate):
        placeholders, calls, outputs = program
        buffers = dict(zip(placeholders, inputs, strict=True))
        values = {node: self._own(buffer).array for node, buffer in buffers.items()}

        def value(arg):
            return list(map(value, arg)) if isinstance(arg, list) else values.get(arg, arg)

        for node in calls:
            for bound in sdk.index_bounds(node):  # an index out of range must raise
                bound.check(self.info.id, values[bound.index])
            with np.errstate(all="ignore"):  # infinities and NaN are ordinary results
                result = KERNELS[operator_name(node)](*map(value, node.args), **node.kwargs)
            values[node] = np.asarray(result, dtype_name(node.meta["val"].dtype))
        for node in outputs:
            if node not in buffers:  # copy: results share no memory
                buffers[node] = SkeletonBuffer(self, values[node].copy(order="C"))
        return [buffers[node] for node in outputs]

    def _to_device(self, src):
        return SkeletonBuffer(self, src.copy(order="C"))

    def _to_host(self, buf, dst):
        dst[...] = self._own(buf).array

    def _own(self, buffer):
        if not isinstance(buffer, SkeletonBuffer):
            raise sdk.BackendError(f"{self.info.id} was given a buffer of {buffer.device.info.id}")
        return buffer


@sdk.register_backend
class SkeletonBackend(sdk.Backend):
    name = "skeleton"

    def discover(self):
        info = sdk.DeviceInfo(
            id="skeleton:cpu:0", backend="skeleton", kind="cpu", name="numpy, for now",
            vendor="you", driver="1", memory_nbytes=1 << 30, memory_domain="host", dtypes=DTYPES,
        )  # fmt: skip
        return [info]

    def open(self, info):
        return SkeletonDevice(info)

    def decompositions(self):
        return sdk.primitive_decompositions()
