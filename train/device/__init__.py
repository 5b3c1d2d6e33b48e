"""Device and precision, asynchronous copies, and counter-based random numbers."""
