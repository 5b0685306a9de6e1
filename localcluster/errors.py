"""The error of this package for problems that a user can fix."""


class ClusterError(Exception):
    """The machine, the network or an argument makes the operation impossible. The message contains the remedy."""
