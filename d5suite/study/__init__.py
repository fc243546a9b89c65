"""A study: questions, and the runs that answer them, as data; planned, run and resumed.

Each run is a command that anyone can type: pytest on recipes, or a command of d5suite.
`d5suite.report.study` writes the report. Imports `d5suite.backends` as data, `d5suite.errors` and
`d5suite.files`.
"""
