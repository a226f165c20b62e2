"""Writes the reference pages from the code: `python -m ringfold.cli.reference docs/reference` (or `make docs`).

The text of a setting, message, error or option is its docstring or help. A test compares the pages with the output of
this file, so that they cannot drift.
"""

import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import msgspec
import typer.main

import ringfold
from ringfold import errors
from ringfold.cli import build
from ringfold.clock.global_clock import GlobalClock, Instant
from ringfold.clock.prober import Prober
from ringfold.config import SETTINGS, Setting
from ringfold.observe import metrics
from ringfold.peer import buffers
from ringfold.peer.communicator import Communicator
from ringfold.peer.outcome import Handle, ReduceInfo
from ringfold.peer.step_ops import StepHandle
from ringfold.peer.steps import Step
from ringfold.peer.sync.sync_call import SyncInfo
from ringfold.probe.nodes.callbacks import ProbeWindow
from ringfold.state.checkpoint import Checkpoints
from ringfold.state.shared import MayDiffer, SharedState
from ringfold.wire import agent, base, events, frames, messages, notices, probing, status

_NOTE = "<!-- Written by `make docs` from the code; do not edit. -->\n"


def settings_page() -> str:
    """Every setting, with its environment variable, default and range."""
    rows = (
        (f"`{setting.name}`", f"`{setting.env}`", _default(setting), _kind(setting), setting.help)
        for setting in SETTINGS.values()
    )
    return _page(
        "Settings",
        "A value comes from the first of these that has it: an argument (of a command or of `rf.join`), an environment "
        "variable, the settings file, the default. An empty environment variable counts as not set.",
        "The settings file is TOML with the names below as keys. It is the one named by `--config` or "
        "`RINGFOLD_CONFIG`, else `./ringfold.toml`, else `~/.config/ringfold.toml`. A relative path in it means: "
        "beside the file. `ringfold config` shows every value and its origin.",
        _table(("setting", "environment", "default", "kind", "meaning"), rows),
    )


def _default(setting: Setting) -> str:
    value = setting.default
    if value in (None, "", ()):
        return "none"
    if isinstance(value, tuple):
        return "`" + ", ".join(value) + "`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _kind(setting: Setting) -> str:
    return f"{setting.kind}: {setting.range}" if setting.range else setting.kind


def errors_page() -> str:
    """Every exception, as a tree in the order of the source."""
    found = [kind for _, kind in _classes(errors) if issubclass(kind, Exception)]
    parts = []
    for kind in found:
        base = kind.__mro__[1]
        under = "" if base is Exception else f" A kind of `{base.__name__}`."
        facts = list(inspect.signature(kind).parameters) if kind.__init__ is not Exception.__init__ else []
        carries = f"\n\nCarries {', '.join(f'`{fact}`' for fact in facts)}." if facts else ""
        parts.append(f"## {kind.__name__}\n\n{_doc(kind)}{under}{carries}")
    module = inspect.getdoc(errors) or ""
    first, _, tree = module.partition("\n\n")
    tree, _, last = tree.rpartition("\n\n")
    return _page("Errors", first, f"```text\n{inspect.cleandoc(tree)}\n```", last, *parts)


def messages_page() -> str:
    """Every message and fixed frame of the protocol, and every notice."""
    parts = [inspect.getdoc(messages) or "", f"The protocol version is {messages.PROTOCOL_VERSION}."]
    for title, union in (
        ("Peer to master", messages.ToMaster),
        ("Master to peer", messages.FromMaster),
        ("Handshake of a lane or a bulk session", messages.Handshake),
        ("In a bulk session", messages.BulkMessage),
        ("Process to agent", agent.ToAgent),
        ("Agent to process", agent.FromAgent),
    ):
        names = ", ".join(f"`{kind.__name__}`" for kind in typing.get_args(union))
        parts.append(f"**{title}:** {names}.")
    parts.append("## Messages")
    rooms = (messages, status, probing, agent, base)
    kinds = [kind for module in rooms for _, kind in _classes(module) if kind is not base.Message]
    parts += [_struct(kind) for kind in kinds if _is_message(kind)]
    parts.append("## Parts of messages")
    parts += [_struct(kind) for kind in kinds if _is_struct(kind) and not _is_message(kind)]
    parts += ["## Fixed frames", inspect.getdoc(frames) or ""]
    parts += [_struct(kind) for _, kind in _classes(frames) if _is_struct(kind)]
    parts += ["## Notices", inspect.getdoc(notices) or ""]
    parts += [_struct(kind) for _, kind in _classes(notices) if _is_struct(kind)]
    return _page("Messages", *parts)


