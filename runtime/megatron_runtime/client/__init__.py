"""The client of a coordinator."""
