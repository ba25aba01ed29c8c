"""A real Slurm of several nodes on one machine, so that nothing that is tested has to be faked.

``DevCluster`` brings it up and takes it away; ``ClusterShape`` says how large it is.
"""

from slurm.devcluster.cluster import DevCluster
from slurm.devcluster.config import ClusterShape
from slurm.devcluster.errors import DevClusterError, DevClusterUnavailable

__all__ = ["ClusterShape", "DevCluster", "DevClusterError", "DevClusterUnavailable"]
