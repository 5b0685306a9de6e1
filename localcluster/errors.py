"""The one error this package raises for what a user can put right."""


class ClusterError(Exception):
    """Something about the machine, the network or the arguments stops the cluster; the message says the remedy."""
