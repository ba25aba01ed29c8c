"""Ours beside its peers, alternating in one run. Not tests: nothing here fails on a figure."""