def events_page() -> str:
    """Every kind of event, by its name in a line."""
    kinds = sorted(typing.get_args(events.EventKind), key=_tag_of)
    parts = [
        inspect.getdoc(events) or "",
        "[How events flow](../concepts/events.md) says which process records what, and what is bounded by what. "
        "`ringfold events` shows them; `--kind` takes the names below.",
        "An event of level debug is in files and in flight records only; a live view has the others.",
        _struct(events.Stamp),
        "## Kinds",
    ]
    for kind in kinds:
        _, _, body = _struct(kind).partition("\n\n")
        parts += [f"### {_tag_of(kind)}", f"Level: {_level_of(kind)}.", body]
    return _page("Events", *parts)


def _tag_of(kind: type[notices.Notice]) -> str:
    return str(kind.__struct_config__.tag)


def _level_of(kind: type[notices.Notice]) -> str:
    """The level of this kind, or the levels that its source returns."""
    found = re.findall(
        r'"(debug|info|warning|error)"', inspect.getsource(vars(kind).get("level", notices.Notice.level).fget)
    )
    return " or ".join(dict.fromkeys(found))


def api_page() -> str:
    """The public API: `join`, and the public methods and properties of the classes."""
    parts = [
        "A buffer is a NumPy array, a torch tensor, or anything with the buffer protocol or DLPack. In host memory and "
        "C order it is used where it lies; with other strides, or on a device, it is staged: reduced as a copy, which "
        "is copied back when the op has committed ([guide](../guides/arrays.md)). `buffers` may be one, or a list, "
        "tuple or dict of them, fused into one op (a dict in the order of its sorted keys). Types: u/int 8-64, f16, "
        "bf16, f32, f64. "
        'bfloat16 comes as torch tensors, `ml_dtypes` arrays, or uint16 arrays with `dtype="bfloat16"`.',
        "In signatures, `ArrayLike` is one array: a NumPy array, or an object with `__buffer__`, `__dlpack__` or "
        "`__array__`. `Buffers` is an `ArrayLike`, a sequence of them, or a mapping of names to them; with `skip_none` "
        "some may be None.",
        "Ringfold logs under `ringfold` (standard `logging`): warnings are shown by default, for more say "
        '`logging.basicConfig(level="INFO")`.',
        f"## ringfold.join\n\n```python\n{_signature('join', ringfold.join)}\n```\n\n{inspect.getdoc(ringfold.join)}",
    ]
    for kind in (
        Communicator, Step, StepHandle, Handle, ReduceInfo, SharedState, MayDiffer, SyncInfo, Checkpoints,
        GlobalClock, Instant, Prober, ProbeWindow,
    ):  # fmt: skip
        parts.append(f"## {kind.__name__}\n\n{_doc(kind)}")
        if kind is Prober:
            parts.append(f"```python\n{_signature('Prober', Prober.__init__)}\n```")
        parts += _members(kind)
    return _page("The Python API", *parts)


def _members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"**`{name}`** {inspect.getdoc(member) or ''}".rstrip()
        elif inspect.isfunction(member):
            yield f"```python\n{_signature(name, member)}\n```\n\n{inspect.getdoc(member) or ''}".rstrip()


def _signature(name: str, function: Callable[..., object]) -> str:
    """The signature as source code, with one parameter per line if it is long."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=parameters)))
    for alias, union in (("Buffers", buffers.Buffers), ("ArrayLike", buffers.ArrayLike)):
        shown = shown.replace(inspect.formatannotation(union), alias)
    return f"{name}{shown}" if len(shown) < 100 else f"{name}{shown}".replace(", ", ",\n    ")


def _is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


def _is_message(kind: type) -> bool:
    return issubclass(kind, messages.Message)


def _struct(kind: type) -> str:
    info = typing.get_type_hints(kind)
    fields = [name for name in getattr(kind, "__struct_fields__", ()) if name in info]
    rows = [(f"`{name}`", f"`{_type_name(info[name])}`") for name in fields]
    parts = (f"### {kind.__name__}", _doc(kind), _table(("field", "type"), rows) if rows else "")
    return "\n\n".join(part for part in parts if part)


def _type_name(hint: object) -> str:
    """A type as the source writes it, without the names of modules."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    rooms = ("messages", "base", "status", "frames", "probing", "agent")
    for prefix in (*(f"ringfold.wire.{room}." for room in rooms), "typing."):
        text = text.replace(prefix, "")
    return text


