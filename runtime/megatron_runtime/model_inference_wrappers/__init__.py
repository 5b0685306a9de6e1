"""How a model is run for the steps of an engine."""
