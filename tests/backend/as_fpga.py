"""Every OpenCL device of this machine, with the kernels for FPGAs.

cd tests/backend
python -c "import as_fpga; from hetpipe import cli; cli.main()" conform as-fpga
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hetpipe.backends.opencl import OpenCLBackend
from hetpipe.backends.opencl.device import OpenCLDevice

from hetpipe.sdk import register_backend


@register_backend
class AsFpga(OpenCLBackend):
    """Devices with the kernels for FPGAs."""

    name = "as-fpga"

    def __init__(self) -> None:
        super().__init__()
        self.configure({"families": {"as-fpga:*": "fpga"}}, Path())


@cache
def as_fpga(device_id: str, channels: bool = True) -> OpenCLDevice:
    """Return the device of an id such as `opencl:pocl:0` with FPGA kernels; cached per process."""
    backend = AsFpga()
    backend.configure({"families": {"as-fpga:*": "fpga"}, "channels": channels}, Path())
    wanted = device_id.replace("opencl", "as-fpga", 1)
    device = backend.open(next(info for info in backend.discover() if info.id == wanted))
    assert isinstance(device, OpenCLDevice)
    return device
