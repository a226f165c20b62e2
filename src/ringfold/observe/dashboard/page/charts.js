// Series over time, one below the other on one axis, with marks of incidents across all of them.

import { colour, h, keyed, onTheme, setAttribute, setText, show, sized } from "./dom.js";
import { axisTime, clock, duration, rate, significant } from "./format.js";

export const WINDOWS = [[5 * 60e3, "5 min"], [30 * 60e3, "30 min"], [4 * 3600e3, "4 h"], [36 * 3600e3, "36 h"],
  [14 * 86400e3, "14 d"]];
const LEFT = 56;
const RIGHT = 10;
const ORDER = ["log.loss", "steps", "ops", "sent"];
const SHOWN = ["info", "warning", "bad"];

/** The span of time that charts and timeline show: the window before now, or the whole of a replay. */
export function span(state, shared) {
  if (state.bounds && shared.windowMs === 0) return [state.bounds[0], Math.max(state.bounds[1], state.bounds[0] + 1000)];
  const end = state.now;
  const begin = end - shared.windowMs;
  const first = Math.min(...Object.values(state.series).map((series) => firstOf(series)));
  return [Number.isFinite(first) ? Math.max(begin, Math.min(first, end - 60e3)) : begin, end];
}

function firstOf(series) {
  return Math.min(...series.tiers.map((tier) => tier.buckets[0]?.[0] ?? Infinity));
}

export class Charts {
  constructor(shared, redraw) {
    this.shared = shared;
    this.redraw = redraw;
    this.windows = h("div", { class: "tabs", role: "group", "aria-label": "span of time" });
    this.list = h("div", { class: "chart-list" });
    this.recovery = new Chart("recovery", this);
    this.axis = h("canvas", { class: "axis", "aria-hidden": "true" });
    this.empty = h("p", { class: "empty" }, "Nothing to plot yet.");
    this.element = h("section", { class: "card charts" },
      h("div", { class: "card-head" }, h("h2", {}, "Over time"), this.windows), this.empty, this.list,
      this.recovery.element, this.axis);
    this.charts = new Map();
    onTheme(() => this.state && this.update(this.state));
  }

  update(state) {
    this.state = state;
    this.updateWindows(state);
    const names = Object.keys(state.series).sort((a, b) => place(a) - place(b) || a.localeCompare(b));
    show(this.empty, names.length === 0);
    keyed(this.list, names, (name) => {
      const chart = new Chart(name, this);
      this.charts.set(name, chart);
      return chart.element;
    }, () => {});
    for (const [name, chart] of this.charts) {
      if (state.series[name]) chart.update(state);
      else this.charts.delete(name);
    }
    this.recovery.update(state);
    show(this.axis, names.length > 0);
    if (names.length) this.drawAxis(state);
  }

  updateWindows(state) {
    const choices = state.bounds ? [[0, "all"], ...WINDOWS.slice(0, 3)] : WINDOWS;
    if (!choices.some(([ms]) => ms === this.shared.windowMs)) this.shared.windowMs = choices[0][0];
    keyed(this.windows, choices.map(([ms]) => ms), (ms) => h("button", { type: "button", click: () => {
      this.shared.windowMs = ms;
      this.redraw();
    } }, choices.find(([each]) => each === ms)[1]), (button, ms) => setAttribute(button, "aria-pressed", ms === this.shared.windowMs));
  }

  drawAxis(state) {
    const width = this.axis.clientWidth;
    if (!width) return;
    const context = sized(this.axis, width, 16);
    const [begin, end] = span(state, this.shared);
    context.fillStyle = colour("muted");
    context.font = "11px Inter, system-ui, sans-serif";
    context.textBaseline = "top";
    const count = Math.max(2, Math.min(6, Math.floor(width / 110)));
    for (let tick = 0; tick < count; tick++) {
      const at = LEFT + ((width - LEFT - RIGHT) * tick) / (count - 1);
      context.textAlign = tick === 0 ? "left" : tick === count - 1 ? "right" : "center";
      context.fillText(axisTime(begin + ((end - begin) * tick) / (count - 1), (end - begin) / (count - 1)), at, 2);
    }
  }
}

