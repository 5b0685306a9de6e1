"""The client of a coordinator: requests as futures and streams."""
