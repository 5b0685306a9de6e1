"""A real one-node Kubernetes for demos and tests. One command starts it, and one command removes it.

It writes to `build/<name>/` in the repository and to a cache in the user's cache folder. `down` restores everything
else that it changes on the machine. `LocalCluster` is the library, and `python -m localcluster` is the command.
"""

from localcluster.cluster import LocalCluster
from localcluster.errors import ClusterError

__all__ = ["ClusterError", "LocalCluster"]
