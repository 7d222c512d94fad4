"""Meshes and partition rules for models and caches, written in terms of jax alone.

Empty for now: the library runs on one device. This package may import jax and numpy, never
deepinfer_jax or pallas_kernels.
"""
