// The ring as a ring: members on a circle, in their order; arcs are links, with what they send now and over what.

import { h, keyed, setAttribute, setText, show, svg } from "./dom.js";
import { plural, rate, tinyRate } from "./format.js";

const R = 150;
const LABELLED = 16;
const NAMED = 12;
const KINDS = { tcp: "TCP", shm: "shared memory", mixed: "both", unknown: "not connected" };

export class Ring {
  constructor(open) {
    this.open = open;
    this.group = null;
    this.title = h("h2", {}, "Ring");
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "group" });
    this.links = svg("g", {});
    this.nodes = svg("g", {});
    this.labels = svg("g", {});
    this.centre = ["big", "small", "small"].map((kind, index) =>
      svg("text", { class: `centre ${kind}`, x: 0, y: [-8, 18, 38][index] }));
    this.drawing = svg("svg", { viewBox: "-245 -205 490 410", role: "img", class: "ring-drawing" },
      this.links, this.nodes, this.labels, ...this.centre);
    this.legend = h("p", { class: "legend" });
    this.empty = h("p", { class: "empty" }, "No ring yet: nobody has joined.");
    this.element = h("section", { class: "card ring" },
      h("div", { class: "card-head" }, this.title, this.tabs), this.drawing, this.empty, this.legend);
  }

  update(state) {
    const groups = Object.values(state.page.groups ?? {});
    const group = groups.find((each) => each.group === this.group) ?? groups[0];
    show(this.empty, !group);
    show(this.legend, Boolean(group));
    this.drawing.style.display = group ? "" : "none";
    this.updateTabs(groups, group, state);
    if (group) this.draw(group, state.page);
  }

  updateTabs(groups, chosen, state) {
    show(this.tabs, groups.length > 1);
    if (groups.length < 2) return;
    keyed(this.tabs, groups.slice(0, 24).map((group) => group.group),
      (key) => h("button", { type: "button", click: () => { this.group = key; this.update(state); } }, `group ${key}`),
      (button, key) => setAttribute(button, "aria-pressed", key === chosen.group));
  }

  draw(group, page) {
    const ring = group.ring ?? [];
    const count = ring.length;
    const radius = count > 128 ? 3.2 : count > 64 ? 5 : count > 32 ? 8 : count > LABELLED ? 12 : count > 8 ? 17 : 21;
    const place = new Map(ring.map((peer, index) => [peer, -Math.PI / 2 + (2 * Math.PI * index) / Math.max(1, count)]));
    this.drawNodes(ring, place, radius, page);
    this.drawLinks(group, place, radius);
    this.drawLabels(group, ring, place, radius, page);
    setText(this.centre[0], plural(count, "peer"));
    setText(this.centre[1], `epoch ${group.epoch}`);
    const phase = group.phase === "idle" ? "" : group.phase;
    setText(this.centre[2], phase);
    const kinds = new Set(Object.values(group.links ?? {}).map((link) => link.kind));
    const lanes = new Set(Object.values(group.links ?? {}).map((link) => link.lanes ?? 0));
    const bad = Object.values(group.links ?? {}).filter((link) => link.tone).map((link) => `${link.source} to ${link.target}`);
    this.updateLegend(kinds, lanes, group);
    setAttribute(this.drawing, "aria-label",
      `Ring of ${plural(count, "peer")}, epoch ${group.epoch}: ${ring.slice(0, 32).join(", ")}${count > 32 ? ", and more" : ""}. `
      + `Links over ${[...kinds].map((kind) => KINDS[kind]).join(" and ") || "nothing"}. `
      + (bad.length ? `Slow links: ${bad.slice(0, 8).join(", ")}.` : "No slow link."));
  }

  drawNodes(ring, place, radius, page) {
    keyed(this.nodes, ring, (peer) => {
      const text = svg("text", { class: "node-id", dy: "0.36em" }, String(peer));
      const title = svg("title");
      return svg("g", { class: "node", click: () => this.open(peer) }, svg("circle"), text, title);
    }, (node, peer) => {
      const row = page.peers?.[peer];
      const angle = place.get(peer);
      setAttribute(node, "transform", `translate(${(R * Math.cos(angle)).toFixed(1)} ${(R * Math.sin(angle)).toFixed(1)})`);
      const [circle, text, title] = node.children;
      setAttribute(circle, "r", radius);
      setAttribute(node, "data-tone", row?.tone ?? (row ? "ok" : "idle"));
      text.style.display = radius >= 8 ? "" : "none";
      text.style.fontSize = radius >= 17 ? "15px" : radius >= 12 ? "11px" : "8px";
      setText(title, row ? `peer ${peer} (${row.name}, ${row.host}): ${row.problem ?? row.state}` : `peer ${peer}`);
    });
  }

  drawLinks(group, place, radius) {
    const links = Object.entries(group.links ?? {});
    const fastest = Math.max(1, ...links.map(([, link]) => link.rate ?? 0));
    const gap = (radius + (links.length > 64 ? 0.5 : 4)) / R;
    keyed(this.links, links.map(([key]) => key), () => svg("g", { class: "arc" }, svg("path"), svg("path", { class: "inner" }),
      svg("path", { class: "head" }), svg("title")), (arc, key) => {
      const link = group.links[key];
      const begin = place.get(link.source) + gap;
      let end = place.get(link.target) - gap;
      while (end < begin - 1e-6) end += 2 * Math.PI;
      const width = links.length > 64 ? 2.5 : 2 + 4 * Math.sqrt((link.rate ?? 0) / fastest);
      const head = links.length > 64 ? 0 : Math.min(7 + width, ((end - begin) * R) / 2);
      const shaft = end - head / R;
      setAttribute(arc, "data-kind", link.kind);
      setAttribute(arc, "data-tone", link.tone ?? "ok");
      const [path, inner, arrow, title] = arc.children;
      const d = arcPath(begin, Math.max(begin, shaft));
      setAttribute(path, "d", d);
      setAttribute(path, "stroke-width", width.toFixed(1));
      setAttribute(inner, "d", link.kind === "shm" ? d : "");
      setAttribute(inner, "stroke-width", Math.max(0.8, width / 3).toFixed(1));
      setAttribute(arrow, "d", head > 3 ? headPath(shaft, end, 3 + width / 1.4) : "");
      const known = link.known ? `; known to carry ${rate(link.known)}` : "";
      setText(title, `${link.source} → ${link.target}: sends ${rate(link.rate ?? 0)} over ${KINDS[link.kind]}, `
        + `${plural(link.lanes ?? 0, "lane")}${known}`);
    });
  }

  drawLabels(group, ring, place, radius, page) {
    const labels = [];
    const links = Object.values(group.links ?? {});
    const rank = { bad: 0, warning: 1 };
    const told = links.length <= LABELLED ? links : links.filter((link) => link.tone)
      .sort((a, b) => rank[a.tone] - rank[b.tone]).slice(0, 6);
    for (const link of told) {
      const text = tinyRate(link.rate);
      if (!text) continue;
      const begin = place.get(link.source);
      let end = place.get(link.target);
      while (end <= begin) end += 2 * Math.PI;
      labels.push({ key: `l${link.source}`, text, angle: (begin + end) / 2, at: R - (links.length > LABELLED ? 26 : 22),
        kind: link.tone ? "label slow" : "label" });
    }
    const every = ring.length > 64 ? 32 : 8;
    const odd = ring.map((peer) => ["warning", "bad"].includes(page.peers?.[peer]?.tone));
    const isNearOdd = (index) => [-3, -2, -1, 1, 2, 3].some((step) => odd.at((index + step) % ring.length));
    ring.forEach((peer, index) => {
      const row = page.peers?.[peer];
      const isOdd = odd[index];
      if (ring.length > 32 && !isOdd && isNearOdd(index)) return;
      if (ring.length > 32 ? isOdd || index % every === 0 : ring.length <= NAMED) {
        const text = ring.length <= NAMED ? cut(row?.name ?? "", 14) : String(peer);
        labels.push({ key: `n${peer}`, text, angle: place.get(peer), at: R + radius + 9, kind: isOdd ? "label slow" : "label" });
      }
    });
    if (ring.length > 32) spread(labels);
    const byKey = new Map(labels.map((label) => [label.key, label]));
    keyed(this.labels, [...byKey.keys()], () => svg("text", { dy: "0.36em" }), (element, key) => {
      const label = byKey.get(key);
      const x = Math.cos(label.angle) * label.at;
      setAttribute(element, "x", x.toFixed(1));
      setAttribute(element, "y", (Math.sin(label.angle) * label.at).toFixed(1));
      const isInner = key[0] === "l";
      const side = Math.abs(Math.cos(label.angle)) < 0.25 ? "middle" : (x > 0) !== isInner ? "start" : "end";
      setAttribute(element, "text-anchor", side);
      setAttribute(element, "class", label.kind);
      setText(element, label.text);
    });
  }

  updateLegend(kinds, lanes, group) {
    const count = [...lanes].filter(Boolean).sort((a, b) => a - b);
    const parts = [];
    for (const kind of kinds) parts.push(h("span", { class: "key" }, h("i", { class: `swatch ${kind}` }), KINDS[kind]));
    if (count.length) {
      const range = count.length > 1 ? `${count[0]} to ${count.at(-1)}` : count[0];
      parts.push(`${range} lane${count.at(-1) === 1 ? "" : "s"} a link`);
    }
    if (group.channels > 1) parts.push(`${group.channels} channels`);
    parts.push("labels: sent now, bit/s");
    if (group.avoided?.length) parts.push(`avoided: ${group.avoided.join(", ")}`);
    const key = parts.map((part) => part.textContent ?? part).join("·");
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
  }
}

function arcPath(begin, end) {
  const isLong = end - begin > Math.PI ? 1 : 0;
  return `M${point(begin, R)}A${R} ${R} 0 ${isLong} 1 ${point(end, R)}`;
}

function headPath(begin, end, half) {
  return `M${point(begin, R - half)}L${point(end, R)}L${point(begin, R + half)}Z`;
}

function point(angle, radius) {
  return `${(radius * Math.cos(angle)).toFixed(2)} ${(radius * Math.sin(angle)).toFixed(2)}`;
}

/** Push labels of near neighbours apart. */
function spread(labels) {
  const outer = labels.filter((label) => label.key[0] === "n").sort((a, b) => a.angle - b.angle);
  for (let index = 1; index < outer.length; index++) {
    const least = outer[index - 1].angle + 0.085;
    if (outer[index].angle < least) outer[index].angle = least;
  }
}

function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
