"""The interface for authors of backends."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "API_VERSION": "info",
        "Backend": "backend",
        "BlockingDevice": "backend",
        "Buffer": "backend",
        "Capabilities": "info",
        "DONE": "backend",
        "Device": "backend",
        "DeviceInfo": "info",
        "DoneEvent": "backend",
        "Event": "backend",
        "Executable": "backend",
        "Execution": "info",
        "backend_names": "registry",
        "core_decompositions": "graph",
        "discover_devices": "registry",
        "get_backend": "registry",
        "open_device": "registry",
        "register_backend": "registry",
    },
)
