"""The GPU kit: a folder for machines with a GPU and without a network.

`build` assembles it, `run` checks and measures there what only a GPU can show; docs/gpu_kit.md describes both.
"""
