"""What a machine has, what training will use of it, and what is wrong (`train doctor`)."""
