/* Heat maps on a Canvas. Amounts are viridis, signed numbers RdBu (red below zero, blue above).
 *
 *   lookup(scale, gamma)       256 packed RGBA colours (Uint32Array) of "viridis" or "rdbu"; gamma 0.5 makes
 *                              small values visible
 *   stops(scale)               the same as plotly's list of stops;  css(scale, x) one colour, x in 0..1
 *   image(tensor, {low, high, scale, gamma})   an ImageData-backed canvas of a (rows, columns) Tensor (tensors.js) or
 *                                      {data, shape}
 *   heatMap({label, pick, hover, describe}) -> {root, canvas, draw(what), select(row, column)}
 *        root       an element with the canvas and its legend; the canvas takes focus and arrow keys
 *        draw({tensor, low, high, scale, gamma, rows, columns, rowTitle, columnTitle, cell, square, height})
 *                   rows, columns: labels (or absent); cell: [least, most] pixels of a cell; square: false makes rows
 *                   9 to 24 pixels tall, as `height` (360) allows; values that are not finite are not drawn
 *        pick(row, column), hover(row, column or null)   callbacks
 *        describe(row, column, value) -> text of the read-out
 */
import { h, number } from "./dom.js";
import { onTheme } from "./theming.js";

const VIRIDIS =
  "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d 2f6b8e 2c728e 297a8e 26828e " +
  "23898e 21918c 1f988b 1fa088 22a785 28ae80 32b67a 3fbc73 4ec36b 5ec962 70cf57 84d44b 98d83e addc30 c2df23 d8e219 " +
  "ece51b fde725";
const RDBU =
  "67001f 7f0823 960f27 ae172a bb2a34 c6413e d25849 dc6e57 e58368 ef9979 f5ac8b f8bda1 fbceb7 fdddcb fbe6da " +
  "f9efe9 f6f7f7 eaf1f5 deebf2 d2e6f0 c0dceb acd2e5 98c8e0 81bad8 68abd0 4f9bc7 3e8cbf 337eb8 2870b1 1e61a5 15508d " +
  "0d3f76 053061";
const STOPS = { viridis: VIRIDIS.split(" "), rdbu: RDBU.split(" ") };

const made = new Map();

export function lookup(scale = "viridis", gamma = 1) {
  const key = `${scale} ${gamma}`;
  if (made.has(key)) return made.get(key);
  const colours = STOPS[scale].map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const table = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const position = (i / 255) ** gamma * (colours.length - 1);
    const left = Math.min(Math.floor(position), colours.length - 2);
    const [r, g, b] = colours[left].map((v, k) => Math.round(v + (position - left) * (colours[left + 1][k] - v)));
    table[i] = (255 << 24) | (b << 16) | (g << 8) | r; // little-endian RGBA
  }
  made.set(key, table);
  return table;
}

export const stops = (scale) => STOPS[scale].map((hex, i, all) => [i / (all.length - 1), `#${hex}`]);

export function css(scale, x) {
  const packed = lookup(scale)[Math.max(0, Math.min(255, Math.round(255 * x)))];
  return `rgb(${packed & 255} ${(packed >> 8) & 255} ${(packed >> 16) & 255})`;
}

/* Black or white, whichever has more contrast with a colour of the scale. */
export function inkOn(scale, x) {
  const packed = lookup(scale)[Math.max(0, Math.min(255, Math.round(255 * x)))];
  const light = 0.299 * (packed & 255) + 0.587 * ((packed >> 8) & 255) + 0.114 * ((packed >> 16) & 255);
  return light > 140 ? "#000" : "#fff";
}

export function range(data) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of data) {
    if (v < low && v > -Infinity) low = v;
    if (v > high && v < Infinity) high = v;
  }
  return low <= high ? [low, high] : [0, 1];
}

