"""`ringfold viewer-token`: print the token of those who only look."""

from pathlib import Path
from typing import Annotated

import typer


def viewer_token(
    token_file: Annotated[Path | None, typer.Option(help="File with the join token.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Print the token with which metrics and the dashboard can be read from other machines.

    It is derived from the join token, and who has it cannot join a run. Prometheus sends it as bearer token
    (`authorization: credentials_file`).
    """
    from ringfold import config as settings
    from ringfold.errors import ConfigError
    from ringfold.wire import proof

    resolved = settings.load({"token_file": token_file, "config": config})
    token = resolved.token()
    if not token:
        raise ConfigError("there is no join token to derive it from: pass --token-file, or set RINGFOLD_TOKEN_FILE")
    typer.echo(proof.viewer_token(token))
