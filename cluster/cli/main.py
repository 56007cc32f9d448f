"""The `dflash` command: `serve`, `chat`, `bench`, `status`, `schedule`, `config`, `train`, `eval-drafter`."""

import typer

from cluster.cli.bench import bench
from cluster.cli.chat import chat
from cluster.cli.config_command import config
from cluster.cli.operate import schedule, status
from cluster.cli.serve import serve
from cluster.cli.train import eval_drafter, train

app = typer.Typer(
    name="dflash",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve LLMs on Ray with DFlash speculative decoding.",
)
app.command()(serve)
app.command()(chat)
app.command()(bench)
app.command()(status)
app.add_typer(schedule, name="schedule")
app.add_typer(config, name="config")
app.command()(train)
app.command("eval-drafter")(eval_drafter)

if __name__ == "__main__":
    app()
