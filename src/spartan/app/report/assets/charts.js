// Small SVG charts: lines, points with error bars, bars. A chart is described by the JSON that Python wrote.

class Chart {
  constructor(figure, spec) {
    Object.assign(this, { figure, base: spec, zoom: null, hidden: new Set(), view: 0, at: null, fingers: new Map() });
    this.spec = spec.views ? { ...spec, ...spec.views[0] } : spec;
    this.logY = this.spec.y.scale === "log";
    this.frame = spec.frames ? spec.frames.at.length - 1 : 0;
    this.controls = this.add("div", "controls");
    this.plot = this.add("div", "plot");
    Object.assign(this.plot, { tabIndex: 0 });
    this.plot.setAttribute("role", "img");
    this.plot.innerHTML = '<div class="canvas"></div><div class="tip" hidden></div><p class="hidden" aria-live="polite"></p>';
    [this.canvas, this.tip, this.live] = this.plot.children;
    if (spec.frames) this.slider();
    this.listen();
    this.buttons();
    // Drawn in the next frame: a size that changes while sizes are being reported is an error to the browser.
    new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(this.plot);
    this.draw();
  }

  add(tag, name, parent = this.figure) {
    const element = document.createElement(tag);
    element.className = name;
    return parent.appendChild(element);
  }

  // ------------------------------------------------------------------ what is seen

  get series() { return this.spec.series.filter(s => !this.hidden.has(s.name)); }
  get scaleX() { return SCALES[this.spec.x.scale || "linear"]; }
  get scaleY() { return SCALES[this.logY ? "log" : "linear"]; }

  rangeX() {
    let [a, b] = [Infinity, -Infinity];
    for (const s of this.spec.series) for (const x of s.x) { a = Math.min(a, this.scaleX.to(x)); b = Math.max(b, this.scaleX.to(x)); }
    if (this.spec.x.start !== undefined) a = Math.min(a, this.spec.x.start);
    for (const band of this.spec.bands || []) b = Math.max(b, this.scaleX.to(band.to));
    const pad = this.spec.bar ? this.spec.bar / 2 : this.spec.x.scale ? Math.max((b - a) * 0.06, 0.05) : a === b ? 0.5 : 0;
    return [a - pad, b + pad];
  }

  rangeY([x0, x1]) {
    let [a, b] = [Infinity, -Infinity];
    const [low, high] = this.spec.y.limits || [null, null];
    const see = v => { if (known(v) && (!this.logY || v > 0)) { a = Math.min(a, v); b = Math.max(b, v); } };
    for (const s of this.series) s.x.forEach((x, i) => {
      const t = this.scaleX.to(x), e = (s.error && s.error[i]) || 0;
      if (known(s.y[i]) && t >= x0 && t <= x1) { see(s.y[i] - e); see(s.y[i] + e); }
    });
    for (const l of this.spec.lines || []) see(l.y);
    if (a > b) [a, b] = this.logY ? [0.1, 1] : [0, 1];
    if (this.spec.bar && !this.logY) a = Math.min(a, 0);
    if (this.logY) {
      [a, b] = [Math.log10(a), Math.log10(b)];
      const pad = Math.max((b - a) * 0.06, 0.02);
      a -= this.spec.bar ? Math.max(pad, 0.3) : pad;
      return [a, known(high) ? Math.min(b + pad, Math.log10(high) + 0.02) : b + pad];
    }
    const pad = (b - a) * 0.06 || Math.abs(b) * 0.1 || 1;
    return [known(low) ? Math.max(a - pad, low) : a - pad, known(high) ? Math.min(b + pad, high) : b + pad];
  }

  // ------------------------------------------------------------------ drawing

