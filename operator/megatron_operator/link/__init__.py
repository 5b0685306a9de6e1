"""The connection to the admin port of a coordinator: its status, and the signals that it gets."""
