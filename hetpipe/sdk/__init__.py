"""The interface for authors of backends."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.errors import BackendError as BackendError
    from hetpipe.errors import BundleError as BundleError
    from hetpipe.errors import HetpipeError as HetpipeError
    from hetpipe.errors import UnsupportedOperatorError as UnsupportedOperatorError
    from hetpipe.sdk.backend import DONE as DONE
    from hetpipe.sdk.backend import Backend as Backend
    from hetpipe.sdk.backend import Buffer as Buffer
    from hetpipe.sdk.backend import Chunk as Chunk
    from hetpipe.sdk.backend import Device as Device
    from hetpipe.sdk.backend import Event as Event
    from hetpipe.sdk.backend import Executable as Executable
    from hetpipe.sdk.backend import Group as Group
    from hetpipe.sdk.backend import Window as Window
    from hetpipe.sdk.blocking import BlockingDevice as BlockingDevice
    from hetpipe.sdk.decompositions import fallback_decompositions as fallback_decompositions
    from hetpipe.sdk.events import FdEvent as FdEvent
    from hetpipe.sdk.events import PolledEvent as PolledEvent
    from hetpipe.sdk.events import Signal as Signal
    from hetpipe.sdk.events import WorkQueue as WorkQueue
    from hetpipe.sdk.formats.bundle import Argument as Argument
    from hetpipe.sdk.formats.bundle import Exported as Exported
    from hetpipe.sdk.formats.bundle import ExportedSource as ExportedSource
    from hetpipe.sdk.formats.bundle import KernelEntry as KernelEntry
    from hetpipe.sdk.formats.bundle import LaunchEntry as LaunchEntry
    from hetpipe.sdk.formats.bundle import Manifest as Manifest
    from hetpipe.sdk.formats.bundle import Parameter as Parameter
    from hetpipe.sdk.formats.bundle import ProgramEntry as ProgramEntry
    from hetpipe.sdk.formats.bundle import SourceEntry as SourceEntry
    from hetpipe.sdk.formats.bundle import read_binary as read_binary
    from hetpipe.sdk.formats.bundle import read_bundles as read_bundles
    from hetpipe.sdk.formats.serialised import serialise as serialise
    from hetpipe.sdk.formats.serialised_reader import deserialise as deserialise
    from hetpipe.sdk.graph import core_decompositions as core_decompositions
    from hetpipe.sdk.graph import dtype_name as dtype_name
    from hetpipe.sdk.graph import graph_calls as graph_calls
    from hetpipe.sdk.graph import graph_inputs as graph_inputs
    from hetpipe.sdk.graph import graph_outputs as graph_outputs
    from hetpipe.sdk.graph import operator_name as operator_name
    from hetpipe.sdk.graph import primitive_decompositions as primitive_decompositions
    from hetpipe.sdk.host.registry import register_backend as register_backend
    from hetpipe.sdk.indices import index_bounds as index_bounds
    from hetpipe.sdk.info import API_VERSION as API_VERSION
    from hetpipe.sdk.info import DTYPE_NBYTES as DTYPE_NBYTES
    from hetpipe.sdk.info import KINDS as KINDS
    from hetpipe.sdk.info import Capabilities as Capabilities
    from hetpipe.sdk.info import DeviceInfo as DeviceInfo
    from hetpipe.sdk.info import Execution as Execution
    from hetpipe.sdk.inputs import check_inputs as check_inputs
    from hetpipe.sdk.inputs import input_forms as input_forms
    from hetpipe.sdk.kernels import UserKernel as UserKernel
    from hetpipe.sdk.support import require_support as require_support
else:
    __getattr__, __dir__ = lazy(__name__)
