"""hetpipe: train one PyTorch model across every accelerator in the room, whoever made it."""

from hetpipe._lazy import lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Backend": "sdk.backend",
        "Cluster": "cluster.cluster",
        "DeviceInfo": "sdk.info",
        "Diagnosis": "diagnosis.record",
        "HetpipeError": "errors",
        "LayerGraph": "capture.layers",
        "LossScale": "pipeline.lossscale",
        "Pipeline": "pipeline.pipeline",
        "Plan": "plan.plan",
        "Workload": "zoo.workload",
        "capture": "capture",
        "discover_devices": "sdk.registry",
        "optim": "optim",
        "register_backend": "sdk.registry",
    },
)
