"""Writes the dashboards to serving/grafana/dashboards (or to the folder that is given)."""

from __future__ import annotations

from pathlib import Path

import click

from specstack_serving.dashboards.boards import BOARDS
from specstack_serving.dashboards.grafana import as_json

FOLDER = Path(__file__).parents[2] / "grafana" / "dashboards"


@click.command()
@click.argument(
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=FOLDER,
    required=False,
)
def main(folder: Path) -> None:
    """Write one JSON file per dashboard to FOLDER, which exists."""
    for board in BOARDS:
        file = folder / f"{board.uid}.json"
        file.write_text(as_json(board), "utf-8")
        click.echo(file)


if __name__ == "__main__":
    main()
