"""The command line: one module for each subcommand, loaded when it is called."""

from pipejax.cli.main import main as main
