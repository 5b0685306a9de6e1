"""The connection to the admin port of a coordinator: status and signals."""
