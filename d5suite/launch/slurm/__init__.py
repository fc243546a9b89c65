"""Level 3 under Slurm: ``d5suite slurm``; see ``docs/slurm.md``.

============ ==========================================================================
`profile`    what a site needs: a TOML file
`client`     Slurm's own commands, and their messages on failure
`script`     batch scripts
`run`        a run: a folder of job files, scripts and a ledger of submissions
`status`     the state of each job, until all have ended
`gather`     runs of pytest: cases become jobs, and results become a file
`draft`      a drafted profile
============ ==========================================================================

Imports `d5suite.job`, `d5suite.instruments` and no framework. Pytest turns cases into job files
(``--write-jobs``), and results into a pytest-benchmark file (``--from-jobs``).
"""
