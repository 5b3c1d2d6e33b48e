"""What is measured on a machine with a GPU: the speed of the models (`speed`), the way from disk to them (`feeding`).

`parts` takes the measurements, and `tables` writes what came out as a page for each chip.
"""
