"""The connection to a coordinator's admin port, for status and signals."""
