"""Loss functions of plain tensors."""
