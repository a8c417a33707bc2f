"""hetpipe: train one PyTorch model across every accelerator in the room, whoever made it."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hetpipe import callbacks as callbacks
    from hetpipe import hf as hf
    from hetpipe import losses as losses
    from hetpipe import optim as optim
    from hetpipe.buckets import BucketBatches as BucketBatches
    from hetpipe.buckets import Buckets as Buckets
    from hetpipe.capture.captured import capture as capture
    from hetpipe.cluster.cluster import Cluster as Cluster
    from hetpipe.diagnosis.record import Diagnosis as Diagnosis
    from hetpipe.errors import HetpipeError as HetpipeError
    from hetpipe.explain.explanation import Explanation as Explanation
    from hetpipe.pipeline.changes import Joined as Joined
    from hetpipe.pipeline.changes import Lost as Lost
    from hetpipe.pipeline.lossscale import LossScale as LossScale
    from hetpipe.pipeline.pipeline import Pipeline as Pipeline
    from hetpipe.pipeline.remote import Remote as Remote
    from hetpipe.plan.plan import Plan as Plan
    from hetpipe.sdk.backend import Backend as Backend
    from hetpipe.sdk.host.registry import discover_devices as discover_devices
    from hetpipe.sdk.host.registry import register_backend as register_backend
    from hetpipe.sdk.info import DeviceInfo as DeviceInfo
    from hetpipe.zoo.workload import Workload as Workload
else:
    __getattr__, __dir__ = lazy(__name__)
