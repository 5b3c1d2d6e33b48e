"""Benchmarks for a machine with a GPU: the speed of the models (`speed`) and of the input pipeline (`feeding`).

`parts` runs the measurements, and `tables` writes the results as one page per GPU model.
"""
