"""`ringfold otel`: the events of a run as OpenTelemetry spans, to a collector."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def otel(
    source: Annotated[
        str | None, typer.Argument(help="A run directory, or the master's address.", show_default=False)
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Where the collector receives traces by OTLP over HTTP (OTEL_EXPORTER_OTLP_*).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    run: Annotated[str | None, typer.Option(help="The run; without it `default`, or the only one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Send steps, syncs, epoch changes, failovers and checkpoints of a run to an OpenTelemetry collector, as spans.

    A run directory has all of them, a master only what is rare: no steps. It needs `pip install 'ringfold[otel]'`.
    """
    from contextlib import suppress

    from ringfold import config as settings
    from ringfold.cli.events import found_in
    from ringfold.config import DEFAULT_RUN
    from ringfold.errors import MasterUnreachable, UsageError

    try:
        provider = _provider(endpoint)
        from ringfold.observe.otel import make_spans
    except ImportError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise UsageError("`ringfold otel` needs OpenTelemetry: pip install 'ringfold[otel]'") from None
    resolved = settings.load({"token_file": token_file, "run": run, "config": config})
    seen = (each for each in found_in(source, resolved, follow=follow) if not isinstance(each, MasterUnreachable))
    count = 0
    with suppress(KeyboardInterrupt):
        count = make_spans(seen, provider, resolved.named_run() or DEFAULT_RUN)
    provider.shutdown()
    typer.echo(f"{count} events")


def _provider(endpoint: str | None) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "ringfold"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
