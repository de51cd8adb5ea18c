"""The microbenchmark suite."""
