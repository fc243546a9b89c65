"""Level 0: one operator's outputs and gradients. Imports no framework."""
