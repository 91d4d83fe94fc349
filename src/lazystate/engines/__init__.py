"""Engines: what a serving or modelling library needs to decode through a StateCache."""
