"""`python -m lazystate`."""

from lazystate.cli import app

app(prog_name="lazystate")
