"""The report of a study: sentences and tables whose every figure names the data it comes from.

Imports `d5suite.study`, `d5suite.models`, `d5suite.statistics` and its neighbours; decides nothing.
"""