def metrics_page() -> str:
    """Every metric, by where it is exposed, and what the endpoints are."""
    parts = [
        "All names begin with `ringfold_`; units and endings are those of Prometheus. A label with a closed set of "
        "values has all of them from the start, as 0. How to use them: the [guide](../guides/observe.md).",
        "An endpoint serves GET of its paths and nothing else. On loopback it needs no token; elsewhere the bearer "
        "token that `ringfold viewer-token` prints. A series of a peer ends with the peer. A histogram `x` has the "
        "series `x_bucket{le=...}`, `x_sum` and `x_count`. The master also has `/sd`: the peers that serve metrics, "
        "for HTTP service discovery.",
    ]
    for place, about in metrics.PLACES.items():
        found = [metric for metric in metrics.METRICS.values() if place in metric.where]
        rows = [(f"`{metric.full_name}`", str(metric.kind), metric.help) for metric in found]
        parts += [f"## {about}", _table(("metric", "type", "meaning"), rows)]
    labelled = [metric for metric in metrics.METRICS.values() if metric.labels]
    labels = [(f"`{metric.full_name}`", _labels(metric)) for metric in labelled]
    return _page("Metrics", *parts, "## Labels", _table(("metric", "labels"), labels), *_buckets())


def _labels(metric: metrics.Metric) -> str:
    """A label with the set of its values, or what it is."""
    return "; ".join(
        f"`{name}`: {values if isinstance(values, str) else ', '.join(values)}"
        for name, values in metric.labels.items()
    )


def _buckets() -> Iterator[str]:
    yield "## Buckets"
    histograms = [metric for metric in metrics.METRICS.values() if metric.kind == "histogram"]
    rows = ((f"`{metric.full_name}`", ", ".join(f"{bound:g}" for bound in metric.bounds)) for metric in histograms)
    yield _table(("histogram", "upper bounds"), rows)


def cli_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(build())
    return _page("Command line", *_command("ringfold", root))


def _command(path: str, command: typing.Any) -> Iterator[str]:  # noqa: ANN401  (click's types differ between versions)
    """A command and its sub-commands. Uses only what every version of typer has."""
    doc = inspect.cleandoc(command.help or "")
    yield f"{'#' * min(4, 1 + len(path.split()))} {path}"
    if doc:
        yield doc
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        flags = [*parameter.opts, *parameter.secondary_opts]
        shown = f"`{parameter.name.upper()}`" if parameter.param_type_name == "argument" else _code(flags)
        rows.append((shown, _option_default(parameter), getattr(parameter, "help", None) or ""))
    if rows:
        yield _table(("option", "default", "meaning"), rows)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", inner)


def _option_default(parameter: typing.Any) -> str:  # noqa: ANN401
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or callable(value) or value in (False, (), [], "") or "Sentinel" in type(value).__name__:
        return ""
    return f"`{value}`"


def _code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _classes(module: ModuleType) -> Iterator[tuple[str, type]]:
    """The classes that a module itself defines, in the order of its source."""
    for name, thing in vars(module).items():
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            yield name, thing


def _doc(kind: type) -> str:
    """The class's own docstring; an inherited one describes the base, not this class."""
    return inspect.cleandoc(vars(kind).get("__doc__") or "")


def _table(head: tuple[str, ...], rows: "typing.Iterable[tuple[str, ...]]") -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), line(("---",) * len(head)), *map(line, rows)])


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([_NOTE + f"\n# {title}", *(part for part in parts if part)]) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api_page,
    "settings.md": settings_page,
    "cli.md": cli_page,
    "errors.md": errors_page,
    "events.md": events_page,
    "messages.md": messages_page,
    "metrics.md": metrics_page,
}


def write(directory: Path) -> list[Path]:
    """Write every page into `directory`; return those that changed."""
    changed = []
    for name, make in PAGES.items():
        path, text = directory / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        typer.echo(f"wrote {path}")
