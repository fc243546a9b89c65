"""Level 2: losses and parameters over several steps. Imports no framework."""
