"""Training objectives: their interface to the training loop, and contrastive losses."""
