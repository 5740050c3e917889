/* A heat map of fixed size for any tensor shape, e.g. hundreds of rows in 220 pixels; in maps.js each cell has at least
 * one pixel.
 *
 *   plainMap({label, describe}) -> {root, draw({tensor, scale, low, high, rowTitle, columnTitle})}
 *        describe(row, column, value) -> text of the read-out; the frame takes focus and arrow keys
 */
import { h, number } from "./dom.js";
import { css, image, range } from "./maps.js";

class PlainMap {
  constructor({ label, describe }) {
    this.describe = describe;
    this.canvas = h("canvas", { class: "plain-canvas" });
    this.cross = [h("i", { class: "cross-row" }), h("i", { class: "cross-column" })];
    this.frame = h("div", { class: "plain-frame", tabindex: 0, role: "img", "aria-label": label }, this.canvas,
      this.cross);
    this.titles = { row: h("span", { class: "plain-rows" }), column: h("span", { class: "plain-columns" }) };
    this.legend = h("canvas", { class: "legend", width: 120, height: 8, "aria-hidden": "true" });
    this.ends = [h("span"), h("span")];
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.root = h("div", { class: "plain-map" }, this.titles.column, this.titles.row, this.frame,
      h("div", { class: "map-foot" }, h("p", { class: "legend-row" }, this.ends[0], this.legend, this.ends[1]),
        this.readout));
    this.frame.addEventListener("pointermove", (event) => this.#point(this.#cell(event)));
    this.frame.addEventListener("pointerleave", () => this.#point(null));
    this.frame.addEventListener("blur", () => this.#point(null));
    this.frame.addEventListener("keydown", (event) => this.#key(event));
    this.#point(null);
  }

  draw({ tensor, scale = "viridis", low, high, rowTitle, columnTitle }) {
    if (low === undefined) {
      [low, high] = range(tensor.data);
      if (scale === "rdbu") [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
    }
    this.tensor = tensor;
    const [rows, columns] = tensor.shape;
    const picture = image(tensor, { low, high, scale });
    Object.assign(this.canvas, { width: columns, height: rows });
    this.canvas.getContext("2d").drawImage(picture, 0, 0);
    this.titles.row.textContent = `${rowTitle} 0 … ${rows - 1}`;
    this.titles.column.textContent = `${columnTitle} 0 … ${columns - 1}`;
    const context = this.legend.getContext("2d");
    for (let x = 0; x < 120; x++) (context.fillStyle = css(scale, x / 119)), context.fillRect(x, 0, 1, 8);
    [low, high].forEach((v, i) => (this.ends[i].textContent = number(v)));
    if (this.at && (this.at[0] >= rows || this.at[1] >= columns)) this.#point(null);
  }

  #cell(event) {
    if (!this.tensor) return null;
    const box = this.canvas.getBoundingClientRect();
    const point = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    return point.every((v) => v >= 0 && v < 1) ? point.map((v, axis) => Math.floor(v * this.tensor.shape[axis])) : null;
  }

  #point(cell) {
    this.at = cell;
    for (const one of this.cross) one.hidden = !cell;
    this.readout.textContent = cell ? this.describe(...cell, this.tensor.at(...cell)) : "";
    if (!cell) return;
    const share = cell.map((v, axis) => `${(100 * (v + 0.5)) / this.tensor.shape[axis]}%`);
    this.cross[0].style.top = share[0];
    this.cross[1].style.left = share[1];
  }

  #key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.tensor) return;
    event.preventDefault();
    const from = this.at ?? [0, 0];
    this.#point(from.map((v, axis) => Math.max(0, Math.min(this.tensor.shape[axis] - 1, v + move[axis]))));
  }
}

export const plainMap = (options) => new PlainMap(options);