class Chart {
  constructor(name, owner) {
    this.name = name;
    this.owner = owner;
    this.title = h("h3", {});
    this.value = h("span", { class: "chart-value" });
    this.canvas = h("canvas", { tabindex: "0", role: "img" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, this.title, this.value), h("div", { class: "plot" }, this.canvas));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event.offsetX));
    this.canvas.addEventListener("mouseleave", () => this.setHover(null));
    this.canvas.addEventListener("blur", () => this.setHover(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get series() {
    return this.owner.state.series[this.name];
  }

  format(value) {
    if (this.name === "recovery") return duration(value);
    if (this.series?.unit === "B/s") return rate(value);
    return `${significant(value, 4)}${this.series?.unit ?? ""}`;
  }

  update(state) {
    if (this.name === "recovery") show(this.element, recoveries(state, span(state, this.owner.shared)).length > 0);
    const width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    if (!width || !this.height) return;
    const bounds = span(state, this.owner.shared);
    const points = this.name === "recovery" ? recoveries(state, bounds) : visible(this.series, bounds);
    this.points = points;
    setText(this.title, this.name === "recovery" ? "Recovery times" : title(this.name, this.series));
    this.draw(sized(this.canvas, width, this.height), width, state, bounds, points);
    this.describe(state, bounds, points);
  }

  draw(context, width, state, bounds, points) {
    const y = scale(points, this.name);
    const area = { left: LEFT, right: width - RIGHT, top: 6, bottom: this.height - 4 };
    const px = (ms) => area.left + ((ms - bounds[0]) / (bounds[1] - bounds[0])) * (area.right - area.left);
    const py = (value) => area.bottom - ((value - y.low) / (y.high - y.low)) * (area.bottom - area.top);
    this.px = px;
    context.font = "11px Inter, system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    for (const tick of y.ticks) {
      context.strokeStyle = colour("grid");
      line(context, area.left, py(tick), area.right, py(tick));
      context.fillStyle = colour("muted");
      context.fillText(this.name === "recovery" ? duration(tick) : axisValue(tick, this.series?.unit), area.left - 6, py(tick));
    }
    marks(context, state, bounds, px, area);
    if (this.name === "recovery") stems(context, points, px, py, area);
    else curve(context, points, px, py);
    const cursor = this.owner.shared.hover ?? (state.bounds ? state.now : null);
    if (cursor !== null && cursor >= bounds[0] && cursor <= bounds[1]) {
      context.strokeStyle = colour("muted");
      line(context, px(cursor), area.top, px(cursor), area.bottom);
    }
  }

  describe(state, bounds, points) {
    const hover = this.owner.shared.hover;
    const at = hover ?? (state.bounds ? state.now : null);
    const found = at === null ? points.at(-1) : nearest(points, at);
    const text = !found ? "" : hover === null ? this.format(found[1]) : `${this.format(found[1])} at ${clock(found[0])}`;
    setText(this.value, text);
    if (!points.length) {
      setAttribute(this.canvas, "aria-label", `${this.title.textContent}: nothing in this span of time`);
      return;
    }
    const low = Math.min(...points.map((point) => point[2]));
    const high = Math.max(...points.map((point) => point[3]));
    setAttribute(this.canvas, "aria-label", `${this.title.textContent}: ${this.format(points.at(-1)[1])} now, `
      + `from ${this.format(low)} to ${this.format(high)} since ${clock(bounds[0])}. Arrow keys read values.`);
  }

  hover(x) {
    const width = this.canvas.clientWidth;
    const bounds = span(this.owner.state, this.owner.shared);
    const at = bounds[0] + ((x - LEFT) / (width - LEFT - RIGHT)) * (bounds[1] - bounds[0]);
    this.setHover(Math.max(bounds[0], Math.min(bounds[1], at)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.points?.length) return;
    event.preventDefault();
    const now = this.owner.shared.hover;
    const index = now === null ? this.points.length - 1 : this.points.indexOf(nearest(this.points, now)) + step;
    const point = this.points[Math.max(0, Math.min(this.points.length - 1, index))];
    this.setHover(point[0]);
    setText(document.getElementById("announcer"), `${this.format(point[1])} at ${clock(point[0])}`);
  }

  setHover(at) {
    this.owner.shared.hover = at;
    this.owner.redraw();
  }
}

function place(name) {
  const index = ORDER.indexOf(name);
  return index < 0 ? (name.startsWith("log.") ? 1.5 : 9) : index;
}

function title(name, series) {
  return name === "log.loss" ? "Loss" : series.title;
}

/** The finest buckets that there are, and coarser ones for what is older. */
export function visible(series, [begin, end]) {
  const points = [];
  let until = Infinity;
  const spanMs = end - begin;
  for (const tier of series.tiers) {
    // A tier with many buckets for a pixel is left to the next one.
    if (tier !== series.tiers.at(-1) && spanMs / tier.width > 1200) continue;
    const first = tier.buckets[0];
    if (!first) continue;
    for (let index = tier.buckets.length - 1; index >= 0; index--) {
      const bucket = tier.buckets[index];
      const middle = bucket[0] + tier.width / 2;
      if (bucket[0] + tier.width > until) continue;
      if (bucket[0] > end) continue;
      if (middle < begin - tier.width) break;
      points.push([middle, bucket[1], bucket[2], bucket[3], tier.width]);
    }
    until = Math.min(until, first[0]);
    if (until <= begin) break;
  }
  return points.reverse();
}

function recoveries(state, [begin, end]) {
  return Object.values(state.page.incidents ?? {})
    .filter((each) => each.pause_ms > 0 && each.begin_ms >= begin && each.begin_ms <= end)
    .map((each) => [each.begin_ms, each.pause_ms, each.pause_ms, each.pause_ms, each.severity]);
}

function nearest(points, at) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
  return best;
}

