"""`ClusterError`, the error for problems that a user can fix."""


class ClusterError(Exception):
    """The machine, the network or an argument prevents the operation. The message contains the remedy."""
