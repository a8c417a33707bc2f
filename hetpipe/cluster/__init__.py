"""Clusters: the participating devices, their cores, speeds and links; found here or described."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Cluster": "cluster",
        "Link": "cluster",
        "Member": "cluster",
        "Server": "topology",
        "Topology": "topology",
        "available_cores": "cluster",
        "parse_bandwidth": "file",
        "parse_time": "file",
    },
)
