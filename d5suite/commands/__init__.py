"""The commands of ``d5suite``, one file each: ``add`` declares the arguments, a function runs.

`d5suite.cli` collects them. Each imports what it needs when it runs; none imports a framework.
"""
