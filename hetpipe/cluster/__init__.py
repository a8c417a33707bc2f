"""Clusters: devices with their cores, speeds and links, found here or described in a file."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster as Cluster
    from hetpipe.cluster.member import Member as Member
    from hetpipe.cluster.topology import Link as Link
    from hetpipe.cluster.topology import Server as Server
    from hetpipe.cluster.topology import Topology as Topology
else:
    __getattr__, __dir__ = lazy(__name__)
