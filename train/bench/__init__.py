"""`train bench`: how fast each link from disk to weights is by itself, and which one holds up the others."""
