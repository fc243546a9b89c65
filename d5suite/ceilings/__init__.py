"""The ceilings of this machine: peak rates of computing, memory, transports and storage.

Ceilings are measured in several ways that have nothing in common but the machine, and every answer
is checked. Frameworks measure through the contract, in workers; NumPy, compiled kernels and storage
are measured in a separate process, the probe. Knows no adapter.

======== =================================================================
`jobs`   frameworks and transports, as jobs of workers
`probe`  NumPy, compiled kernels, storage, copies to a device; a process
`combine` several ways to one ceiling: whether they agree or were disturbed
`machine` all measurements, in order: the content of a machine file
======== =================================================================
"""
