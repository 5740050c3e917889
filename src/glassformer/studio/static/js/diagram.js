/* Block diagram: the parts of a model in the order of computation, along the residual stream on the left.
 *
 *   diagram({pick, open}) -> {root, draw(parts, {opened: {stack, layer}, chosen, placement})}
 *     pick(path) selects a part, open(stack, layer) expands a block; the other blocks are one row each.
 *   The length of the bar in each row shows its number of parameters, on the same scale for all rows.
 */
import { count, h, svg } from "./dom.js";

const [STREAM, LEFT, WIDTH, ROW, HIGH] = [12, 30, 286, 29, 23];

const stem = (path) => path.replace(/^(encoder|decoder)\./, "");
const blockOf = (path) => {
  const found = path.match(/^(encoder\.|decoder\.)?blocks\.(\d+)\./);
  return found ? { stack: found[1] ?? "", layer: Number(found[2]) } : null;
};

function kindOf(path) {
  const name = stem(path).split(".").at(-1);
  if (name.startsWith("norm") || name === "embed_norm") return "norm";
  if (name === "attention" || name === "cross") return "attention";
  if (name === "feedforward") return "feedforward";
  return "table";
}

/* One row per part; a collapsed block is one row. */
export function rowsOf(parts, opened) {
  const rows = [];
  for (const part of parts) {
    const block = blockOf(part.path);
    if (!block || (block.layer === opened.layer && block.stack === opened.stack)) {
      rows.push({ ...part, kind: kindOf(part.path), inner: Boolean(block) });
      continue;
    }
    const name = `${block.stack}blocks.${block.layer}`;
    if (rows.at(-1)?.path === name) rows.at(-1).parameters += part.parameters;
    else rows.push({
      path: name, title: `Block ${block.layer}`, kind: "block", parameters: part.parameters, letters: "B,T,D", block,
    });
  }
  return rows;
}

export function diagram({ pick, open }) {
  const root = h("div", { class: "diagram" });

  function rowNode(row, y, most, chosen) {
    const wide = Math.max(2, (WIDTH * row.parameters) / most);
    const act = () => (row.block ? open(row.block.stack, row.block.layer) : pick(row.path));
    const size = row.parameters ? count(row.parameters) : "no parameters";
    return svg("g", {
      class: row.kind, tabindex: 0, role: "button", "data-path": row.path, "aria-pressed": String(row.path === chosen),
      "aria-label": `${row.title}, ${size}${row.block ? ", expand" : ""}`,
      on: {
        click: act,
        keydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), act()),
      },
    },
      svg("rect", { x: LEFT, y, width: WIDTH, height: HIGH, rx: 4, class: "frame" }),
      svg("rect", { x: LEFT, y, width: wide, height: HIGH, rx: Math.min(4, wide / 2), class: "scale" }),
      svg("text", { x: LEFT + 9, y: y + 16, text: row.block ? `▸ ${row.title}` : row.title }),
      svg("text", { x: LEFT + 186, y: y + 15.5, class: "shape", "text-anchor": "middle", text: `(${row.letters})` }),
      svg(
        "text",
        { x: LEFT + WIDTH - 8, y: y + 16, "text-anchor": "end", class: "soft", text: row.parameters ? size : "–" },
      ));
  }

  /* How a row is connected to the residual stream: a dot, a branch, or a sum. */
  function joint(row, y, before) {
    const middle = y + HIGH / 2;
    const branch = (from) => svg("path", { class: "branch", d: `M${STREAM} ${from}H${LEFT}` });
    const plus = svg("g", { class: "sum" }, svg("circle", { cx: STREAM, cy: middle, r: 6.5, class: "node" }),
      svg("path", { class: "stream", d: `M${STREAM - 4} ${middle}h8M${STREAM} ${middle - 4}v8` }));
    if (row.kind === "block") return [svg("circle", { cx: STREAM, cy: middle, r: 3.5, class: "dot" }), branch(middle)];
    if (!row.inner) return [svg("circle", { cx: STREAM, cy: middle, r: 3.5, class: "dot" }), branch(middle)];
    if (row.kind !== "norm") return [branch(middle), plus];
    const after = before && before.inner
      && before.kind !== "norm"; // a post-norm acts on the residual stream itself
    return after && row.post ? [svg("circle", { cx: STREAM, cy: middle, r: 3.5, class: "dot" }), branch(middle)]
      : [branch(middle)];
  }

  function draw(parts, { opened, chosen, placement }) {
    const rows = rowsOf(parts, opened);
    const most = Math.max(...rows.map((row) => row.parameters), 1);
    const drawn = rows.map((row, i) => {
      const y = 4 + i * ROW;
      return [joint({ ...row, post: placement === "post" }, y, rows[i - 1]), rowNode(row, y, most, chosen)];
    });
    const height = rows.length * ROW + 4;
    const inner = rows.map((row, i) => [row.inner, i]).filter(([is]) => is).map(([, i]) => i);
    const frame = inner.length
      ? svg(
        "rect",
        {
          class: "opened", x: LEFT - 8, y: 4 + inner[0] * ROW - 3.5, width: WIDTH + 14, height: inner.length * ROW,
          rx: 7,
        },
      )
      : null;
    root.replaceChildren(
      svg("svg", {
        class: "figure-svg", width: "100%", style: { "max-width": `${LEFT + WIDTH + 8}px` },
        viewBox: `0 0 ${LEFT + WIDTH + 8} ${height}`,
      },
        frame, svg("path", { class: "stream", d: `M${STREAM} 6V${height - 6}` }), drawn));
  }

  return { root, draw };
}
