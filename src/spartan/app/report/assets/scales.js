"use strict";
// Axes, ticks, numbers as text, and the shapes of points.

const esc = text => String(text).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const clamp = (v, a, b) => Math.min(Math.max(v, a), b);
const known = v => v !== null && Number.isFinite(v);

// How a value becomes a place on an axis, and back. Sparsity runs towards 100% by nines.
const SCALES = {
  linear: { to: v => v, from: t => t },
  log: { to: v => Math.log10(v), from: t => 10 ** t },
  sparsity: { to: v => -Math.log10(Math.max(1 - v / 100, 1e-9)), from: t => 100 * (1 - 10 ** -t) },
};
const NINES = [0, 50, 70, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.99];

function linearTicks(a, b, count, whole) {
  const raw = (b - a) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw || 1));
  let step = power * ([1, 2, 2.5, 5, 10].find(m => m * power >= raw * 0.999) || 10);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(a / step - 1e-9); i * step <= b + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function ticksOf(kind, a, b, count, whole) {
  let ticks = [];
  if (kind === "log") {
    const decades = Math.log10(b / a), room = count / decades;
    const parts = room < 2.2 ? [1] : room < 3.5 ? [1, 3] : decades > 1 ? [1, 2, 5] : [1, 2, 3, 5, 7];
    const every = Math.max(1, Math.ceil(decades / count));
    for (let e = Math.floor(Math.log10(a)); e <= Math.log10(b); e++)
      if (every === 1 || e % every === 0) for (const p of parts) ticks.push(+(p * 10 ** e).toPrecision(6));
  } else if (kind === "sparsity") ticks = NINES;
  ticks = ticks.filter(t => t >= a * (1 - 1e-9) && t <= b * (1 + 1e-9));
  return ticks.length < 2 ? linearTicks(a, b, count, whole) : ticks;
}

function tickText(v) {
  const size = Math.abs(v);
  for (const [n, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= n) return +(v / (unit === "k" ? 1e3 : n)).toPrecision(4) + unit;
  if (size > 0 && size < 1e-3) return v.toExponential().replace("-", "−");
  return String(+v.toPrecision(6)).replace("-", "−");
}

function valueText(v, unit = "") {
  if (!known(v)) return "–";
  const size = Math.abs(v);
  if (size > 0 && size < 1e-3) return v.toExponential(2) + unit;
  const digits = Number.isInteger(v) && !unit ? 0 : size >= 1000 ? 0 : size >= 1 ? 2 : 4;
  return v.toLocaleString("en", { minimumFractionDigits: unit ? Math.min(digits, 2) : 0, maximumFractionDigits: digits }) + unit;
}

const MARKERS = [
  (x, y) => `<circle cx="${x}" cy="${y}" r="4"/>`,
  (x, y) => `<rect x="${x - 3.6}" y="${y - 3.6}" width="7.2" height="7.2"/>`,
  (x, y) => `<path d="M${x} ${y - 5}l4.8 8.4h-9.6z"/>`,
  (x, y) => `<path d="M${x} ${y - 5}l5 5l-5 5l-5 -5z"/>`,
  (x, y) => `<path d="M${x} ${y + 5}l4.8 -8.4h-9.6z"/>`,
];
