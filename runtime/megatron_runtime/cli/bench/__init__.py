"""The benchmarks: each a command, its load, and a table of what was measured beside what was aimed at."""
