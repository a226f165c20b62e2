// The small cards: who is waited for, masters, runs, clocks, probing rounds, shares of paths. Empty ones are hidden.

import { h, keyed, setAttribute, setText, show } from "./dom.js";
import { bytes, duration, micros, number, plural } from "./format.js";

/** Who is waited for, since when, and until when. Hidden while nobody waits for long. */
export class WaitsCard {
  constructor() {
    this.list = h("ul", { class: "wait-list" });
    this.element = h("section", { class: "card waits", hidden: true }, h("h2", { class: "visually-hidden" }, "Waited for"), this.list);
  }

  update(state) {
    const waits = (state.page.waits ?? []).filter((wait) => wait.missing.length && state.now - wait.since_ms >= 700);
    show(this.element, waits.length > 0);
    const names = (peers) => peers.slice(0, 6).map((peer) => {
      const name = state.page.peers?.[peer]?.name;
      return name ? `${peer} (${name})` : String(peer);
    }).join(", ") + (peers.length > 6 ? ` and ${peers.length - 6} more` : "");
    keyed(this.list, waits.slice(0, 6).map((wait) => wait.what), () => h("li", {}, h("span", {}), h("progress", { "aria-hidden": "true" })),
      (item, what) => {
        const wait = waits.find((each) => each.what === what);
        const since = state.now - wait.since_ms;
        const left = wait.evict_ms ? Math.max(0, wait.evict_ms - state.now) : null;
        const who = `${plural(wait.waiting.length, "peer")} wait${wait.waiting.length === 1 ? "s" : ""} for peer${wait.missing.length > 1 ? "s" : ""} `
          + `${names(wait.missing)} since ${duration(since)}`;
        const until = left === 0 ? "; its eviction is due" : left !== null ? `; evicted in ${duration(left)}` : wait.eviction ? `; ${wait.eviction}` : "";
        setText(item.firstChild, `${wait.what}: ${who}${until}`);
        const bar = item.lastChild;
        show(bar, left !== null);
        if (left !== null) {
          setAttribute(bar, "max", since + left);
          setAttribute(bar, "value", since);
        }
      });
  }
}

export class MastersCard {
  constructor() {
    this.list = h("ul", { class: "plain-list" });
    this.note = h("p", { class: "note" });
    this.element = h("section", { class: "card" }, h("h2", {}, "Masters"), this.list, this.note);
  }

  update(state) {
    const page = state.page;
    const rows = page.masters ?? [];
    const shown = rows.length ? rows : page.leader ? [{ address: page.leader, role: "leads" }] : [];
    const hasLeader = shown.some((row) => row.address === page.leader || row.role === "leads");
    if (page.leader && !hasLeader) shown.unshift({ address: page.leader, role: "leads" });
    show(this.element, shown.length > 0);
    const byAddress = new Map(shown.map((row) => [row.address, row]));
    keyed(this.list, [...byAddress.keys()], (address) => h("li", {}, h("span", { class: "mark", "aria-hidden": "true" }),
      h("b", {}, address), h("span", { class: "what" })), (item, address) => {
      const row = byAddress.get(address);
      const tone = row.role === "leads" ? "ok" : row.role === "stands by" ? "note" : "bad";
      setAttribute(item, "data-tone", tone);
      setText(item.firstChild, { ok: "●", note: "◐", bad: "■" }[tone]);
      setText(item.lastChild, row.role);
      setAttribute(item, "title", row.text ?? null);
    });
    const parts = [];
    if (page.fence) parts.push(`fence ${page.fence}`);
    if (page.uptime_s) parts.push(`up ${duration(page.uptime_s * 1000)}`);
    setText(this.note, parts.join(" · "));
  }
}

export class RunsCard {
  constructor(choose) {
    this.choose = choose;
    this.list = h("ul", { class: "plain-list" });
    this.element = h("section", { class: "card" }, h("h2", {}, "Runs"), this.list);
  }

  update(state) {
    const rows = state.page.runs ?? [];
    show(this.element, rows.length > 1);
    const byName = new Map(rows.map((row) => [row.name, row]));
    keyed(this.list, [...byName.keys()], (name) => h("li", {}, h("button", { type: "button", click: () => this.choose?.(name) }, name),
      h("span", { class: "what" })), (item, name) => {
      const row = byName.get(name);
      setAttribute(item.firstChild, "aria-current", name === state.page.run ? "true" : null);
      const away = row.away ? `, ${row.away} away` : "";
      setText(item.lastChild, `${row.state}, ${plural(row.peers ?? 0, "peer")}${away}, revision ${row.revision ?? 0}`);
    });
  }
}

