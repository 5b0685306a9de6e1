"""A real one-node Kubernetes for demos and tests, started and removed by one command.

It owns `build/<name>/` in the repository and a cache under the user's cache folder, and touches nothing else on the
machine that `down` does not restore. `LocalCluster` is the library, `python -m localcluster` the command.
"""

from localcluster.cluster import LocalCluster
from localcluster.errors import ClusterError

__all__ = ["ClusterError", "LocalCluster"]
