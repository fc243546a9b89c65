"""The neutral training loop: epochs of steps, evaluation off the clock, events, checkpoints.

The loop takes a `d5suite.levels.training.Trainer` of any framework, and batches of NumPy arrays.
Imports the contract, `d5suite.optimizers`, metrics and the clock.
"""
