"""Triton kernels of a decode step: static shapes and no word to the host, so that a graph can hold it."""
