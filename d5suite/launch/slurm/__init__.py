"""Level 3 under Slurm: ``d5suite slurm``; see ``docs/slurm.md``.

============ ==========================================================================
`profile`    what a site needs: a TOML file
`client`     Slurm's own commands, and what it says when it refuses or is silent
`script`     readable batch scripts
`run`        a run: a folder with jobs, scripts and a ledger of what was submitted
`follow`     what has become of each job, until all have ended
`gather`     runs of pytest: cases become jobs, and results become a file
`command`    ``init``, ``run``, ``script``, ``status``, ``collect``, ``cancel``
============ ==========================================================================

Imports `d5suite.job`, `d5suite.instruments` and no framework. Cases become jobs, and results become
a pytest-benchmark file, in runs of pytest: ``--write-jobs`` and ``--from-jobs``.
"""
