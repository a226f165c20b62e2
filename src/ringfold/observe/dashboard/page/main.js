// The page: messages of the dashboard become states of runs, and each run is shown by a panel.

import { Connection } from "./connection.js";
import { h, setText, show, themeChanged } from "./dom.js";
import { clock } from "./format.js";
import { RunPanel } from "./panel.js";
import { Replay } from "./replay.js";

const main = document.getElementById("runs");
const linkState = document.getElementById("link-state");
const banner = document.getElementById("banner");
const tokenForm = document.getElementById("token-form");
const switcher = document.getElementById("switcher");

/** What is known of one run, as plain values: the page of the server, its series, its links. */
class RunState {
  constructor() {
    this.page = null;
    this.series = {};
    this.links = new Map();
    this.linksVersion = 0;
    this.number = -1;
    this.skew = 0;
    this.fixedNow = null;
  }

  /** The time of the server, or of the slider. */
  get now() {
    return this.fixedNow ?? Date.now() + this.skew;
  }

  reset(message) {
    this.page = message.page;
    this.series = message.series;
    this.links = new Map();
    this.linksVersion++;
    this.number = message.number;
    this.note();
  }

  update(message) {
    this.page = patched(this.page, message.patch);
    for (const [name, tiers] of Object.entries(message.buckets)) {
      const series = this.series[name];
      if (!series) continue;
      tiers.forEach((buckets, index) => {
        const tier = series.tiers[index];
        tier.buckets.push(...buckets);
        if (tier.buckets.length > tier.limit) tier.buckets.splice(0, tier.buckets.length - tier.limit);
      });
    }
    this.number = message.number;
    this.note();
  }

  note() {
    if (this.page.at_ms) this.skew = this.page.at_ms - Date.now();
  }

  addLinks(message) {
    message.source.forEach((source, index) => {
      this.links.set(`${source}-${message.target[index]}`, {
        rate: message.rate[index], delay: message.delay[index], loss: message.loss[index], at: message.at[index],
        by: message.by[index],
      });
    });
    const known = this.page?.peers ?? {};
    for (const key of this.links.keys()) {
      const [source, target] = key.split("-");
      if (!known[source] || !known[target]) this.links.delete(key);
    }
    this.linksVersion++;
  }
}

/** JSON Merge Patch. */
function patched(value, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
  for (const [key, inner] of Object.entries(patch)) {
    if (inner === null) delete result[key];
    else result[key] = patched(result[key], inner);
  }
  return result;
}

let state = new RunState();
let panel = null;
let replay = null;
let waiting = false;
let lostAt = 0;

function receive(message) {
  if (message.kind === "hello" && message.mode === "live") {
    if (!panel) {
      panel = new RunPanel(state, { send: (wanted) => Object.entries(wanted).forEach(([k, v]) => connection.want(k, v)),
        choose: chooseRun });
      main.replaceChildren(panel.element);
    }
  } else if (message.kind === "replay") {
    replay = new Replay(message, connection, RunState);
    main.replaceChildren(replay.element);
    document.title = "Ringfold replay";
    connectionState("live");
  } else if (message.kind === "frame") {
    replay?.receive(message);
  } else if (message.kind === "snapshot") {
    const run = state.page?.run;
    state.reset(message);
    if (run !== state.page.run) panel?.changedRun();
    draw();
  } else if (message.kind === "update") {
    // A series that is new has a snapshot of its own: this page asks for the whole.
    if (Object.keys(message.buckets).some((name) => !state.series[name])) connection.send({ run: connection.wanted.run ?? "" });
    state.update(message);
    draw();
  } else if (message.kind === "links") {
    state.addLinks(message);
    draw();
  }
}

/** Draw in the next frame, once for several messages; a page in the background is not drawn. */
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (!panel || !state.page) return;
    panel.update();
    const line = state.page.headline;
    const title = `${state.page.run}: ${line.state} · Ringfold`;
    if (document.title !== title) document.title = title;
    updateSwitcher();
  });
}

function chooseRun(name) {
  connection.want("run", name);
}

let shownRuns = "";
function updateSwitcher() {
  const runs = state.page.runs ?? [];
  const key = JSON.stringify([runs.map((run) => [run.name, run.state, run.peers]), state.page.run]);
  if (key === shownRuns) return;
  shownRuns = key;
  if (runs.length < 2) {
    switcher.replaceChildren(h("span", { class: "run-name" }, state.page.run || ""));
    return;
  }
  const options = runs.map((run) =>
    h("option", { value: run.name, selected: run.name === state.page.run }, `${run.name} (${run.state}, ${run.peers})`));
  const select = h("select", { "aria-label": "run", change: () => chooseRun(select.value) }, ...options);
  switcher.replaceChildren(select);
}

function connectionState(what) {
  setText(linkState, what === "live" ? (replay ? "replay" : "live") : what === "lost" ? "reconnecting" : what);
  linkState.dataset.state = what;
  show(tokenForm, what === "wrong token");
  if (what === "lost" && !lostAt) lostAt = state.now;
  if (what === "live") lostAt = 0;
  const text = what === "lost" && state.page
    ? `The dashboard does not answer; this is how the run was at ${clock(lostAt)}. Trying again.` : "";
  setText(banner, text);
  show(banner, text !== "");
}

const connection = new Connection(receive, connectionState);
tokenForm.addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = `token=${encodeURIComponent(document.getElementById("token").value)}`;
  show(tokenForm, false);
  connection.reopen();
});

// The theme: that of the system, or a chosen one.
const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(themeButton, `◐ ${theme}`);
  themeButton.setAttribute("aria-label", `theme: ${theme}`);
  themeChanged();
}
function storedTheme() {
  try {
    return localStorage.getItem("ringfold-theme") ?? "auto";
  } catch {
    return "auto";
  }
}
themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(storedTheme()) + 1) % THEMES.length];
  try {
    localStorage.setItem("ringfold-theme", next);
  } catch { /* without storage it holds until the page is closed */ }
  setTheme(next);
});
setTheme(storedTheme());

// What counts by itself: "since" and "evicted in", also when nothing comes.
setInterval(() => {
  if (panel && state.page && !document.hidden) panel.tick();
}, 250);

connection.open();
