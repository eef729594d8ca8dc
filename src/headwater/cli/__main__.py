"""`python -m headwater.cli`: the `headwater` command where its script is not on the path."""

from headwater.cli import app

app()
