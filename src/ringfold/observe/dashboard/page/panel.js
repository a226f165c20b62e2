// One run: the sentence on top, then its cards. Used once for a live run, and up to three times in a replay.

import { h, setAttribute, setText, show } from "./dom.js";
import { ago, duration, number, plural, significant, whole } from "./format.js";
import { Charts } from "./charts.js";
import { ClocksCard, MastersCard, PathsCard, RoundsCard, RunsCard, WaitsCard } from "./cards.js";
import { HeatMap } from "./heatmap.js";
import { Incidents } from "./incidents.js";
import { PeersTable } from "./peers.js";
import { Ring } from "./ring.js";

export const TONES = { ok: "●", note: "◐", warning: "▲", bad: "■", idle: "○", info: "●" };

export class RunPanel {
  /** `host` has `send(wanted)` and `choose(run)`; `title` names the panel where there are several. */
  constructor(state, host, title = "") {
    this.state = state;
    this.shared = { windowMs: state.bounds ? 0 : 5 * 60e3, hover: null };
    this.headline = new Headline(title);
    this.ring = new Ring((peer) => this.peers.open(peer));
    this.heatMap = new HeatMap((wanted) => host.send({ links: wanted }));
    this.charts = new Charts(this.shared, () => this.update());
    this.waits = new WaitsCard();
    this.incidents = new Incidents(this.shared);
    this.peers = new PeersTable();
    this.side = [new MastersCard(), new RunsCard(host.choose), new ClocksCard(), new RoundsCard(), new PathsCard()];
    this.element = h("section", { class: "panel", "aria-label": title || "run" },
      this.headline.element,
      h("div", { class: "cards" },
        this.waits.element,
        h("div", { class: "column left" }, this.ring.element, this.heatMap.element, this.incidents.element),
        h("div", { class: "column right" }, this.charts.element),
        h("div", { class: "column peers-column" }, this.peers.element),
        h("div", { class: "column side" }, ...this.side.map((card) => card.element)),
      ));
    this.observer = new ResizeObserver(() => this.state.page && this.update());
    this.observer.observe(this.element);
  }

  changedRun() {
    this.headline.said = "";
    this.incidents.reset();
  }

  update() {
    const state = this.state;
    setAttribute(this.element, "data-tone", state.page.headline.tone);
    setAttribute(this.element, "data-size", Object.keys(state.page.peers ?? {}).length > 32 ? "large" : "small");
    this.headline.update(state);
    this.waits.update(state);
    this.ring.update(state);
    this.heatMap.update(state);
    this.charts.update(state);
    this.incidents.update(state);
    this.peers.update(state);
    for (const card of this.side) card.update(state);
  }

  /** What changes with time alone. */
  tick() {
    this.headline.tick(this.state);
    this.waits.update(this.state);
  }

  close() {
    this.observer.disconnect();
    this.heatMap.close();
  }
}

/** The sentence: state, speed, members; then who is slow and why, and the last incident. */
class Headline {
  constructor(title) {
    this.said = "";
    this.glyph = h("span", { class: "glyph", "aria-hidden": "true" });
    this.word = h("span", {});
    this.pill = h("span", { class: "pill" }, this.glyph, " ", this.word);
    this.facts = h("span", { class: "facts" });
    this.why = h("p", { class: "why" });
    this.slow = h("p", { class: "line" });
    this.last = h("p", { class: "line" });
    this.element = h("div", { class: "headline" },
      title ? h("h2", { class: "panel-title" }, title) : null,
      h("p", { class: "sentence" }, this.pill, this.facts), this.why,
      h("div", { class: "lines" }, this.slow, this.last));
  }

  update(state) {
    const line = state.page.headline;
    setAttribute(this.pill, "data-tone", line.tone);
    setText(this.glyph, TONES[line.tone] ?? "●");
    setText(this.word, line.state);
    const facts = [];
    if (line.speed !== undefined && line.speed >= 0) facts.push([number(line.speed), line.unit ?? "steps/s"]);
    if (line.step !== undefined && line.step >= 0) facts.push([whole(line.step), "step", true]);
    for (const [name, value] of Object.entries(line.logged ?? {}).slice(0, 2)) {
      facts.push([Math.abs(value) >= 1000 ? number(value) : significant(value), name, true]);
    }
    if (line.peers) facts.push([whole(line.peers), line.peers === 1 ? "peer" : "peers"]);
    if (line.epoch) facts.push([whole(line.epoch), "epoch", true]);
    const key = JSON.stringify(facts);
    if (key !== this.factsKey) {
      this.factsKey = key;
      this.facts.replaceChildren(...facts.map(([value, unit, isBefore]) => h("span", { class: "fact" },
        isBefore ? `${unit} ` : "", h("b", {}, value), isBefore ? "" : ` ${unit}`)));
    }
    setText(this.why, line.why ?? "");
    show(this.why, Boolean(line.why));
    const nothingSlow = line.tone === "ok" && line.peers > 1 ? "nobody slows the others down" : "";
    setText(this.slow, line.slow ? `slow: ${line.slow}` : nothingSlow);
    setAttribute(this.slow, "data-tone", line.slow ? "warning" : "ok");
    show(this.slow, this.slow.textContent !== "");
    this.tick(state);
    this.announce(line);
  }

  tick(state) {
    const line = state.page.headline;
    let text = "";
    if (line.last) {
      const away = state.now - line.last_ms;
      text = line.last_open ? `now: ${line.last}, for ${duration(Math.max(0, away))}` : `${ago(away)} ago: ${line.last}`;
    } else if (line.peers) text = "no incident so far";
    setText(this.last, text);
    setAttribute(this.last, "data-tone", line.last ? (line.last_open ? "bad" : "note") : "ok");
    show(this.last, text !== "");
  }

  /** Screen readers hear changes of the state and new incidents, not every number. */
  announce(line) {
    const said = `${line.state}. ${plural(line.peers ?? 0, "peer")}. ${line.last ?? ""}`;
    if (said === this.said) return;
    this.said = said;
    setText(document.getElementById("announcer"), said);
  }
}
