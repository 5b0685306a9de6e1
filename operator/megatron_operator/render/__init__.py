"""Pure manifest builders, one module per child kind: (resource, settings) -> manifest."""