/** Limits and three round ticks. Rates begin at zero; a loss fills its chart. */
function scale(points, name) {
  let low = name.startsWith("log.") ? Infinity : 0;
  let high = -Infinity;
  for (const point of points) {
    low = Math.min(low, point[2]);
    high = Math.max(high, point[3]);
  }
  if (!points.length) [low, high] = [0, 1];
  if (high - low <= 1e-3 * Math.abs(high)) [low, high] = [Math.min(0, low), Math.max(high, 0) || 1];
  const raw = (high - low) / 2;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) ?? raw;
  const from = Math.floor(low / step) * step;
  const ticks = [];
  for (let tick = from; tick < high + 0.999 * step; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return { low: from, high: ticks.at(-1), ticks };
}

function axisValue(value, unit) {
  if (unit === "B/s") return rate(value).replace("bit/s", "b/s");
  return significant(value, 3);
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

function curve(context, points, px, py) {
  if (!points.length) return;
  const runs = [[points[0]]];
  for (let index = 1; index < points.length; index++) {
    const isGap = points[index][0] - points[index - 1][0] > 3.5 * Math.max(points[index][4], points[index - 1][4], 2000);
    if (isGap) runs.push([]);
    runs.at(-1).push(points[index]);
  }
  context.lineJoin = "round";
  for (const run of runs) {
    context.fillStyle = colour("accent-pale");
    context.beginPath();
    run.forEach((point, index) => context[index ? "lineTo" : "moveTo"](px(point[0]), py(point[3])));
    for (let index = run.length - 1; index >= 0; index--) context.lineTo(px(run[index][0]), py(run[index][2]));
    context.fill();
    context.strokeStyle = colour("accent");
    context.lineWidth = 1.6;
    context.beginPath();
    run.forEach((point, index) => context[index ? "lineTo" : "moveTo"](px(point[0]), py(point[1])));
    if (run.length === 1) context.lineTo(px(run[0][0]) + 2, py(run[0][1]));
    context.stroke();
  }
}

function stems(context, points, px, py, area) {
  for (const point of points) {
    const tone = colour(point[4] === "info" ? "accent" : point[4]);
    context.strokeStyle = tone;
    context.fillStyle = tone;
    context.lineWidth = 2;
    line(context, px(point[0]), area.bottom, px(point[0]), py(point[1]));
    context.beginPath();
    context.arc(px(point[0]), py(point[1]), 3.5, 0, 2 * Math.PI);
    context.fill();
  }
}

function marks(context, state, bounds, px, area) {
  for (const each of Object.values(state.page.incidents ?? {})) {
    if (each.severity === "info" || !SHOWN.includes(each.severity)) continue;
    const end = each.end_ms || state.now;
    if (end < bounds[0] || each.begin_ms > bounds[1]) continue;
    const from = Math.max(px(each.begin_ms), area.left);
    const width = Math.max(1, px(Math.min(end, bounds[1])) - from);
    context.fillStyle = colour(each.severity === "bad" ? "bad-pale" : "warning-pale");
    context.fillRect(from, area.top, width, area.bottom - area.top);
    context.fillStyle = colour(each.severity);
    context.fillRect(from, area.top, 1, area.bottom - area.top);
  }
}
