"""Level 1: a network's output and gradients. Imports no framework."""
