"""The interface for authors of backends: all that one needs stands here."""

from hetpipe._lazy import lazy
from hetpipe.errors import BackendError, HetpipeError, UnsupportedOperatorError

__getattr__, __dir__, _names = lazy(
    __name__,
    {
        "API_VERSION": "info",
        "Backend": "backend",
        "BlockingDevice": "backend",
        "Buffer": "backend",
        "Capabilities": "info",
        "Chunk": "backend",
        "DONE": "backend",
        "DTYPE_NBYTES": "info",
        "Device": "backend",
        "DeviceInfo": "info",
        "DoneEvent": "backend",
        "Event": "backend",
        "Executable": "backend",
        "Execution": "info",
        "FdEvent": "events",
        "KINDS": "info",
        "PolledEvent": "events",
        "Signal": "events",
        "WorkQueue": "events",
        "backend_names": "registry",
        "check_inputs": "inputs",
        "core_decompositions": "graph",
        "discover_devices": "registry",
        "dtype_name": "graph",
        "get_backend": "registry",
        "graph_calls": "graph",
        "graph_inputs": "graph",
        "graph_outputs": "graph",
        "index_bounds": "indices",
        "input_forms": "inputs",
        "open_device": "registry",
        "operator_name": "graph",
        "primitive_decompositions": "graph",
        "register_backend": "registry",
        "require_support": "graph",
    },
)
__all__ = [*_names, "BackendError", "HetpipeError", "UnsupportedOperatorError"]