/* Quantised values with the right range need no arithmetic: 144 heads of 512 tokens are 38 million cells. */
export function paint(pixels, tensor, { low, high, scale = "viridis", gamma = 1 } = {}) {
  const table = lookup(scale, gamma);
  const { data } = tensor;
  const direct = tensor.dtype === "U8" && (low ?? tensor.low) === tensor.low && (high ?? tensor.high) === tensor.high;
  if (direct) {
    for (let i = 0; i < data.length; i++) pixels[i] = table[data[i]];
    return;
  }
  const values = tensor.dtype === "U8" ? tensor.floats() : data;
  const factor = 255 / (high - low || 1);
  for (let i = 0; i < values.length; i++) {
    const x = (values[i] - low) * factor;
    pixels[i] = Number.isFinite(x) ? table[x < 0 ? 0 : x > 255 ? 255 : Math.round(x)] : 0; // masked: not drawn
  }
}

export function image(tensor, how = {}) {
  const [rows, columns] = tensor.shape;
  const canvas = new OffscreenCanvas(Math.max(1, columns), Math.max(1, rows));
  const context = canvas.getContext("2d");
  const picture = context.createImageData(canvas.width, canvas.height);
  paint(new Uint32Array(picture.data.buffer), tensor, how);
  context.putImageData(picture, 0, 0);
  return canvas;
}

const GAP = 6;
const FONT = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
const TITLE = "12px system-ui, sans-serif";

export class Heat {
  constructor({ label, pick, hover, describe }) {
    this.canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": label });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.legend = h("canvas", { class: "legend", width: 120, height: 8, "aria-hidden": "true" });
    this.ends = [h("span"), h("span")];
    const bar = h("p", { class: "legend-row" }, this.ends[0], this.legend, this.ends[1]);
    this.wrap = h("div", { class: "map-scroll" }, this.canvas);
    this.root = h("div", { class: "map" }, this.wrap, h("div", { class: "map-foot" }, bar, this.readout));
    Object.assign(this, { pick, hover, describe, at: null, chosen: null, what: null });
    this.canvas.addEventListener("pointermove", (event) => this.#point(this.#cell(event)));
    this.canvas.addEventListener("pointerleave", () => this.#point(this.chosen));
    this.canvas.addEventListener("click", (event) => this.#take(this.#cell(event)));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.what && this.#layout()).observe(this.root);
    onTheme(() => this.what && this.#paint());
  }

  draw(what) {
    const { tensor, scale = "viridis" } = what;
    let { low, high } = what;
    if (low === undefined || high === undefined) {
      [low, high] = tensor.dtype === "U8" ? [tensor.low, tensor.high] : range(tensor.data);
      if (scale === "rdbu") [low, high] = [
        -Math.max(Math.abs(low), Math.abs(high)), Math.max(Math.abs(low), Math.abs(high)),
      ];
    }
    this.what = { cell: [3, 28], ...what, low, high, scale };
    this.picture = image(tensor, this.what);
    this.#legend();
    const [rows, columns] = tensor.shape;
    if (this.chosen && (this.chosen[0] >= rows || this.chosen[1] >= columns)) this.chosen = null;
    this.at = this.chosen;
    this.#layout();
  }

  select(row, column) {
    this.chosen = row === null ? null : [row, column];
    if (this.what) this.#point(this.chosen);
  }

  #legend() {
    const context = this.legend.getContext("2d");
    for (let x = 0; x < 120; x++) {
      context.fillStyle = css(this.what.scale, (x / 119) ** (this.what.gamma ?? 1));
      context.fillRect(x, 0, 1, 8);
    }
    [this.what.low, this.what.high].forEach((v, i) => (this.ends[i].textContent = number(v)));
  }

  #layout() {
    const { tensor, rows, columns, rowTitle, columnTitle, cell } = this.what;
    const [R, C] = tensor.shape;
    const context = this.canvas.getContext("2d");
    context.font = FONT;
    const widest = (labels) => Math.min(
      140, Math.max(0, ...(labels ?? []).map((label) => context.measureText(label).width)),
    );
    this.upright = columns !== undefined && widest(columns) <= 9;
    const left = (rows ? widest(rows) + GAP : 0) + (rowTitle ? 18 : 0);
    const top = (columns ? (this.upright ? 11 : Math.min(90, widest(columns))) + GAP : 0) + (columnTitle ? 18 : 0);
    const room = this.root.clientWidth || 480;
    const size = Math.max(cell[0], Math.min(cell[1], Math.floor((room - left - 2) / C)));
    const tall = tallness(this.what, size, R);
    Object.assign(this, { left, top, size, tall });
    const [width, height] = [Math.ceil(left + C * size + 1), Math.ceil(top + R * tall + 1)];
    const ratio = Math.min(devicePixelRatio || 1, 8192 / Math.max(width, height));
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.ratio = ratio;
    this.#paint();
  }

  #paint() {
    const { tensor, rows, columns, rowTitle, columnTitle } = this.what;
    const { left, top, size, tall, ratio } = this;
    const [R, C] = tensor.shape;
    const style = getComputedStyle(document.documentElement);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, left, top, C * size, R * tall);
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const step = Math.ceil(12 / tall);
    rows?.forEach((label, i) => i % step === 0 && context.fillText(cut(label), left - GAP, top + (i + 0.5) * tall));
    const across = Math.ceil((this.upright ? 9 : 12) / size);
    context.textAlign = this.upright ? "center" : "left";
    columns?.forEach((label, j) => {
      const x = left + (j + 0.5) * size;
      if (j % across) return;
      if (this.upright) context.fillText(label, x, top - GAP - 2);
      else rotated(context, cut(label), x, top - GAP / 2);
    });
    context.font = TITLE;
    if (columnTitle) (context.textAlign = "left"), context.fillText(columnTitle, left, 8);
    if (rowTitle) (context.textAlign = "right"), rotated(context, rowTitle, 8, top);
    context.strokeStyle = style.getPropertyValue("--orange");
    for (const [mark, thick] of [[this.at, 1.5], [this.chosen, 2.5]]) {
      if (!mark) continue;
      context.lineWidth = thick;
      context.strokeRect(left + mark[1] * size - 0.5, top + mark[0] * tall - 0.5, size + 1, tall + 1);
    }
  }

