"""Optimizers, parameter groups, learning rate schedules and weight averaging."""
