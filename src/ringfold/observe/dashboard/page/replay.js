// A finished run, or up to three side by side: the same panels, with a slider of the time since each run's begin.

import { h, setAttribute, setText } from "./dom.js";
import { clock, day, duration } from "./format.js";
import { RunPanel } from "./panel.js";

const SPEEDS = [1, 10, 100];
const STEP_MS = 200;

export class Replay {
  constructor(message, connection, RunState) {
    this.connection = connection;
    this.runs = message.runs.map((run) => {
      const state = new RunState();
      state.page = run.page;
      state.series = run.series;
      state.bounds = [run.begin_ms, run.end_ms];
      state.fixedNow = run.begin_ms;
      return { state, begin: run.begin_ms, end: run.end_ms, incidents: run.page.incidents ?? {}, panel: null, name: run.name };
    });
    this.length = Math.max(1, ...this.runs.map((run) => run.end - run.begin));
    this.at = 0;
    this.speed = 1;
    this.isPlaying = false;
    this.pending = 0;
    this.bar = this.makeBar();
    for (const run of this.runs) {
      const title = this.runs.length > 1 ? `${run.name} · ${day(run.begin)}` : "";
      run.panel = new RunPanel(run.state, { send: () => {}, choose: null }, title);
    }
    this.panels = h("div", { class: `side-by-side runs-${this.runs.length}` }, ...this.runs.map((run) => run.panel.element));
    this.element = h("div", { class: "replay" }, this.panels, this.bar);
    this.timer = setInterval(() => this.step(), STEP_MS);
    this.seek(0);
  }

  makeBar() {
    this.play = h("button", { type: "button", class: "play", click: () => this.setPlaying(!this.isPlaying) }, "▶ play");
    this.slider = h("input", { type: "range", min: 0, max: this.length, step: 100, value: 0, "aria-label": "time of the replay",
      input: () => this.seek(Number(this.slider.value)) });
    this.marks = h("div", { class: "slider-marks", "aria-hidden": "true" });
    for (const run of this.runs) {
      for (const each of Object.values(run.incidents)) {
        if (each.severity === "info") continue;
        const mark = h("i", { "data-tone": each.severity, title: each.title });
        mark.style.left = `${(100 * (each.begin_ms - run.begin)) / this.length}%`;
        this.marks.append(mark);
      }
    }
    this.label = h("output", { class: "replay-time" });
    const speeds = h("div", { class: "tabs", role: "group", "aria-label": "speed" }, ...SPEEDS.map((speed) =>
      h("button", { type: "button", "aria-pressed": speed === 1, "data-speed": speed, click: () => this.setSpeed(speed) }, `×${speed}`)));
    this.speeds = speeds;
    const jump = (step, text, name) => h("button", { type: "button", class: "quiet", "aria-label": name, title: name,
      click: () => this.jump(step) }, text);
    return h("div", { class: "replay-bar", role: "group", "aria-label": "replay" }, this.play,
      jump(-1, "‹ incident", "incident before"), jump(1, "incident ›", "next incident"),
      h("div", { class: "slider" }, this.marks, this.slider), this.label, speeds);
  }

  setSpeed(speed) {
    this.speed = speed;
    for (const button of this.speeds.children) setAttribute(button, "aria-pressed", Number(button.dataset.speed) === speed);
  }

  setPlaying(isPlaying) {
    if (isPlaying && this.at >= this.length) this.at = 0;
    this.isPlaying = isPlaying;
    setText(this.play, isPlaying ? "⏸ pause" : "▶ play");
  }

  jump(step) {
    const times = this.runs.flatMap((run) => Object.values(run.incidents).filter((each) => each.severity !== "info")
      .map((each) => Math.max(0, each.begin_ms - run.begin + 500))).sort((a, b) => a - b);
    const next = step > 0 ? times.find((time) => time > this.at + 600) : times.findLast((time) => time < this.at - 600);
    if (next !== undefined) this.seek(next);
  }

  step() {
    if (!this.isPlaying || this.pending > 1) return;
    this.seek(Math.min(this.length, this.at + STEP_MS * this.speed));
    if (this.at >= this.length) this.setPlaying(false);
  }

  seek(at) {
    this.at = at;
    if (Number(this.slider.value) !== at) this.slider.value = at;
    const times = this.runs.map((run) => Math.min(run.end, run.begin + at));
    const text = `${clock(times[0])} · ${duration(at)} of ${duration(this.length)}`;
    setText(this.label, text);
    setAttribute(this.slider, "aria-valuetext", text);
    if (this.pending > 1) {
      this.wanted = times;
      return;
    }
    this.pending++;
    this.connection.send({ seek: times });
  }

  /** The states of all runs at the wanted times. While one is on its way, only the newest wish is kept. */
  receive(message) {
    this.pending = Math.max(0, this.pending - 1);
    message.pages.forEach((page, index) => {
      const run = this.runs[index];
      if (!run || !page) return;
      run.state.page = { ...page, incidents: run.incidents };
      run.state.fixedNow = message.at[index];
      if (message.links[index]) {
        run.state.links = new Map();
        run.state.addLinks(message.links[index]);
      }
      run.panel.update();
    });
    if (this.wanted) {
      const times = this.wanted;
      this.wanted = null;
      this.pending++;
      this.connection.send({ seek: times });
    }
  }
}
