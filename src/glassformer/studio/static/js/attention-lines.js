/* Attention of one head as lines, for short texts: queries on the left, keys on the right, opacity by weight.
 *
 *   attentionLines({hover, pick}) -> {root, draw(pattern, queries, keys), lock(query or null)}
 */
import { h, svg, visible } from "./dom.js";

const [ROW, LABEL, SPAN, LEAST] = [19, 110, 230, 0.01];
export const LONGEST = 64;

export function attentionLines({ hover, pick }) {
  const root = h("div", { class: "lines" });
  let groups = [];

  function draw(pattern, queries, keys) {
    const [T, S] = pattern.shape;
    const height = Math.max(T, S) * ROW + 8;
    const y = (i) => i * ROW + ROW / 2 + 4;
    groups = queries.map((word, t) => {
      const lines = [];
      for (let s = 0; s < S; s++) {
        const weight = pattern.at(t, s);
        if (weight < LEAST) continue;
        lines.push(svg("line", {
          x1: LABEL, x2: LABEL + SPAN, y1: y(t), y2: y(s), stroke: "var(--accent)", "stroke-width": 0.5 +
            2.5 * weight, "stroke-opacity": weight,
        }));
      }
      const target = svg("rect", { x: 0, y: y(t) - ROW / 2, width: LABEL, height: ROW, fill: "transparent" });
      return svg("g", { on: { pointerenter: () => hover(t), pointerleave: () => hover(null), click: () => pick(t) } },
        lines, svg("text", { x: LABEL - 8, y: y(t) +
          4, "text-anchor": "end", text: visible(word).slice(0, 14) }), target);
    });
    const right = keys.map((word, s) => svg(
      "text", { x: LABEL + SPAN + 8, y: y(s) + 4, text: visible(word).slice(0, 14) },
    ));
    root.replaceChildren(svg(
      "svg",
      {
        class: "figure-svg", width: 2 * LABEL + SPAN, height, role: "img",
        "aria-label": "Attention as lines from query to key",
      },
      groups, right,
    ));
  }

  function lock(query) {
    groups.forEach((group, t) => group.querySelectorAll("line").forEach((one) => one.classList.toggle(
      "dim", query !== null && t !== query,
    )));
  }

  return { root, draw, lock };
}
