"""The engine process, which is the same for every engine backend: worker, lifecycle, output pipeline and health."""
