// Small tools for the DOM. Text is always set as text, never as markup: names of peers come from the run.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; an attribute that is a function is a listener. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (typeof value === "boolean" && name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Set text, an attribute or visibility only if it changed: an unchanged page costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

/** Make the children of `parent` those of `keys`, in this order: kept by key, made by `make`, updated by `update`. */
export function keyed(parent, keys, make, update) {
  const known = parent.keyed ?? (parent.keyed = new Map());
  const wanted = new Set(keys);
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
  let next = parent.firstElementChild;
  for (const key of keys) {
    let element = known.get(key);
    if (!element) {
      element = make(key);
      known.set(key, element);
    }
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
    update(element, key);
  }
}

/** The colours of the theme for canvases, by the names of the variables of the style sheet. */
const probes = new Map();
let colours = new Map();
export function colour(name) {
  if (!colours.has(name)) {
    if (!probes.has(name)) {
      const probe = h("i", { hidden: true });
      probe.style.color = `var(--${name})`;
      document.body.append(probe);
      probes.set(name, probe);
    }
    colours.set(name, getComputedStyle(probes.get(name)).color);
  }
  return colours.get(name);
}

export function rgb(name) {
  return (colour(name).match(/[\d.]+/g) ?? []).slice(0, 3).map(Number);
}

const themeListeners = new Set();
export function onTheme(listener) {
  themeListeners.add(listener);
}

export function themeChanged() {
  colours = new Map();
  for (const listener of themeListeners) listener();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

/** A canvas of the size of its box, in device pixels; returns its context, scaled to CSS pixels. */
export function sized(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