  draw() {
    const width = Math.floor(this.plot.clientWidth);
    if (width < 50) return;
    const height = width > 700 ? 300 : clamp(Math.round(width * 0.56), 220, 340);
    const xs = this.zoom || this.rangeX(), ys = this.rangeY(xs), { spec } = this;
    const bottom = height - 38, top = spec.bands && spec.bands.length ? 44 : 26;
    const yTicks = ticksOf(this.logY ? "log" : "linear", this.scaleY.from(ys[0]), this.scaleY.from(ys[1]), (bottom - top) / 34);
    const left = Math.max(24, 12 + 6.8 * Math.max(...yTicks.map(t => tickText(t).length))), right = width - 14;
    const px = x => left + (this.scaleX.to(x) - xs[0]) / (xs[1] - xs[0]) * (right - left);
    const py = y => bottom - (this.scaleY.to(y) - ys[0]) / (ys[1] - ys[0]) * (bottom - top);
    this.box = { width, height, left, right, top, bottom, xs, px, py };
    const clip = `clip-${spec.id}`;
    const body = this.series.map(s => (spec.kind === "bars" ? this.bars(s) : this.line(s)));
    this.canvas.innerHTML = `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true">
      <clipPath id="${clip}"><rect x="${left - 1}" y="${top - 5}" width="${right - left + 2}" height="${bottom - top + 6}"/></clipPath>
      ${this.bands()}${this.axes(yTicks)}${spec.bar ? "" : this.lines()}
      <g clip-path="url(#${clip})">${body.map(b => b.svg).join("")}<g class="cross"></g></g>${spec.bar ? this.lines() : ""}</svg>`;
    this.cross = this.canvas.querySelector(".cross");
    const points = body.reduce((n, b) => n + b.points, 0);
    this.figure.dataset.drawn = `points:${points}`;
    this.plot.setAttribute("aria-label", this.words());
    this.hint.hidden = !this.zoom;
    if (this.at !== null) this.show(this.at);
  }

  axes(yTicks) {
    const { left, right, top, bottom, xs, px, py } = this.box, { x, y } = this.spec;
    let svg = "", last = -Infinity;
    for (const t of yTicks) {
      const at = py(t).toFixed(1);
      svg += `<path class="gridline" d="M${left} ${at}H${right}"/><text x="${left - 6}" y="${+at + 4}" text-anchor="end">${tickText(t)}</text>`;
    }
    for (const t of ticksOf(x.scale || "linear", this.scaleX.from(xs[0]), this.scaleX.from(xs[1]), (right - left) / 80, x.whole)) {
      const at = px(t), half = tickText(t).length * 3.4;
      if (at - half < last + 6 || at < left - 1 || at > right + 1) continue;
      const anchor = at + half > this.box.width ? "end" : "middle";
      svg += `<path class="tick" d="M${at.toFixed(1)} ${bottom}v4"/><text x="${Math.min(at, this.box.width - 1).toFixed(1)}" y="${bottom + 16}" text-anchor="${anchor}">${tickText(t)}</text>`;
      last = at + half;
    }
    return `${svg}<path class="axis" d="M${left} ${bottom}H${right}"/><text class="name" x="2" y="12">${esc(y.label)}${this.logY ? ", log scale" : ""}</text>
      <text class="name" x="${(left + right) / 2}" y="${bottom + 33}" text-anchor="middle">${esc(x.label)}</text>`;
  }

  bands() {
    const { px, left, right, top, bottom } = this.box;
    return (this.spec.bands || []).map((b, i) => {
      const from = clamp(px(b.from), left, right), to = clamp(px(b.to), left, right), room = to - from;
      // Above the plot, where no line can run through the name.
      const name = room > b.name.length * 6 ? `<text class="phase" x="${(from + to) / 2}" y="${top - 8}" text-anchor="middle">${esc(b.name)}</text>` : "";
      return `<rect class="band band-${i % 2}" x="${from}" y="${top - 22}" width="${Math.max(room, 0)}" height="${bottom - top + 22}"/>${name}`;
    }).join("");
  }

  lines() {
    const { py, left, right } = this.box;
    return (this.spec.lines || []).map(l => {
      const at = py(l.y).toFixed(1), label = `${this.spec.bar ? "┄ " : ""}${l.name} ${valueText(l.y, this.spec.y.unit)}`;
      const spread = l.error ? `<rect class="spread" x="${left}" y="${py(l.y + l.error)}" width="${right - left}" height="${Math.max(py(l.y - l.error) - py(l.y + l.error), 0)}"/>` : "";
      // Above the line where there is room, below it at the top of the chart; clear of bars altogether.
      const y = this.spec.bar ? 12 : at - 6 < this.box.top + 4 ? +at + 13 : at - 5;
      const [x, anchor] = this.crowded(l.y) ? [left + 6, "start"] : [right - 4, "end"];
      return `${spread}<path class="level" d="M${left} ${at}H${right}"/><text class="level-name" x="${x}" y="${y}" text-anchor="${anchor}">${esc(label)}</text>`;
    }).join("");
  }

