"""`dflash config`: the schema of the config file, and what is wrong with a file."""

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from cluster.cli.console import stdout, user_errors
from cluster.config import ConfigError, load_config
from cluster.config_reference import json_schema, markdown_table

config = typer.Typer(no_args_is_help=True, help="Look at and check config files.")

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML config file.")]


@config.command()
def schema(
    markdown: Annotated[bool, typer.Option(help="A table for people instead of a JSON schema for editors.")] = False,
) -> None:
    """Print every key with its type, default, and whether a change needs a restart."""
    print(markdown_table() if markdown else json.dumps(json_schema(), indent=2))


@config.command()
def check(file: ConfigFile) -> None:
    """Check a file and list everything that is wrong with it. Downloads nothing."""
    with user_errors(ConfigError):
        loaded = load_config(file)
    stdout().print(f"{file}: ok, serves {loaded.served_name}", markup=False)


@config.command()
def show(file: ConfigFile) -> None:
    """Print a file as it is understood: every default filled in, paths resolved."""
    with user_errors(ConfigError):
        loaded = load_config(file)
    print(yaml.safe_dump(loaded.to_plain(), sort_keys=False, allow_unicode=True), end="")
