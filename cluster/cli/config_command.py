"""`dflash config`: the schema of the config file, and what is wrong with a file."""

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from cluster.cli.console import stderr, stdout, user_errors
from cluster.cli.local_ray import available_cpus
from cluster.config import ConfigError, load_config
from cluster.config_check import check_local_cpus, check_models
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
def check(
    file: ConfigFile,
    download: Annotated[
        bool, typer.Option(help="Fetch the models first if they are not here, so that nothing is left unchecked.")
    ] = False,
) -> None:
    """Check a file, its models and this machine, as `dflash serve` would. Weights are downloaded only if asked for."""
    with user_errors(ConfigError):
        loaded = load_config(file)
        problems: list[str] = []
        note = None
        try:
            note = check_models(loaded, download=download)
        except ValueError as error:
            problems.append(str(error))
        try:
            check_local_cpus(loaded, available_cpus())
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(str(file), problems)
    stdout().print(f"{file}: ok, serves {loaded.served_name}", markup=False)
    if note is not None:
        stderr().print(f"not checked: {note}", style="yellow", markup=False)


@config.command()
def show(file: ConfigFile) -> None:
    """Print a file as it is understood: every default filled in, paths resolved."""
    with user_errors(ConfigError):
        loaded = load_config(file)
    print(yaml.safe_dump(loaded.to_plain(), sort_keys=False, allow_unicode=True), end="")
