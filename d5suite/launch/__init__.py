"""Commands and supervision of workers. Knows jobs, but no adapters.

============ ====================================================================
`base`       limits, settings of a launch, outcome, environment
`command`    the command that runs a job
`supervisor` start, limits on time and memory, and end of a job's processes
`run`        one job, by a worker or by ranks
`turns`      a worker that takes its samples in turn with others
`ranks`      several ranks; `mpi` starts them with mpiexec
`heartbeat`  liveness of ranks
`processes`  process trees
`slurm`      jobs on the nodes of a cluster
============ ====================================================================
"""
