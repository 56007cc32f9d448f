"""The `dflash` command: `serve`, `chat`, `bench`, `status`, `schedule`, `config`, `simulate`, `train`,
`cut-head`, `eval-drafter`."""

from typing import Annotated

import typer

from cluster.cli.bench import bench
from cluster.cli.chat import chat
from cluster.cli.config_command import config
from cluster.cli.console import stdout
from cluster.cli.operate import schedule, status
from cluster.cli.serve import serve
from cluster.cli.simulate import simulate
from cluster.cli.train import cut_head, eval_drafter, train
from cluster.version import DISTRIBUTION, version


def _print_version(asked: bool) -> None:
    if asked:
        stdout().print(f"{DISTRIBUTION} {version()}", markup=False)
        raise typer.Exit


app = typer.Typer(
    name="dflash",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _dflash(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve LLMs on Ray with DFlash speculative decoding."""


app.command()(serve)
app.command()(chat)
app.command()(bench)
app.command()(status)
app.add_typer(schedule, name="schedule")
app.add_typer(config, name="config")
app.command()(simulate)
app.command()(train)
app.command("cut-head")(cut_head)
app.command("eval-drafter")(eval_drafter)

if __name__ == "__main__":
    app()
