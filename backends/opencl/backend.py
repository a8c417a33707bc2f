"""Finds and opens OpenCL devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hetpipe import environment
from hetpipe.errors import BackendError
from hetpipe.files import path_in, user_path
from hetpipe.records import Source
from hetpipe.sdk.backend import Backend, Device, Finding
from hetpipe.sdk.info import (
    HOST_MEMORY,
    Capabilities,
    DeviceInfo,
    Execution,
    host_memory_nbytes,
    with_separate_memory,
)
from hetpipe.sdk.kernels import UserKernel

from .platform.driver import driver, errors, platforms
from .platform.families import CHANNELS, MOST_KERNELS, Options, choice, default_family
from .platform.runtimes import (
    BUNDLES,
    EMULATORS,
    POCL,
    RUNTIMES,
    Runtime,
    check_cache,
    prepare,
    runtime_of,
    slug,
    unloadable,
)
from .platform.vendors import address_of

if TYPE_CHECKING:
    from hetpipe.sdk.kernels import KernelRunner

    from .device import OpenCLDevice
    from .lower.registry import Lowering
    from .user.user_kernels import OwnKernel


class OpenCLBackend(Backend):
    """The devices of all OpenCL runtimes on this machine."""

    name = "opencl"
    discover_limit_s = 60.0
    """NVIDIA's driver may need 3 s to wake each card, and a machine may have 16 cards."""
    kernels: ClassVar[tuple[OwnKernel, ...]] = ()
    """Kernels that a subclass has registered; see `register_kernel`."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, Runtime | None]] = {}
        self._configured: tuple[OwnKernel, ...] = ()
        self._options = Options()
        self._bundles: Path | None = None

    def configure(self, options: Mapping[str, Any], folder: Path) -> None:
        """Read the options of a cluster file; see `Options`."""
        from .user.specification import kernel_of

        source = Source(f"the options of backend {self.name}", BackendError)
        self._options = source.record(Options, dict(options))
        self._configured = tuple(
            kernel_of(path_in(folder, text, BackendError)) for text in self._options.kernels
        )
        named = self._options.bundles
        self._bundles = None if named is None else path_in(folder, named, BackendError)

    def discover(self) -> list[DeviceInfo]:
        infos: list[DeviceInfo] = []
        counts: Counter[str] = Counter()
        failures = []
        chosen = choice(self._options.families)
        for platform in platforms():
            try:
                devices = _devices(platform)
            except BackendError as error:
                failures.append(str(error))
                continue
            found = []
            for device in devices:
                entry = runtime_of(platform.name, _is_cpu(device))
                name = entry.slug if entry else slug(device.vendor)
                info = _describe(device, f"{self.name}:{name}:{counts[name]}", entry)
                info = self._with_kernels(info)
                counts[name] += 1
                self._found[info.id] = (device, entry)
                found.append(_with_family(info, chosen.of(info.id), self._channels(device)))
            infos += with_separate_memory(found)
        if not infos:
            reason = "; ".join(failures) or "its runtimes have no device"
            raise BackendError(f"no OpenCL device: {reason}; run `{EMULATORS}` or `{POCL}`")
        chosen.check([info.id for info in infos])
        return infos

    def open(self, info: DeviceInfo) -> Device:
        from .device import OpenCLDevice

        device, entry = self.place(info.id)
        bundles = self._bundles or environment.path(BUNDLES, BackendError)
        family = choice(self._options.families).of(info.id) or default_family(info)
        opened: OpenCLDevice = OpenCLDevice(
            info, device, entry, self.lowerings(), bundles, family, self._channels(device)
        )
        opened.dataflow_limit_s = self._options.dataflow_limit_s
        return opened

    def kernel_runner(self) -> KernelRunner:
        from .user.runner import OpenCLRunner

        return OpenCLRunner(self.place)

    def place(self, device_id: str) -> tuple[Any, Runtime | None]:
        """Return pyopencl's device with this id, and its runtime if hetpipe knows the runtime.

        Raises `BackendError` if this machine has no such device, or no folder that it needs.
        """
        if device_id not in self._found:
            self.discover()
        if device_id not in self._found:
            known_ids = ", ".join(self._found) or "none"
            raise BackendError(f"no OpenCL device {device_id!r} here; found: {known_ids}")
        check_cache(device_id, self._found[device_id][1])
        return self._found[device_id]

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        from .decompositions import decompositions
        from .lower.registry import kept_operators

        return decompositions(kept_operators(self.lowerings()))

    def lowerings(self) -> Mapping[str, Lowering]:
        """Return the lowering of each operator; user kernels replace hetpipe's kernels."""
        from .user.user_kernels import lowerings_with

        return lowerings_with((*self.kernels, *self._configured))

    def user_kernels(self) -> Sequence[UserKernel]:
        from .user.user_kernels import runs

        own = (*self.kernels, *self._configured)
        last = {each.operator: each for each in own}  # a later kernel replaces an earlier one
        return [UserKernel(op, each.function, partial(runs, each)) for op, each in last.items()]

    def _channels(self, device: Any) -> bool:
        return self._options.channels and CHANNELS in device.extensions.split()

    @classmethod
    def register_kernel(
        cls, operator: str, source: str | Path, function: str, **settings: Any
    ) -> None:
        """Register a kernel for an operator such as `aten.mm.default`.

        `source` is OpenCL text or the path of a file. `function` is the kernel's name in the
        source. `settings` are further fields of `OwnKernel`. Call this method in the file that
        defines the class, because workers load that file. Raises `BackendError` for
        `OpenCLBackend` itself: a backend with other kernels needs another name.
        """
        from .user.user_kernels import OwnKernel, text_of

        cls._refuse_stock_class()
        own = OwnKernel(operator, text_of(source), function, **settings)
        cls.kernels = (*cls.kernels, own)

    @classmethod
    def register_spec(cls, path: str | Path) -> None:
        """Register the kernel of a specification file for the operator that the file names.

        Raises `BackendError` for `OpenCLBackend` itself, and for a fault in the file.
        """
        from .user.specification import kernel_of

        cls._refuse_stock_class()
        cls.kernels = (*cls.kernels, kernel_of(user_path(path, BackendError)))

    @classmethod
    def _refuse_stock_class(cls) -> None:
        if cls is OpenCLBackend:
            raise BackendError(
                "registering a kernel works only on a subclass with another name, so that "
                "device ids differ from those of opencl: class Mine(OpenCLBackend) with "
                'name = "mine"'
            )

    def _with_kernels(self, info: DeviceInfo) -> DeviceInfo:
        """Add the configured kernels to `info.driver`, because stored costs depend on them."""
        if not self._configured:
            return info
        from .user.specification import digest_of

        names = ", ".join(each.function for each in self._configured)
        own = f"{info.driver}, kernels {names} {digest_of(self._configured)}"
        return replace(info, driver=own)

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        name = info.id.split(":")[1]
        for entry in RUNTIMES:
            chosen = choice(self._options.families).of(info.id)
            if entry.slug == name and chosen == "fpga" and self._options.channels:
                return {variable: str(MOST_KERNELS) for variable in entry.waiting}
            if entry.slug == name:
                return {variable: str(cores) for variable in entry.threads}
        return {}

    def describe(self) -> list[Finding]:
        findings = list(prepare())
        try:
            infos = self.discover()
        except BackendError as error:
            return [*findings, ("broken", str(error), ""), *unloadable()]
        findings += [("ok", f"{info.id}: {info.name}, {info.driver}", "") for info in infos]
        findings += unloadable()
        here = {info.id.split(":")[1] for info in infos}
        if "pocl" not in here:
            findings.append(("missing", "PoCL, OpenCL on any CPU", POCL))
        if "oclgrind" not in here:
            findings.append(("missing", "Oclgrind, which finds faults in kernels", EMULATORS))
        return findings


