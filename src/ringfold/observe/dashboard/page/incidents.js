// Incidents: on a timeline with the axis of the charts, then the same in words, the newest first.

import { h, keyed, setAttribute, setText, show, svg } from "./dom.js";
import { axisTime, clock, duration } from "./format.js";
import { span } from "./charts.js";

const FIRST = 5;
const LANES = 4;
const WORDS = { info: "note", warning: "warning", bad: "problem" };
const GLYPHS = { info: "●", warning: "▲", bad: "■" };

export class Incidents {
  constructor(shared) {
    this.shared = shared;
    this.isAll = false;
    this.onlyProblems = false;
    this.count = h("span", { class: "count" });
    this.filter = h("button", { type: "button", class: "quiet", "aria-pressed": false, click: () => {
      this.onlyProblems = !this.onlyProblems;
      setAttribute(this.filter, "aria-pressed", this.onlyProblems);
      this.update(this.state);
    } }, "only problems");
    this.lanes = svg("g", {});
    this.ticks = svg("g", {});
    this.timeline = svg("svg", { class: "timeline", role: "img" }, this.ticks, this.lanes);
    this.list = h("ol", { class: "incident-list", reversed: true });
    this.more = h("button", { type: "button", class: "quiet more", click: () => {
      this.isAll = !this.isAll;
      this.update(this.state);
    } });
    this.empty = h("p", { class: "empty" }, "Nothing has happened so far.");
    this.element = h("section", { class: "card incidents" },
      h("div", { class: "card-head" }, h("h2", {}, "Incidents"), this.count, h("span", { class: "grow" }), this.filter),
      this.timeline, this.empty, this.list, this.more);
  }

  reset() {
    this.isAll = false;
  }

  update(state) {
    this.state = state;
    const all = Object.values(state.page.incidents ?? {}).sort((a, b) => b.begin_ms - a.begin_ms || b.number - a.number);
    const until = state.bounds ? state.now : Infinity;
    const known = all.filter((each) => each.begin_ms <= until && (!this.onlyProblems || each.severity !== "info"));
    show(this.empty, known.length === 0);
    setText(this.empty, this.onlyProblems ? "No problem so far." : "Nothing has happened so far.");
    const problems = all.filter((each) => each.severity !== "info" && each.begin_ms <= until).length;
    setText(this.count, problems ? `${problems} of ${all.length} were problems` : "");
    this.drawTimeline(state, all);
    this.drawList(known);
  }

  drawTimeline(state, all) {
    const width = this.timeline.clientWidth;
    this.timeline.style.display = all.length ? "" : "none";
    if (!width || !all.length) return;
    const [begin, end] = span(state, this.shared);
    const px = (ms) => Math.round((10 * (width * (ms - begin))) / (end - begin)) / 10;
    const inside = all.filter((each) => (each.end_ms || state.now) >= begin && each.begin_ms <= end).slice(0, 200).reverse();
    const ends = new Array(LANES).fill(-Infinity);
    const placed = inside.map((each) => {
      const from = Math.max(0, px(each.begin_ms));
      const to = Math.max(from + 9, Math.min(width, px(each.end_ms || Math.min(state.now, end))));
      let lane = ends.findIndex((last) => last + 2 <= from);
      if (lane < 0) lane = LANES - 1;
      ends[lane] = to;
      return { each, from, to, lane };
    });
    const lanes = Math.max(1, ...placed.map(({ lane }) => lane + 1));
    const height = lanes * 14 + 20;
    setAttribute(this.timeline, "viewBox", `0 0 ${width} ${height}`);
    setAttribute(this.timeline, "height", height);
    this.drawTicks(width, height, begin, end);
    const byNumber = new Map(placed.map((item) => [String(item.each.number), item]));
    keyed(this.lanes, [...byNumber.keys()], () => svg("g", { class: "bar" }, svg("rect", { height: 10, rx: 3 }), svg("title")),
      (bar, key) => {
        const { each, from, to, lane } = byNumber.get(key);
        const [rect, title] = bar.children;
        setAttribute(rect, "x", from);
        setAttribute(rect, "width", to - from);
        setAttribute(rect, "y", lane * 14 + 2);
        setAttribute(bar, "data-tone", each.severity);
        setAttribute(bar, "data-open", each.end_ms ? null : "true");
        setText(title, `${clock(each.begin_ms)} ${each.title}${each.cost ? `: ${each.cost}` : ""}`);
      });
    const bad = inside.filter((each) => each.severity !== "info").length;
    setAttribute(this.timeline, "aria-label", `Timeline of ${inside.length} incidents, ${bad} of them problems, from `
      + `${clock(begin)} to ${clock(end)}. The list below has them in words.`);
  }

  drawTicks(width, height, begin, end) {
    const count = Math.max(2, Math.min(9, Math.floor(width / 120)));
    keyed(this.ticks, [...Array(count).keys()], () => svg("g", { class: "tick" }, svg("line"), svg("text")), (tick, index) => {
      const x = (width * index) / (count - 1);
      const [mark, text] = tick.children;
      for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: height - 16 })) setAttribute(mark, name, value);
      setAttribute(text, "x", x);
      setAttribute(text, "y", height - 3);
      setAttribute(text, "text-anchor", index === 0 ? "start" : index === count - 1 ? "end" : "middle");
      setText(text, axisTime(begin + ((end - begin) * index) / (count - 1), (end - begin) / (count - 1)));
    });
  }

  drawList(known) {
    const listed = this.isAll ? known : known.slice(0, FIRST);
    const byNumber = new Map(listed.map((each) => [String(each.number), each]));
    keyed(this.list, [...byNumber.keys()], () => incidentItem(), (item, key) => updateItem(item, byNumber.get(key), this.state));
    show(this.more, known.length > FIRST);
    setText(this.more, this.isAll ? "show fewer" : `show all ${known.length}`);
  }
}

function incidentItem() {
  const part = (name) => h("span", { class: name });
  const details = h("ul", { class: "details" });
  const item = h("li", {}, h("time", {}), h("span", { class: "mark", "aria-hidden": "true" }), part("visually-hidden"),
    h("div", { class: "words" }, part("title"), part("cost"), h("p", { class: "reason" }), details));
  item.details = details;
  return item;
}

function updateItem(item, incident, state) {
  const [time, mark, word, words] = item.children;
  setText(time, clock(incident.begin_ms));
  setAttribute(item, "data-tone", incident.severity);
  setText(mark, GLYPHS[incident.severity] ?? "●");
  setText(word, `${WORDS[incident.severity]}: `);
  const [title, cost, reason, details] = words.children;
  setText(title, incident.title);
  const isOpen = !incident.end_ms || (state.bounds && incident.end_ms > state.now);
  setAttribute(item, "data-open", isOpen ? "true" : null);
  setText(cost, isOpen ? `not over, ${duration(Math.max(0, state.now - incident.begin_ms))} so far` : incident.cost ?? "");
  setText(reason, incident.reason ?? "");
  show(reason, Boolean(incident.reason));
  const lines = incident.details ?? [];
  show(details, lines.length > 0);
  keyed(details, lines, (text) => h("li", {}, text), () => {});
}