  /** Whether the series come nearer to a level at their right end than at their left. */
  crowded(level) {
    const off = (s, i) => Math.abs((s.y.at(i) ?? level) - level);
    return this.spec.kind !== "bars" && this.series.reduce((sum, s) => sum + off(s, -1) - off(s, 0), 0) < 0;
  }

  color(s) { return `var(--c${(s.color ?? this.spec.series.indexOf(s)) % 6})`; }

  line(s) {
    const { px, py, xs } = this.box, seen = [];
    let path = "", pen = false, dots = "", points = 0;
    s.x.forEach((x, i) => {
      const t = this.scaleX.to(x), ok = known(s.y[i]) && (!this.logY || s.y[i] > 0);
      if (!ok) { pen = false; return; }
      const at = px(x).toFixed(1), y = py(s.y[i]).toFixed(1);
      // A point between two gaps would be an invisible line.
      const alone = !pen && !(i + 1 < s.y.length && known(s.y[i + 1]));
      path += `${pen ? "L" : "M"}${at} ${y}`;
      pen = true;
      if (t >= xs[0] && t <= xs[1]) { points++; seen.push([+at, +y, i, alone]); }
    });
    const mark = MARKERS[(s.marker ?? 0) % MARKERS.length];
    for (const [x, y, i, alone] of seen) {
      if (s.error && known(s.error[i])) {
        const a = py(s.y[i] - s.error[i]), b = py(s.y[i] + s.error[i]);
        dots += `<path class="error" d="M${x} ${a}V${b}M${x - 4} ${a}h8M${x - 4} ${b}h8"/>`;
      }
      if (s.marker !== undefined) dots += mark(x, y);
      else if (alone || s.points || (s.dots && seen.length <= 60)) dots += `<circle cx="${x}" cy="${y}" r="2.4"/>`;
    }
    const color = this.color(s);
    return { points, svg: `<g class="${s.faint && points > 600 ? "faint" : s.faint ? "thin" : "line"}" style="stroke:${color};fill:${color}"><path fill="none" d="${s.points ? "" : path}" stroke-dasharray="${s.dash || ""}"/><g>${dots}</g></g>` };
  }

  bars(s) {
    const { px, py, bottom, xs } = this.box;
    let svg = "", points = 0;
    s.x.forEach((x, i) => {
      const from = px(x - this.spec.bar / 2), to = px(x + this.spec.bar / 2), v = s.y[i];
      if (!known(v) || (this.logY && v <= 0) || x < xs[0] || x > xs[1]) return;
      const gap = Math.max(Math.min((to - from) * 0.15, 4), (to - from - 56) / 2), y = Math.min(py(v), bottom);
      svg += `<rect x="${(from + gap).toFixed(1)}" y="${y.toFixed(1)}" width="${Math.max(to - from - 2 * gap, 0.8).toFixed(1)}" height="${(bottom - y).toFixed(1)}" rx="${to - from > 8 ? 1.5 : 0}"/>`;
      points++;
    });
    return { points, svg: `<g class="bars" style="fill:${this.color(s)}">${svg}</g>` };
  }

  words() {
    const ends = this.series.slice(0, 8).map(s => {
      const i = s.y.findLastIndex(known);
      return i < 0 ? "" : `${s.name}: ${valueText(s.y[i], this.spec.y.unit)} at ${this.spec.x.label} ${valueText(s.x[i])}`;
    });
    return `${this.base.title}. ${this.spec.y.label} over ${this.spec.x.label}. Last values: ${ends.join("; ")}. Arrow keys read values, plus and minus zoom, Escape resets.`;
  }

  // ------------------------------------------------------------------ reading values

