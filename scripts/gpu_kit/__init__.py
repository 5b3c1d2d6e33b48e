"""The GPU kit: a self-contained folder for machines with a GPU and without network access.

`build` assembles it; `run` runs its tests and benchmarks on the GPU machine. docs/gpu_kit.md describes both.
"""
