"""How weights follow gradients: optimizers, groups of parameters, schedules, averages of weights."""
