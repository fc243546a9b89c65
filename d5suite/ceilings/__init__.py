"""The ceilings of this machine: what it computes, moves, sends and reads at most.

Each ceiling is measured in several ways that have nothing in common but the machine, and every
answer is checked. Frameworks measure through the contract, in workers; NumPy, compiled kernels and
storage in a probe of their own. Knows no adapter.

======== =================================================================
`jobs`   frameworks and transports, as jobs of workers
`probe`  NumPy, compiled kernels, storage, copies to a device; a process
`combine` several ways to one ceiling: do they agree, was one disturbed
`machine` all of it, in order: the content of a machine file
======== =================================================================
"""
