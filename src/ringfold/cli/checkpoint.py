"""`ringfold checkpoint`: turn checkpoints into files that PyTorch and other programs read, and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from types import ModuleType

app = typer.Typer(no_args_is_help=True)

Prefix = Annotated[
    str, typer.Option(help="Beginning of the keys that are the model; it is no part of the names there.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("export")
def export_file(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a directory: its newest one.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file: .safetensors, .pt, .pth or .bin.")],
    prefix: Prefix = "model.",
    as_json: AsJson = False,
) -> None:
    """Write the tensors of a checkpoint to a file, by the names of the model's `state_dict`.

    All content is verified. With `--prefix ""` it is everything by its whole name, the optimizer included. The file
    appears when it is complete.
    """
    from ringfold.cli.output import print_json

    done = _package().export_checkpoint(checkpoint, output, prefix=prefix)
    if as_json:
        print_json(done._asdict())
        return
    typer.echo(f"{done.path}: {done.tensors} tensors, {done.nbytes} bytes, of revision {done.revision}")


@app.command("import")
def import_file(
    source: Annotated[Path, typer.Argument(help="A file of tensors by name: .safetensors, .pt, .pth or .bin.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory of the new checkpoint.")],
    like: Annotated[
        Path | None, typer.Option(help="A checkpoint (or directory) whose model is replaced; all else is kept.")
    ] = None,
    prefix: Prefix = "model.",
    revision: Annotated[int | None, typer.Option(help="The revision of the new checkpoint.", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a file of tensors.

    With `--like` it is the checkpoint given there with other weights. Without it, it has only the tensors of the file:
    for a state of one module, at revision 0.
    """
    from ringfold.cli.output import print_json

    path = _package().import_checkpoint(source, output, prefix=prefix, like=like, revision=revision)
    if as_json:
        print_json({"path": path})
        return
    typer.echo(str(path))


def _package() -> "ModuleType":
    """`ringfold.torch`, or an error that says what to install."""
    from importlib import import_module

    from ringfold.errors import UsageError

    try:
        return import_module("ringfold.torch")
    except ImportError as error:
        raise UsageError(str(error)) from error