/** The offsets of the peers' wall clocks to the global clock, with bounds, on one axis. */
export class ClocksCard {
  constructor() {
    this.list = h("ul", { class: "clock-list" });
    this.note = h("p", { class: "note" });
    this.element = h("section", { class: "card" }, h("h2", {}, "Clocks"), this.note, this.list);
  }

  update(state) {
    const rows = Object.values(state.page.peers ?? {}).filter((row) => row.clock_us !== undefined);
    show(this.element, rows.length > 0);
    if (!rows.length) return;
    const sorted = rows.sort((a, b) => (b.clock_error_us ?? 0) - (a.clock_error_us ?? 0));
    const listed = sorted.slice(0, 12).sort((a, b) => a.peer - b.peer);
    const low = Math.min(...listed.map((row) => row.clock_us - row.clock_error_us));
    const high = Math.max(...listed.map((row) => row.clock_us + row.clock_error_us));
    const room = Math.max(high - low, 0.001) * 1.08;
    const place = (us) => `${(((us - low) / room) * 100 + 3).toFixed(2)}%`;
    const more = rows.length > 12 ? `the 12 least certain of ${rows.length}; ` : "";
    setText(this.note, `global clock minus wall clock, ± the bound; ${more}${micros(low)} to ${micros(high)}`);
    const byPeer = new Map(listed.map((row) => [String(row.peer), row]));
    keyed(this.list, [...byPeer.keys()], (peer) => h("li", {}, h("span", { class: "id" }, peer),
      h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: "bound" }), h("i", { class: "dot" })),
      h("span", { class: "what" })), (item, peer) => {
      const row = byPeer.get(peer);
      const [, track, text] = item.children;
      const [bound, dot] = track.children;
      bound.style.left = place(row.clock_us - row.clock_error_us);
      bound.style.width = `${Math.max(1, (200 * row.clock_error_us) / room)}%`;
      dot.style.left = place(row.clock_us);
      setText(text, `${micros(row.clock_us)} ± ${micros(row.clock_error_us)}`);
    });
  }
}

const ROUND_COLUMNS = [
  ["round", (row) => row.round + (row.label ? ` ${row.label}` : "")],
  ["nodes", (row) => `${row.nodes}${row.missing ? ` (−${row.missing})` : ""}`],
  ["skew", (row) => micros(row.skew_us)],
  ["latency", (row) => micros(row.latency_us)],
  ["calculation", (row) => micros(row.calculate_us)],
  ["reports", (row) => bytes(row.bytes)],
  ["overhead", (row) => `${number(row.overhead)} %`],
  ["σ", (row) => micros(row.sigma_us)],
];

export class RoundsCard {
  constructor() {
    this.body = h("tbody", {});
    this.note = h("p", { class: "note" });
    const head = h("tr", {}, ...ROUND_COLUMNS.map(([name]) => h("th", { scope: "col" }, name)));
    this.element = h("section", { class: "card" }, h("h2", {}, "Probing rounds"), this.note,
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "probing rounds" },
        h("table", { class: "small" }, h("thead", {}, head), this.body)));
  }

  update(state) {
    const rows = [...(state.page.rounds ?? [])].reverse().slice(0, 8);
    show(this.element, rows.length > 0);
    const anomaly = rows[0]?.anomaly;
    setText(this.note, anomaly ? `anomaly: ${anomaly}` : "");
    show(this.note, Boolean(anomaly));
    const byRound = new Map(rows.map((row) => [row.round, row]));
    keyed(this.body, [...byRound.keys()], () => h("tr", {}, ...ROUND_COLUMNS.map(() => h("td", {}))), (element, key) => {
      const row = byRound.get(key);
      setAttribute(element, "data-tone", row.anomaly || row.missing ? "warning" : "ok");
      ROUND_COLUMNS.forEach(([, text], index) => setText(element.children[index], text(row)));
    });
  }
}

/** How the host's agent shares traffic over paths: a bar for each pair. */
export class PathsCard {
  constructor() {
    this.list = h("ul", { class: "path-list" });
    this.element = h("section", { class: "card" }, h("h2", {}, "Shares of paths"), this.list);
  }

  update(state) {
    const paths = Object.entries(state.page.paths ?? {}).slice(0, 16);
    show(this.element, paths.length > 0);
    const byPair = new Map(paths);
    keyed(this.list, [...byPair.keys()], (pair) => h("li", {}, h("span", { class: "id" }, pair.replace("-", " → ")),
      h("span", { class: "shares", "aria-hidden": "true" }), h("span", { class: "what" })), (item, pair) => {
      const shares = byPair.get(pair);
      const [, bar, text] = item.children;
      keyed(bar, shares.map((_, index) => index), () => h("i", {}), (part, index) => { part.style.width = `${100 * shares[index]}%`; });
      setText(text, shares.map((share) => `${Math.round(100 * share)} %`).join(" / "));
    });
  }
}
