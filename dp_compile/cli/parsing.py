"""What the subcommands share: how a parser looks, and how it complains."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

Subparsers = Any
"""What `ArgumentParser.add_subparsers` returns; argparse keeps its class private."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, not under a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dp-compile: error: {message}. See {self.prog} --help.\n")


def add_command(subparsers: Subparsers, name: str, *, help: str, description: str, epilog: str) -> Any:
    """A subcommand's parser. `epilog` teaches by example."""
    return subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
