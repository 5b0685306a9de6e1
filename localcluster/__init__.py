"""Starts and removes a real one-node Kubernetes cluster for demos and tests.

The cluster writes to `build/<name>/` in the repository and to a cache in the user's cache folder. `down` undoes all
other changes that the cluster makes to the machine. Python programs use the class `LocalCluster`. The command is
`python -m localcluster`.
"""

from localcluster.cluster import LocalCluster
from localcluster.errors import ClusterError

__all__ = ["ClusterError", "LocalCluster"]
