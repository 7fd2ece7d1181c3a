"""`narrowcast trust`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.terminal import FOLDER


@click.command()
@click.argument("folder", required=False, type=FOLDER)
@click.option("--remove", is_flag=True, help="Trust FOLDER no longer.")
def trust(folder: Path | None, *, remove: bool) -> None:
    """Trust FOLDER and all below it: commands that look at its files and runs may run the code that these name.

    `run`, `tune`, `benchmark`, `submit` and `check` run what a file names (classes and factories of modules, programs
    of solvers), as a script would. Commands that look, such as `show`, `data show`, `verify` and `tune --dry-run`, run
    none of it, unless the file lies in a trusted folder, or with --trust. Without FOLDER, trusted folders are listed.
    They are kept in narrowcast/trusted_folders in your own settings ($XDG_CONFIG_HOME, or ~/.config).
    """
    from narrowcast.platform.errors import UserError
    from narrowcast.platform.trust import forget_folder, trust_folder, trusted_folders

    if folder is None:
        if remove:
            raise UserError("--remove: name the folder that you trust no longer; narrowcast trust lists them")
        for each in trusted_folders():
            click.echo(each)
        return
    place = forget_folder(folder) if remove else trust_folder(folder)
    click.echo(f"{place} is {'not trusted any more' if remove else 'trusted'}")
