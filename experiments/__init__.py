"""Experiments: scripts that train, one page each. Run one from the repository's root: python -m experiments.NAME."""
