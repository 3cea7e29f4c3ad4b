"""`syncline measure`: what is measured on this machine; one file for each verb."""

from __future__ import annotations

import typer

from syncline.cli import measure_import, measure_layers, measure_links

app = typer.Typer(
    help="Measure this machine, for simulations of others like it.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)
app.command("layers", context_settings={"max_content_width": 100})(measure_layers.layers)
app.command("links", context_settings={"max_content_width": 100})(measure_links.links)
app.command("import", context_settings={"max_content_width": 100})(measure_import.import_file)
