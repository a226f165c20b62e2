"""The metrics of a transport agent: its status, as `ringfold agent status` shows it, by closed sets of reasons."""

from collections.abc import Callable

from ringfold.observe import metrics
from ringfold.observe.metrics import Exposition, labels
from ringfold.runtime.http_server import Page, Pages, PageUnavailable
from ringfold.wire.agent import AgentStatus

STATUS_TIMEOUT_S = 2.0
_REQUESTS = {
    "connect": "connections",
    "register": "registered",
    "renew": "renewed",
    "remove": "removed",
    "measure": "measured",
}
_OUTCOMES = {"used": "congestion", "older": "older", "full": "full", "other": "other"}


def agent_pages(status: Callable[[float], AgentStatus]) -> Pages:
    """The pages of an agent's endpoint. `status` gets a timeout in seconds and may raise TimeoutError."""

    def page() -> Page:
        try:
            seen = status(STATUS_TIMEOUT_S)
        except TimeoutError:
            raise PageUnavailable(f"the agent did not respond within {STATUS_TIMEOUT_S:g} s") from None
        out = Exposition("agent")
        add_agent(out, seen)
        return Page(out.content())

    return {"/metrics": page}


def add_agent(out: Exposition, status: AgentStatus) -> None:
    """All metrics of an agent."""
    metrics.add_build_info(out, "agent")
    out.add_one("agent_uptime_seconds", status.uptime_ms / 1_000)
    out.add_one("agent_clients", status.clients)
    out.add_one("agent_flows", status.flows)
    slots = {"used": status.slots_used, "free": status.slots - status.slots_used}
    out.add("agent_slots", [(labels(state=state), slots[state]) for state in metrics.SLOT_STATES])
    counts, refused = status.counts, status.refused
    requests = [(labels(request=name), counts.get(_REQUESTS[name], 0)) for name in metrics.AGENT_REQUESTS]
    out.add("agent_requests_total", requests)
    refusals = [(labels(reason=reason), refused.get(reason, 0)) for reason in metrics.AGENT_REFUSALS]
    out.add("agent_requests_refused_total", refusals)
    out.add_one("agent_hints_published_total", counts.get("published", 0))
    outcomes = [
        (labels(outcome=name), counts.get(f"telemetry {_OUTCOMES[name]}", 0)) for name in metrics.TELEMETRY_OUTCOMES
    ]
    out.add("agent_telemetry_total", outcomes)
    known = {reason: refused.get(f"telemetry {reason}", 0) for reason in metrics.TELEMETRY_REFUSALS}
    everything = sum(count for name, count in refused.items() if name.startswith("telemetry "))
    known["other"] = everything - sum(known.values())
    out.add("agent_telemetry_refused_total", [(labels(reason=reason), count) for reason, count in known.items()])
    out.add("agent_monitor_up", [(labels(monitor=name), int(not why)) for name, why in sorted(status.monitors.items())])
