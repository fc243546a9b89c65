"""The contract between d5suite and a framework's adapter, one file per level.

`description` says what an adapter is and has, and `backend` loads it; `operator`, `network`,
`training` and `distributed` define what it implements; `contract` lists the clauses. Imports the
standard library, NumPy, `d5suite.errors`, `d5suite.network` and `d5suite.optimizers`; no framework.
"""

LEVELS = ("operator", "network", "training", "distributed")
"""The benchmark's levels; a level's index is its number, which results carry."""
