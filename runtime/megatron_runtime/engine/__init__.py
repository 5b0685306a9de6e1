"""The engine process: worker, lifecycle, output pipeline and health, for every engine backend."""
