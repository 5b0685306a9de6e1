"""A deterministic backend with fault injection, for tests and benchmarks."""
