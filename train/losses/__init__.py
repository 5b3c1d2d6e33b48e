"""Contrastive losses, and the interface between training objectives and the training loop."""
