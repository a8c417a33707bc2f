"""Every OpenCL device of this machine, treated as a GPU: its kernels can be tested without one.

cd tests/backend
python -c "import as_gpu; from hetpipe import cli; cli.main()" conform as-gpu --device as-gpu:pocl:0
"""

from __future__ import annotations

from dataclasses import replace

from hetpipe.backends.opencl import OpenCLBackend

from hetpipe.sdk import DeviceInfo, register_backend


@register_backend
class AsGpu(OpenCLBackend):
    """Devices with the kernels for GPUs."""

    name = "as-gpu"

    def discover(self) -> list[DeviceInfo]:
        return [replace(info, kind="gpu") for info in super().discover()]
