// The peers as a table: sorted, filtered, problems first; a row opens a drawer with everything about that peer.

import { h, keyed, setAttribute, setText, show } from "./dom.js";
import { bytes, duration, micros, number, plural, rate, significant, whole } from "./format.js";

const RANK = { bad: 0, warning: 1, note: 2, ok: 3, idle: 3 };
const GLYPHS = { ok: "●", note: "◐", warning: "▲", bad: "■", idle: "○" };

const COLUMNS = [
  { key: "peer", title: "Peer", value: (row) => row.peer, text: (row) => String(row.peer), kind: "number" },
  { key: "name", title: "Name", value: (row) => row.name, text: (row) => row.name },
  { key: "host", title: "Host", value: (row) => row.host, text: (row) => row.host, kind: "wide" },
  { key: "state", title: "State", value: (row) => `${RANK[row.tone ?? "ok"]}${row.state}`, text: (row) => row.problem ?? row.state,
    kind: "state" },
  { key: "step", title: "Step", value: (row) => row.step ?? -1, text: (row) => whole(row.step), kind: "number" },
  { key: "lag", title: "Lag", value: (row) => row.lag ?? -1, text: (row) => whole(row.lag), kind: "number" },
  { key: "waited", title: "Waits", value: (row) => row.waited ?? -1, text: (row) => percent(row.waited), kind: "number wide",
    help: "share of the time in ops before anything of another peer has come" },
  { key: "sent", title: "Sends", value: (row) => row.sent_s ?? 0, text: (row) => rate(row.sent_s ?? 0), kind: "number" },
  { key: "op", title: "Last op", value: (row) => row.ops ?? 0, text: (row) => row.last_op ?? "", kind: "wide" },
  { key: "clock", title: "Clock", value: (row) => row.clock_us ?? 0, text: clockText, kind: "number wide",
    help: "global clock minus the host's wall clock, and the bound of its error" },
  { key: "version", title: "Version", value: (row) => row.version ?? "", text: (row) => row.version ?? "", kind: "wide" },
];

export class PeersTable {
  constructor() {
    this.sort = { key: "peer", down: false };
    this.problemsFirst = true;
    this.count = h("span", { class: "count" });
    this.search = h("input", { type: "search", placeholder: "filter by name, host, state", "aria-label": "filter the peers",
      input: () => this.update(this.state) });
    this.first = h("button", { type: "button", class: "quiet", "aria-pressed": true, click: () => {
      this.problemsFirst = !this.problemsFirst;
      setAttribute(this.first, "aria-pressed", this.problemsFirst);
      this.update(this.state);
    } }, "problems first");
    this.heads = COLUMNS.map((column) => h("th", { scope: "col", class: column.kind ?? "" },
      h("button", { type: "button", title: column.help, click: () => this.sortBy(column.key) }, column.title)));
    this.body = h("tbody", {});
    this.empty = h("p", { class: "empty" });
    this.drawer = new Drawer();
    this.element = h("section", { class: "card peers" },
      h("div", { class: "card-head" }, h("h2", {}, "Peers"), this.count, h("span", { class: "grow" }), this.first, this.search),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table of peers" },
        h("table", {}, h("thead", {}, h("tr", {}, ...this.heads)), this.body)),
      this.empty, this.drawer.element);
  }

  open(peer) {
    this.drawer.open(peer, this.state);
  }

  sortBy(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : key !== "peer" && key !== "name" && key !== "host" };
    this.update(this.state);
  }

  update(state) {
    this.state = state;
    const peers = state.page.peers ?? {};
    const all = Object.values(peers);
    const rows = this.sorted(all.filter((row) => this.matches(row)));
    const versions = new Set(all.map((row) => row.version ?? ""));
    const version = versions.size === 1 && !versions.has("") ? `, all of version ${[...versions][0]}` : "";
    const found = all.length === rows.length ? "" : `${rows.length} of `;
    setText(this.count, `${found}${plural(all.length, "peer")}${version}`);
    setAttribute(this.element, "data-versions", versions.size > 1 ? "several" : null);
    show(this.empty, rows.length === 0);
    setText(this.empty, all.length ? "No peer matches the filter." : "Nobody has joined.");
    COLUMNS.forEach((column, index) => setAttribute(this.heads[index], "aria-sort",
      this.sort.key === column.key ? (this.sort.down ? "descending" : "ascending") : null));
    const hasClock = all.some((row) => row.clock_us !== undefined);
    setAttribute(this.element, "data-clock", hasClock ? null : "none");
    keyed(this.body, rows.map((row) => String(row.peer)), () => this.makeRow(), (element, key) => this.updateRow(element, peers[key]));
    this.drawer.update(state);
  }

  matches(row) {
    const wanted = this.search.value.trim().toLowerCase();
    if (!wanted) return true;
    const text = `${row.peer} ${row.name} ${row.host} ${row.state} ${row.problem ?? ""} ${row.version ?? ""}`.toLowerCase();
    return wanted.split(/\s+/).every((word) => text.includes(word));
  }

  sorted(rows) {
    const { value } = COLUMNS.find((column) => column.key === this.sort.key);
    const sign = this.sort.down ? -1 : 1;
    return rows.sort((a, b) => {
      const rank = this.problemsFirst ? RANK[a.tone ?? "ok"] - RANK[b.tone ?? "ok"] : 0;
      if (rank) return rank;
      const [x, y] = [value(a), value(b)];
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y) || a.peer - b.peer;
    });
  }

  makeRow() {
    const cells = COLUMNS.map((column, index) => {
      if (index === 0) return h("th", { scope: "row", class: "number" }, h("button", { type: "button", class: "open" }));
      if (column.key === "state") {
        return h("td", { class: "state" }, h("span", { class: "mark", "aria-hidden": "true" }), h("span", {}));
      }
      return h("td", { class: column.kind ?? "" });
    });
    const row = h("tr", { click: () => this.open(Number(row.dataset.peer)) }, ...cells);
    return row;
  }

  updateRow(element, row) {
    setAttribute(element, "data-peer", row.peer);
    setAttribute(element, "data-tone", row.tone ?? "ok");
    COLUMNS.forEach((column, index) => {
      const cell = element.children[index];
      const text = column.text(row);
      if (index === 0) {
        setText(cell.firstChild, text);
        setAttribute(cell.firstChild, "aria-label", `peer ${text}, details`);
      } else if (column.key === "state") {
        setText(cell.firstChild, GLYPHS[row.tone ?? "ok"]);
        setText(cell.lastChild, ` ${text}`);
      } else setText(cell, text);
    });
  }
}