  nearest(s, x) {
    const to = v => Math.abs(this.scaleX.to(v) - this.scaleX.to(x));
    let a = 0, b = s.x.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (s.x[m] < x) a = m; else b = m; }
    return to(s.x[a]) <= to(s.x[b]) ? a : b;
  }

  /** The data's own x next to a place on the axis. */
  snap(x) {
    const all = this.series.filter(s => s.x.length).map(s => s.x[this.nearest(s, x)]);
    const off = v => Math.abs(this.scaleX.to(v) - this.scaleX.to(x));
    return all.length ? all.reduce((a, b) => (off(b) < off(a) ? b : a)) : null;
  }

  show(x, aloud = false) {
    this.at = x;
    if (x === null || !this.box) { this.tip.hidden = true; if (this.cross) this.cross.innerHTML = ""; return; }
    const { px, py, top, bottom, width, xs } = this.box, at = px(x), unit = this.spec.y.unit;
    let marks = `<path d="M${at} ${top}V${bottom}"/>`, rows = "", text = [];
    for (const s of this.series) {
      const i = this.nearest(s, x);
      // A series that has nothing near here says nothing.
      if (i < 0 || Math.abs(this.scaleX.to(s.x[i]) - this.scaleX.to(x)) > 0.03 * (xs[1] - xs[0])) continue;
      const value = valueText(s.y[i], unit) + (s.error && known(s.error[i]) ? ` ± ${s.error[i].toFixed(2)}` : "");
      rows += `<div><i style="background:${this.color(s)}"></i><span>${esc(s.name)}</span><b>${value}</b></div>`;
      text.push(`${s.name} ${value}`);
      if (known(s.y[i]) && (!this.logY || s.y[i] > 0) && this.spec.kind !== "bars") marks += `<circle cx="${px(s.x[i])}" cy="${py(s.y[i])}" r="4" style="fill:${this.color(s)}"/>`;
    }
    const i = this.spec.names ? this.nearest(this.spec.series[0], x) : -1;
    const head = i >= 0 ? this.spec.names[i] : `${this.spec.x.label.replace(/ \(.*/, "")} ${valueText(x, this.spec.x.unit)}`;
    this.cross.innerHTML = marks;
    this.tip.innerHTML = `<strong>${esc(head)}</strong>${rows}`;
    this.tip.hidden = false;
    const w = this.tip.offsetWidth, beside = at + 14 + w < width ? at + 14 : at - 14 - w;
    this.tip.style.left = `${clamp(beside, 0, Math.max(width - w, 0))}px`;
    if (aloud) this.live.textContent = `${head}: ${text.join(", ")}`;
  }

  // ------------------------------------------------------------------ moving about

  place(event) {
    const { left, right, xs } = this.box, x = event.clientX - this.canvas.getBoundingClientRect().left;
    return xs[0] + clamp((x - left) / (right - left), 0, 1) * (xs[1] - xs[0]);
  }

  setZoom(a, b) {
    const [low, high] = this.rangeX(), least = (high - low) / 2000;
    if (b - a < least) return;
    if (b - a >= (high - low) * 0.999) this.zoom = null;
    else { const shift = Math.max(low - a, 0) + Math.min(high - b, 0); this.zoom = [Math.max(a + shift, low), Math.min(b + shift, high)]; }
    this.draw();
  }

  zoomAt(t, factor) {
    const [a, b] = this.box.xs;
    this.setZoom(t - (t - a) * factor, t + (b - t) * factor);
  }

  reset() { this.zoom = null; this.draw(); }

  listen() {
    const { plot, fingers } = this;
    let brush = null, spread = 0;
    const down = e => {
      if (e.pointerType === "mouse" && e.button !== 0) return;
      fingers.set(e.pointerId, e.clientX);
      plot.setPointerCapture(e.pointerId);
      brush = e.pointerType === "mouse" ? this.place(e) : null;
    };
    const move = e => {
      if (fingers.has(e.pointerId)) fingers.set(e.pointerId, e.clientX);
      if (fingers.size === 2) {
        const [a, b] = [...fingers.values()], now = Math.max(Math.abs(a - b), 10);
        if (spread) this.zoomAt(this.place({ clientX: (a + b) / 2 }), spread / now);
        spread = now;
        return;
      }
      this.show(this.snap(this.scaleX.from(this.place(e))));
      if (brush !== null) {
        const { left, right, top, bottom, xs } = this.box, at = t => left + (t - xs[0]) / (xs[1] - xs[0]) * (right - left);
        const [a, b] = [at(brush), at(this.place(e))].sort((m, n) => m - n);
        this.cross.insertAdjacentHTML("beforeend", `<rect class="brush" x="${a}" y="${top}" width="${b - a}" height="${bottom - top}"/>`);
      }
    };
    const up = e => {
      fingers.delete(e.pointerId);
      spread = 0;
      if (brush !== null && e.type === "pointerup") {
        const [a, b] = [brush, this.place(e)].sort((m, n) => m - n), { xs } = this.box;
        brush = null;
        if (b - a > 0.02 * (xs[1] - xs[0])) this.setZoom(a, b);
      }
      brush = null;
    };
    plot.addEventListener("pointerdown", down);
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerup", up);
    plot.addEventListener("pointercancel", up);
    plot.addEventListener("pointerleave", () => this.show(null));
    plot.addEventListener("blur", () => this.show(null));
    plot.addEventListener("dblclick", () => this.reset());
    plot.addEventListener("wheel", e => {
      // The page must still scroll under a passing mouse: a chart takes the wheel once it was clicked, or with Ctrl.
      if (!(e.ctrlKey || e.metaKey || document.activeElement === plot)) return;
      e.preventDefault();
      this.zoomAt(this.place(e), 1.0015 ** clamp(e.deltaY, -400, 400));
    }, { passive: false });
    plot.addEventListener("keydown", e => this.key(e));
  }

  key(event) {
    const xs = [...new Set(this.series.flatMap(s => s.x))].sort((a, b) => a - b);
    const inside = xs.filter(x => this.scaleX.to(x) >= this.box.xs[0] && this.scaleX.to(x) <= this.box.xs[1]);
    const last = inside.length - 1, now = this.at === null ? -1 : inside.indexOf(this.at);
    const stride = Math.max(1, Math.round(inside.length / 100)), centre = now < 0 ? (this.box.xs[0] + this.box.xs[1]) / 2 : this.scaleX.to(this.at);
    const go = i => inside.length && this.show(inside[clamp(i, 0, last)], true);
    const act = {
      ArrowRight: () => go(now + stride), ArrowLeft: () => go(now < 0 ? last : now - stride), Home: () => go(0), End: () => go(last),
      "+": () => this.zoomAt(centre, 0.7), "=": () => this.zoomAt(centre, 0.7), "-": () => this.zoomAt(centre, 1 / 0.7),
      Escape: () => { this.show(null); this.reset(); }, 0: () => this.reset(),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  // ------------------------------------------------------------------ buttons

  button(text, press, pressed = null, parent = this.controls) {
    const button = this.add("button", "", parent);
    button.type = "button";
    button.innerHTML = text;
    if (pressed !== null) button.setAttribute("aria-pressed", pressed);
    button.addEventListener("click", () => press(button));
    return button;
  }

  buttons() {
    this.controls.innerHTML = "";
    const { base, spec } = this;
    if (base.views) base.views.forEach((v, i) => this.button(esc(v.name), () => {
      this.view = i;
      this.spec = { ...base, ...v };
      this.logY = v.y.scale === "log";
      this.buttons();
      this.draw();
    }, i === this.view));
    if (spec.series.length > 1) for (const s of spec.series) {
      const swatch = `<svg width="20" height="10" aria-hidden="true"><g class="${s.faint ? "faint" : "line"}" style="stroke:${this.color(s)};fill:${this.color(s)}">${s.points ? '<circle cx="10" cy="5" r="3"/>' : `<path d="M0 5H20" stroke-dasharray="${s.dash || ""}"/>`}${s.marker === undefined ? "" : MARKERS[s.marker % MARKERS.length](10, 5)}</g></svg>`;
      this.button(swatch + esc(s.name), b => {
        if (!this.hidden.delete(s.name)) this.hidden.add(s.name);
        b.setAttribute("aria-pressed", !this.hidden.has(s.name));
        this.draw();
      }, true).classList.add("key");
    }
    this.figure.classList.toggle("bare", !this.controls.children.length);
    const tools = this.add("span", "tools", this.controls);
    this.hint = this.button("reset zoom", () => this.reset(), null, tools);
    if (spec.y.toggle) this.button("log", b => { this.logY = !this.logY; b.setAttribute("aria-pressed", this.logY); this.draw(); }, this.logY, tools).title = "logarithmic axis";
  }

  slider() {
    const { frames } = this.base, label = this.add("label", "slider"), series = this.spec.series[0];
    label.innerHTML = `<span>${esc(frames.label)} <output></output></span><input type="range" min="0" max="${frames.at.length - 1}" value="${this.frame}">`;
    const [output, input] = [label.querySelector("output"), label.querySelector("input")];
    const set = () => {
      this.frame = +input.value;
      series.y = frames.y[this.frame];
      output.textContent = `${frames.at[this.frame]} of ${frames.at.at(-1)}`;
      if (this.box) this.draw();
    };
    input.addEventListener("input", set);
    set();
  }
}
