// What is known of all links, as a map: rows send, columns receive, both in the order of the rings.

import { colour, h, onTheme, rgb, setAttribute, setText, show, sized } from "./dom.js";
import { ago, micros, rate, significant } from "./format.js";

const TABS = {
  rate: { title: "rate", value: (link) => link.rate || null, text: (link) => rate(link.rate), better: 1 },
  delay: { title: "delay", value: (link) => link.delay, text: (link) => micros(link.delay), better: -1 },
  loss: { title: "loss", value: (link) => link.loss, text: (link) => `${significant(100 * link.loss, 2)} %`, better: 0 },
  age: { title: "age", value: (link, now) => now - link.at, text: (link, now) => `${ago(now - link.at)} ago`, better: -1 },
};

export class HeatMap {
  constructor(want) {
    this.want = want;
    this.tab = "rate";
    this.cell = null;
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "what the map shows" },
      ...Object.keys(TABS).map((name) => h("button", { type: "button", "data-tab": name, "aria-pressed": name === "rate",
        click: () => this.choose(name) }, TABS[name].title)));
    this.canvas = h("canvas", { tabindex: "0", role: "img", class: "map" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.legend = h("p", { class: "legend" }, h("span", { class: "ramp" }), h("span", {}));
    this.empty = h("p", { class: "empty" }, "No link is measured yet.");
    this.element = h("section", { class: "card links" },
      h("div", { class: "card-head" }, h("h2", {}, "Links"), this.tabs), this.canvas, this.empty, this.readout, this.legend);
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => this.select(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.cell ?? this.select([0, Math.min(1, this.order?.length - 1)]));
    this.observer = new IntersectionObserver((entries) => want(entries.at(-1).isIntersecting));
    this.observer.observe(this.element);
    onTheme(() => { this.drawn = ""; this.draw(); });
  }

  close() {
    this.observer.disconnect();
  }

  choose(tab) {
    this.isChosen = true;
    this.show(tab);
  }

  show(tab) {
    this.tab = tab;
    for (const button of this.tabs.children) setAttribute(button, "aria-pressed", button.dataset.tab === tab);
    this.drawn = "";
    this.draw();
    this.say();
  }

  update(state) {
    this.state = state;
    const page = state.page;
    const inRings = Object.values(page.groups ?? {}).flatMap((group) => group.ring ?? []);
    const seen = new Set(inRings);
    const others = Object.values(page.peers ?? {}).filter((peer) => !seen.has(peer.peer))
      .sort((a, b) => a.host.localeCompare(b.host) || a.peer - b.peer).map((peer) => peer.peer);
    this.order = [...inRings, ...others];
    if (!this.isChosen && this.tab === "rate" && state.links.size && ![...state.links.values()].some((link) => link.rate)) {
      this.show("delay");
    }
    const hasAny = state.links.size > 0 && this.order.length > 1;
    show(this.empty, !hasAny);
    for (const part of [this.canvas, this.readout, this.legend, this.tabs]) show(part, hasAny);
    if (hasAny) this.draw();
  }

  draw() {
    const state = this.state;
    if (!state || !this.order?.length || this.canvas.hidden) return;
    const width = this.canvas.clientWidth;
    const age = this.tab === "age" ? Math.floor(state.now / 5000) : 0;
    const key = [state.linksVersion, this.order.join(), this.tab, width, this.cell, age].join("|");
    if (key === this.drawn || !width) return;
    this.drawn = key;
    const count = this.order.length;
    const margin = count <= 32 ? 22 : 26;
    const size = Math.min(width, 360);
    const context = sized(this.canvas, width, size);
    this.canvas.style.height = `${size}px`;
    this.box = { left: margin, top: 2, side: size - margin - 2, count };
    const values = this.values();
    this.paint(context, values);
    this.axes(context);
    this.mark(context);
    this.describe(values);
  }

  /** By row and column, the value or NaN; and the middle of all. */
  values() {
    const { count } = this.box;
    const of = TABS[this.tab].value;
    const now = this.state.now;
    const index = new Map(this.order.map((peer, place) => [String(peer), place]));
    const cells = new Float64Array(count * count).fill(NaN);
    for (const [key, link] of this.state.links) {
      const dash = key.indexOf("-");
      const row = index.get(key.slice(0, dash));
      const column = index.get(key.slice(dash + 1));
      const value = of(link, now);
      if (row !== undefined && column !== undefined && value !== null && value !== undefined) cells[row * count + column] = value;
    }
    const known = cells.filter((value) => !Number.isNaN(value)).sort();
    return { cells, known, middle: known[known.length >> 1] ?? 1 };
  }

  paint(context, { cells, middle }) {
    const { left, top, side, count } = this.box;
    const ramp = [rgb("map-bad"), rgb("map-poor"), rgb("map-fair"), rgb("map-good")];
    const unknown = rgb("map-unknown");
    const self = rgb("map-self");
    const image = new ImageData(count, count);
    for (let row = 0; row < count; row++) {
      for (let column = 0; column < count; column++) {
        const value = cells[row * count + column];
        const shade = row === column ? self : Number.isNaN(value) ? unknown : mix(ramp, this.goodness(value, middle));
        image.data.set([shade[0], shade[1], shade[2], 255], 4 * (row * count + column));
      }
    }
    this.buffer ??= document.createElement("canvas");
    this.buffer.width = this.buffer.height = count;
    this.buffer.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.buffer, left, top, side, side);
    if (count <= 40) {
      context.strokeStyle = colour("card");
      context.lineWidth = count <= 16 ? 2 : 1;
      context.beginPath();
      for (let line = 0; line <= count; line++) {
        const at = (line * side) / count;
        context.moveTo(left + at, top);
        context.lineTo(left + at, top + side);
        context.moveTo(left, top + at);
        context.lineTo(left + side, top + at);
      }
      context.stroke();
    }
  }

  /** From 0 (bad) to 1 (good). Rates and delays are compared with the middle one: a quarter of it is bad. */
  goodness(value, middle) {
    if (this.tab === "loss") return value <= 0 ? 1 : Math.max(0, 0.62 - 0.25 * (Math.log10(value) + 3));
    if (this.tab === "age") return Math.max(0, 1 - Math.log10(1 + value / 5000) / 2.6);
    const doublings = TABS[this.tab].better * Math.log2(value / (middle || 1));
    return Math.max(0, Math.min(1, 0.68 + doublings * 0.3));
  }

  axes(context) {
    const { left, top, side, count } = this.box;
    context.fillStyle = colour("muted");
    context.font = "11px Inter, system-ui, sans-serif";
    const every = count <= 20 ? 1 : count <= 40 ? 4 : 32;
    for (let place = 0; place < count; place += every) {
      const middle = ((place + 0.5) * side) / count;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(this.order[place], left - 5, top + middle);
      context.textAlign = "center";
      context.textBaseline = "top";
      context.fillText(this.order[place], left + middle, top + side + 5);
    }
  }

  mark(context) {
    if (!this.cell) return;
    const { left, top, side, count } = this.box;
    const [row, column] = this.cell;
    const cell = side / count;
    context.strokeStyle = colour("text");
    context.lineWidth = 2;
    context.strokeRect(left + column * cell, top + row * cell, Math.max(3, cell), Math.max(3, cell));
  }

  describe({ known }) {
    const tab = TABS[this.tab];
    const example = (value) => tab.text({ rate: value, delay: value, loss: value, at: this.state.now - value }, this.state.now);
    const [worst, best] = tab.better > 0 ? [known[0], known.at(-1)] : [known.at(-1), known[0]];
    const text = known.length ? `${example(worst)} to ${example(best)}; rows send, columns receive` : "nothing known";
    setText(this.legend.lastElementChild, text);
    setAttribute(this.canvas, "aria-label", `Map of ${tab.title} of ${known.length} links, from ${text}. `
      + "Arrow keys read single links.");
  }

  point(event) {
    if (!this.box) return;
    const { left, top, side, count } = this.box;
    const column = Math.floor(((event.offsetX - left) / side) * count);
    const row = Math.floor(((event.offsetY - top) / side) * count);
    const isInside = row >= 0 && column >= 0 && row < count && column < count;
    this.select(isInside ? [row, column] : null);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move || !this.box) return;
    event.preventDefault();
    const [row, column] = this.cell ?? [0, 0];
    const last = this.box.count - 1;
    this.select([Math.max(0, Math.min(last, row + move[0])), Math.max(0, Math.min(last, column + move[1]))]);
  }

  select(cell) {
    this.cell = cell;
    this.draw();
    this.say();
  }

  say() {
    if (!this.cell || !this.order) {
      setText(this.readout, "Point at a cell, or use the arrow keys.");
      return;
    }
    const [source, target] = [this.order[this.cell[0]], this.order[this.cell[1]]];
    const link = this.state.links.get(`${source}-${target}`);
    if (source === target || !link) {
      setText(this.readout, source === target ? `peer ${source} itself` : `${source} → ${target}: not measured`);
      return;
    }
    const parts = [link.rate ? `${link.by === "collective" ? "at least " : ""}${rate(link.rate)}` : "rate not measured"];
    if (link.delay !== null && link.delay !== undefined) parts.push(micros(link.delay));
    if (link.loss !== null && link.loss !== undefined) parts.push(`${significant(100 * link.loss, 2)} % lost`);
    parts.push(`${link.by}, ${ago(this.state.now - link.at)} ago`);
    setText(this.readout, `${source} → ${target}: ${parts.join(", ")}`);
  }
}

function mix(ramp, goodness) {
  const at = Math.max(0, Math.min(1, goodness)) * (ramp.length - 1);
  const low = Math.min(ramp.length - 2, Math.floor(at));
  return ramp[low].map((value, index) => value + (ramp[low + 1][index] - value) * (at - low));
}
