"""`train quickstart`: examine data and machine, try a few steps, and propose a first run."""
