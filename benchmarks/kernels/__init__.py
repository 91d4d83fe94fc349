"""The parts of benchmarks/run.py: what is measured, how it is checked, what it costs at least."""