  #cell(event) {
    if (!this.what) return null;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - this.top) / this.tall);
    const column = Math.floor((event.clientX - box.left - this.left) / this.size);
    const [R, C] = this.what.tensor.shape;
    return row >= 0 && row < R && column >= 0 && column < C ? [row, column] : null;
  }

  #point(cell) {
    if (!this.what) return;
    this.at = cell;
    this.#paint();
    this.readout.textContent = cell ? (this.describe?.(...cell, this.what.tensor.at(...cell)) ?? "") : "";
    this.hover?.(...(cell ?? [null, null]));
  }

  #take(cell) {
    if (!cell) return;
    this.chosen = cell;
    this.#point(cell);
    this.pick?.(...cell);
  }

  #key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!this.what || (!move && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    if (!move) return this.#take(this.at ?? [0, 0]);
    if (!this.at) return this.#point([0, 0]);
    const [R, C] = this.what.tensor.shape;
    const [row, column] = this.at;
    return this.#point([Math.max(0, Math.min(R - 1, row + move[0])), Math.max(0, Math.min(C - 1, column + move[1]))]);
  }
}

function tallness({ square, height = 360 }, size, rows) {
  return square === false ? Math.max(9, Math.min(24, Math.floor(height / rows))) : size;
}

const cut = (label) => (label.length > 18 ? `${label.slice(0, 17)}…` : label);

function rotated(context, text, x, y) {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.fillText(text, 0, 0);
  context.restore();
}

export const heatMap = (options) => new Heat(options);
