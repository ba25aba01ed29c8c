"""Ranks: the process group and its mesh, sharding, and what is agreed on every step."""
