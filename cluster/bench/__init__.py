"""Measurements of the running product beside fair rivals: `python -m cluster.bench`."""
