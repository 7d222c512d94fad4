"""Checkpoints: the names of the weights and the files that hold them."""