def _with_family(info: DeviceInfo, family: str, channels: bool) -> DeviceInfo:
    """Add the chosen kernel family to `info.driver`, because costs depend on the family.

    Also limit the capabilities: only kernels of the family `cpu` report chunks of their results. A
    device has each channel only once, so with channels it has one queue.
    """
    if not family:
        return info
    text, abilities = f"{info.driver}, family {family}", info.capabilities
    if family != "cpu":
        abilities = replace(abilities, chunks=False)
    if family == "fpga" and channels:
        text, abilities = f"{text} with channels", replace(abilities, queues=1)
    return replace(info, driver=text, capabilities=abilities)


def _devices(platform: Any) -> list[Any]:
    cl = driver()
    with errors(f"OpenCL platform {platform.name}", "listing its devices"):
        try:
            return list(platform.get_devices())
        except cl.Error as error:
            if "DEVICE_NOT_FOUND" in str(error):
                return []
            raise


def _is_cpu(device: Any) -> bool:
    return bool(device.type & driver().device_type.CPU)


def _describe(device: Any, device_id: str, entry: Runtime | None) -> DeviceInfo:
    types = driver().device_type
    by_type = (
        (types.CPU, "cpu"), (types.GPU, "gpu"), (types.ACCELERATOR, "fpga")
    )  # fmt: skip
    kind = next((name for bit, name in by_type if device.type & bit), "other")
    kind = entry.kind if entry else kind
    # The known runtimes compute on the host's cores; an integrated GPU computes in its memory.
    on_host = entry is not None or _is_cpu(device)
    address = "" if on_host else address_of(device)
    in_host = on_host or (kind == "gpu" and bool(device.host_unified_memory))
    nbytes = device.global_mem_size
    streams = entry is not None and entry.streams
    extensions = device.extensions.split()
    dtypes = ["float32", "int64", "int32", "int16", "int8", "uint8", "bool"]
    if "cl_khr_fp64" in extensions:
        dtypes.append("float64")
    return DeviceInfo(
        id=device_id,
        backend=device_id.partition(":")[0],
        kind=kind,
        name=device.name.strip(),
        vendor=device.vendor.strip(),
        driver=f"{device.platform.name.strip()}, {device.version.strip()}",
        memory_nbytes=min(nbytes, host_memory_nbytes()) if in_host else nbytes,
        memory_domain=HOST_MEMORY if in_host else address or device_id,
        dtypes=tuple(dtypes),
        execution=Execution.ASYNC if streams else Execution.SYNC,
        capabilities=Capabilities(
            queues=entry.queues if entry else 1,
            chunks=streams,
            emulated=bool(entry and entry.emulated),
            reference=bool(entry and entry.reference),
            compiles_ahead=True,
            exports=True,
            untried=entry is None,
            flushes_denormals=not device.single_fp_config & driver().device_fp_config.DENORM,
        ),
        cast_dtypes=("float16",),
        address=address,
    )