/** A dialog with all that is known of one peer. It follows the run while it is open. */
class Drawer {
  constructor() {
    this.peer = null;
    this.title = h("h2", {});
    this.list = h("dl", {});
    this.element = h("dialog", { class: "drawer", "aria-label": "details of a peer" },
      h("div", { class: "card-head" }, this.title, h("span", { class: "grow" }),
        h("button", { type: "button", class: "quiet", click: () => this.element.close() }, "close")), this.list);
    this.element.addEventListener("click", (event) => { if (event.target === this.element) this.element.close(); });
    this.element.addEventListener("close", () => { this.peer = null; });
  }

  open(peer, state) {
    this.peer = peer;
    this.update(state);
    if (!this.element.open) this.element.showModal();
  }

  update(state) {
    if (this.peer === null) return;
    const row = state.page.peers?.[this.peer];
    setText(this.title, row ? `Peer ${row.peer} · ${row.name}` : `Peer ${this.peer} is gone`);
    const facts = row ? factsOf(row, state) : [];
    const byName = new Map(facts);
    keyed(this.list, [...byName.keys()], (name) => h("div", {}, h("dt", {}, name), h("dd", {})),
      (element, name) => setText(element.lastChild, byName.get(name)));
  }
}

function factsOf(row, state) {
  const page = state.page;
  const ring = Object.values(page.groups ?? {}).find((group) => group.ring?.includes(row.peer));
  const facts = [
    ["state", row.problem ? `${row.state}: ${row.problem}` : row.state],
    ["state, as in status", row.raw_state],
    ["host", row.host],
    ["addresses", row.addresses ?? ""],
    ["group", String(row.group)],
    ["version", row.version || "not reported"],
    ["last seen", row.silent_ms ? `${duration(row.silent_ms)} ago` : "now"],
    ["step", row.step >= 0 ? `${whole(row.step)}, ${plural(row.lag ?? 0, "step")} behind the first` : "none"],
    ["speed", row.steps_s > 0 ? `${number(row.steps_s)} steps/s, ${number(row.ops_s)} ops/s` : `${number(row.ops_s ?? 0)} ops/s`],
    ["ops", `${whole(row.ops ?? 0)} committed, ${whole(row.aborted ?? 0)} aborted, ${whole(row.restarted ?? 0)} run again`],
    ["current op", row.last_op ?? ""],
    ["sends", `${rate(row.sent_s ?? 0)}${row.memory_share > 0 ? `, ${row.memory_share} % of it in shared memory` : ""}`],
    ["receives", rate(row.received_s ?? 0)],
    ["waits for others", percent(row.waited)],
    ["link is full", percent(row.blocked)],
    ["lanes lost", String(row.lanes_lost ?? 0)],
  ];
  if (ring) facts.push(["links", linksText(ring, row.peer)]);
  for (const [key, shares] of Object.entries(page.paths ?? {})) {
    const [source, target] = key.split("-");
    if (Number(source) === row.peer) facts.push([`paths to peer ${target}`, shares.map((share) => percent(100 * share)).join(" / ")]);
  }
  facts.push(["clock", row.clock_us === undefined ? "no global clock" : `${clockText(row)} (certain bound)`]);
  for (const [name, value] of Object.entries(row.logged ?? {})) facts.push([`logged ${name}`, significant(value, 6)]);
  if (row.events_dropped) facts.push(["events not recorded", whole(row.events_dropped)]);
  return facts.filter(([, value]) => value !== "");
}

function linksText(group, peer) {
  return Object.values(group.links ?? {}).filter((link) => link.source === peer || link.target === peer)
    .map((link) => `${link.source} → ${link.target}: ${link.kind}, ${plural(link.lanes ?? 0, "lane")}, ${rate(link.rate ?? 0)}`
      + (link.known ? ` (carries ${rate(link.known)})` : "")).join("\n");
}

function clockText(row) {
  return row.clock_us === undefined ? "" : `${micros(row.clock_us)} ± ${micros(row.clock_error_us)}`;
}

function percent(value) {
  return value === undefined || value < 0 ? "–" : `${Math.round(value)} %`;
}

export { bytes };
