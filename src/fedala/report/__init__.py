"""Progress, tables, plots and HTML pages.

They need the extras `cli` (rich, Jinja2) and `plots` (matplotlib).
"""
