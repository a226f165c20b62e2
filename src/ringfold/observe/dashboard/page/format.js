// Numbers, times and rates for people.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clocks = new Map();

function clockFormat(options) {
  const key = JSON.stringify(options);
  if (!clocks.has(key)) clocks.set(key, new Intl.DateTimeFormat("en-GB", options));
  return clocks.get(key);
}

/** Three significant digits: 3.42, 34.2, 342, 18,204. */
export function number(value) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return size >= 1e7 ? value.toExponential(2) : plain.format(value);
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 100 ? 3 : size >= 1 ? 3 : 2)));
}

export function significant(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  return Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-4)
    ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
}

export function whole(value) {
  return value === undefined || value < 0 ? "–" : plain.format(value);
}

/** Bytes per second as bits, as the other commands do: 34.2 Mbit/s. */
export function rate(bytesPerSecond) {
  if (bytesPerSecond === undefined || bytesPerSecond < 0) return "–";
  const bits = bytesPerSecond * 8;
  if (bits >= 1e9) return `${short(bits / 1e9)} Gbit/s`;
  if (bits >= 1e6) return `${short(bits / 1e6)} Mbit/s`;
  if (bits >= 1e3) return `${short(bits / 1e3)} kbit/s`;
  return bits > 0 ? `${short(bits)} bit/s` : "0";
}

/** The same for a place with little room: 34M. */
export function tinyRate(bytesPerSecond) {
  const bits = (bytesPerSecond ?? 0) * 8;
  if (bits >= 1e9) return `${short(bits / 1e9)}G`;
  if (bits >= 1e6) return `${short(bits / 1e6)}M`;
  if (bits >= 1e3) return `${short(bits / 1e3)}k`;
  return bits > 0 ? short(bits) : "";
}

function short(value) {
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(value >= 10 ? 3 : 2)));
}

export function bytes(value) {
  if (value >= 2 ** 30) return `${short(value / 2 ** 30)} GiB`;
  if (value >= 2 ** 20) return `${short(value / 2 ** 20)} MiB`;
  if (value >= 2 ** 10) return `${short(value / 2 ** 10)} KiB`;
  return `${plain.format(value)} B`;
}

export function duration(ms) {
  if (ms === undefined || ms < 0) return "–";
  if (ms === 0) return "0 s";
  if (ms < 1) return `${short(ms * 1000)} µs`;
  if (ms < 1000) return `${short(ms)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** How long ago, without tenths that flicker: 8 s, 3 min, 2 h. */
export function ago(ms) {
  const s = Math.max(0, ms / 1000);
  if (s < 120) return `${Math.floor(s)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

export function micros(us) {
  if (us === undefined || us === null) return "–";
  const size = Math.abs(us);
  if (size >= 1e6) return `${short(us / 1e6 * Math.sign(us)) * Math.sign(us)} s`;
  if (size >= 1e3) return `${us < 0 ? "−" : ""}${short(size / 1e3)} ms`;
  if (size >= 1 || size === 0) return `${us < 0 ? "−" : ""}${short(size)} µs`;
  return `${us < 0 ? "−" : ""}${short(size * 1e3)} ns`;
}

export function clock(ms) {
  return clockFormat({ hour: "2-digit", minute: "2-digit", second: "2-digit" }).format(ms);
}

export function day(ms) {
  return clockFormat({ year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }).format(ms);
}

/** The time at a tick of an axis whose ticks are `step` apart. */
export function axisTime(ms, step) {
  if (step < 3 * 60e3) return clock(ms);
  if (step < 6 * 3600e3) return clockFormat({ hour: "2-digit", minute: "2-digit" }).format(ms);
  return clockFormat({ month: "short", day: "numeric", hour: "2-digit" }).format(ms);
}

export function plural(count, noun) {
  return `${plain.format(count)} ${noun}${count === 1 ? "" : "s"}`;
}
