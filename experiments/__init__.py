"""Experiments: scripts that train, one page each. Run them from the repository's root, as python -m experiments.NAME."""
