"""The site: the documents of this repository as pages to look at. `make docs` builds it.

`stage` brings the documents together so that every link leads to a page, `reference` writes the Python reference from
docstrings, and Sphinx (conf.py) makes HTML of it.
"""
