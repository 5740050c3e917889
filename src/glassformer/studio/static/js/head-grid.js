/* All heads of a model as small maps on one Canvas: a row per layer, a column per head.
 *
 *   new HeadGrid({pick, hover}) -> {root, canvas, draw(patterns, gamma), mark(layer, head, ablated)}
 *     patterns: the (L,H,T,S) Tensor; ablated: a Set of "layer.head"
 *   pooled(data, T, S, size)   a map of at most size × size: each pixel is the largest weight that it covers, so that
 *                              a diagonal one token wide stays visible
 */
import { h } from "./dom.js";
import { lookup } from "./maps.js";

const [LEFT, TOP, GAP] = [26, 20, 3];

export function pooled(data, T, S, size) {
  const [rows, columns] = [Math.min(T, size), Math.min(S, size)];
  if (rows === T && columns === S) return { data, rows, columns };
  const out = new Uint8Array(rows * columns);
  const to = Uint32Array.from({ length: S }, (_, s) => Math.floor((s * columns) / S));
  let i = 0;
  for (let t = 0; t < T; t++) {
    const line = Math.floor((t * rows) / T) * columns;
    for (let s = 0; s < S; s++, i++) {
      const v = data[i];
      if (v > out[line + to[s]]) out[line + to[s]] = v;
    }
  }
  return { data: out, rows, columns };
}

export class HeadGrid {
  constructor({ pick, hover }) {
    this.canvas = h(
      "canvas", { tabindex: 0, role: "img", "aria-label": "All heads: a row per layer, a column per head" },
    );
    this.root = h("div", { class: "grid-wrap" }, this.canvas);
    Object.assign(this, { pick, hover, at: null, chosen: null, ablated: new Set(), patterns: null, gamma: 1 });
    this.canvas.addEventListener("pointermove", (event) => this.#point(this.#cell(event)));
    this.canvas.addEventListener("pointerleave", () => this.#point(null));
    this.canvas.addEventListener("click", (event) => this.#take(this.#cell(event)));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.patterns && this.root.clientWidth !== this.width
      && this.#render()).observe(this.root);
  }

  draw(patterns, gamma = 1) {
    Object.assign(this, { patterns, gamma });
    this.#render();
  }

  mark(layer, head, ablated = this.ablated) {
    this.chosen = layer === null || head === null ? null : [layer, head];
    this.ablated = ablated;
    if (this.patterns) this.#compose();
  }

  /* The maps are drawn to a separate image: the outlines on top change often, the maps do not. */
  #render() {
    const [L, H, T, S] = this.patterns.shape;
    this.width = this.root.clientWidth;
    const cell = Math.max(22, Math.min(110, Math.floor(((this.width || 400) - LEFT) / H) - GAP));
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const size = Math.round(cell * ratio);
    this.cell = cell;
    this.ratio = ratio;
    const table = lookup("viridis", this.gamma);
    this.maps = new OffscreenCanvas(H * (size + GAP), L * (size + GAP));
    const context = this.maps.getContext("2d");
    context.imageSmoothingEnabled = false;
    for (let layer = 0; layer < L; layer++)
      for (let head = 0; head < H; head++) {
        const { data, rows, columns } = pooled(this.patterns.part(layer, head).data, T, S, size);
        const picture = new ImageData(columns, rows);
        const pixels = new Uint32Array(picture.data.buffer);
        for (let i = 0; i < pixels.length; i++) pixels[i] = table[data[i]];
        const [x, y] = [head * (size + GAP), layer * (size + GAP)];
        if (rows === size && columns === size) context.putImageData(picture, x, y);
        else {
          const small = new OffscreenCanvas(columns, rows);
          small.getContext("2d").putImageData(picture, 0, 0);
          context.drawImage(small, x, y, size, size);
        }
      }
    this.#compose();
  }

  #compose() {
    const [L, H] = this.patterns.shape;
    const { cell, ratio, canvas } = this;
    const [width, height] = [LEFT + H * (cell + GAP), TOP + L * (cell + GAP)];
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const size = Math.round(cell * ratio);
    for (let layer = 0; layer < L; layer++)
      for (let head = 0; head < H; head++)
        context.drawImage(
          this.maps, head * (size + GAP), layer * (size + GAP), size, size, LEFT + head * (cell + GAP),
          TOP + layer * (cell + GAP), cell, cell,
        );
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let layer = 0; layer < L; layer++) context.fillText(
      String(layer), LEFT - 6, TOP + (layer + 0.5) * (cell + GAP),
    );
    context.textAlign = "center";
    for (let head = 0; head < H; head++) context.fillText(String(head), LEFT + head * (cell + GAP) + cell / 2, 10);
    this.#outline(context, this.at, style.getPropertyValue("--soft"), 1.5);
    for (const name of this.ablated) this.#cross(
      context, name.split(".").map(Number), style.getPropertyValue("--orange"),
    );
    this.#outline(context, this.chosen, style.getPropertyValue("--orange"), 3);
  }

  #corner([layer, head]) {
    return [LEFT + head * (this.cell + GAP), TOP + layer * (this.cell + GAP)];
  }

  #outline(context, which, colour, thick) {
    if (!which) return;
    const [x, y] = this.#corner(which);
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.strokeRect(x - 1, y - 1, this.cell + 2, this.cell + 2);
  }

  #cross(context, which, colour) {
    const [x, y] = this.#corner(which);
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + this.cell, y + this.cell);
    context.moveTo(x + this.cell, y);
    context.lineTo(x, y + this.cell);
    context.stroke();
  }

  #cell(event) {
    if (!this.patterns) return null;
    const [L, H] = this.patterns.shape;
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top - TOP) / (this.cell + GAP));
    const head = Math.floor((event.clientX - box.left - LEFT) / (this.cell + GAP));
    return layer >= 0 && layer < L && head >= 0 && head < H ? [layer, head] : null;
  }

  #point(which) {
    if (!this.patterns || String(which) === String(this.at)) return;
    this.at = which;
    this.#compose();
    this.hover?.(which);
  }

  #take(which) {
    if (which) this.pick?.(...which);
  }

  #key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.patterns) return;
    event.preventDefault();
    const [L, H] = this.patterns.shape;
    const [layer, head] = this.chosen ?? [0, 0];
    this.#take([Math.max(0, Math.min(L - 1, layer + move[0])), Math.max(0, Math.min(H - 1, head + move[1]))]);
  }
}
