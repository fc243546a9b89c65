"""Finds faster settings of a backend, and proves what it changes: ``d5suite tune``.

====================  ==============================================================================
`common`              knobs that every backend has: threads, allocator, loaders, ranks
`space`               a space of knobs with conditions; a candidate; what it sets
`proposals`           what models propose first and leave out
`search`              the search, of whatever measures a candidate
`trials`              measures candidates in turn with the default, in workers of their own
`whole_runs`          the same of what cannot take turns, run by run
`confirm`             fresh launches: the speed-up; and what each knob gives
`course`              a search's course as JSON values
`profiles`            the file that ``pytest --tuned`` reads
`tune`                all of it, within a budget
====================  ==============================================================================

Starts workers through the session only. Imports no framework.
"""
