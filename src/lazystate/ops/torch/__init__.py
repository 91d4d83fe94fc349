"""Plain PyTorch, any device: readable, the oracle of faster backends and the CPU path.

It decides on the host which rows fold; on a GPU that costs one synchronisation a model step.
"""
