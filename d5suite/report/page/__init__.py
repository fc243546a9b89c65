"""A report as one HTML file that opens anywhere: no network, no script but its own.

`gather` reads result files, `render` fills ``page.html``, whose style and behaviour are
``page.css`` and ``page.js``. Imports its neighbours, jinja2 and matplotlib (late).
"""
