/* Beam search panel: the tree of candidates at each step, and which of them were kept.
 *
 *   beams(view) -> {root, reset()}
 */
import { post } from "./api.js";
import { fill, h, inspect, number, percent, slider, svg, visible } from "./dom.js";
import { store } from "./store.js";
import { panel } from "./view.js";

const [WIDE, TALL, BOX] = [104, 26, 78];

export function beams(view) {
  const where = panel({
    title: "Beam search",
    hint:
      "Each step keeps the best beams of all continuations. Blue: kept; grey: considered and dropped; filled: the " +
      "path of the best text.",
    name: "beam",
    wide: true,
    figure: () => tree.querySelector("svg"),
    python: () => ({ view: "beam", ...request(), beams: many.value, steps: deep.value }),
  });
  const request = () => ({ model: store.get("model"), ids: store.ids }); // an encoder-decoder starts at its start token
  const many = slider({ label: "Beams", min: 2, max: 8, value: 3 });
  const deep = slider({ label: "Steps", min: 1, max: 16, value: 6 });
  const go = h("button", { text: "Search", on: { click: search } });
  const tree = h("div", {
    class: "tree", tabindex: 0, role: "group", "aria-label": "Tree of the beam search: arrow keys move between nodes",
    on: { keydown: walk },
  });
  const shown = { nodes: [], groups: new Map(), here: null };
  const best = h("p", { class: "mono small" });
  where.body.append(
    h("div", { class: "row end" }, h("div", { class: "grow" }, many.root), h("div", { class: "grow" }, deep.root), go),
    tree, best,
  );

  function reset() {
    view.stop("beam");
    go.disabled = !store.ids.length || store.model?.kind === "encoder";
    fill(tree, h("p", { class: "empty", text: "Press Search to see the continuations that are considered." }));
    fill(best);
  }

  async function search() {
    const body = { ...request(), beams: many.value, steps: deep.value };
    const found = await view.work(where, "beam", (signal) => post("beam", body, { signal }));
    if (!found) return;
    Object.assign(shown, { nodes: found.nodes, groups: new Map(), here: null });
    fill(tree, draw(found));
    const [first] = found.best;
    fill(best, `best: ${first.pieces.map(visible).join("")}   score ${number(first.score, 4)} per token`);
  }

  /* The path of the best text: follow its tokens down from the root. */
  function bestPath(found) {
    const path = new Set([0]);
    let here = 0;
    for (const token of found.best[0].ids) {
      const next = found.nodes.find((node) => node.parent === here && node.token === token);
      if (!next) break;
      path.add((here = next.id));
    }
    return path;
  }

  function layout(nodes) {
    const children = new Map(nodes.map((node) => [node.id, []]));
    for (const node of nodes) if (node.parent !== null) children.get(node.parent).push(node);
    const at = new Map();
    let row = 0;
    const lay = (node, level) => {
      const below = children.get(node.id).sort((a, b) => b.score - a.score);
      const rows = below.map((child) => lay(child, level + 1));
      const y = rows.length ? (rows[0] + rows.at(-1)) / 2 : row++;
      at.set(node.id, { x: level * WIDE, y: y * TALL });
      return y;
    };
    lay(nodes[0], 0);
    return { at, width: WIDE * (1 + Math.max(...[...at.values()].map((one) => one.x)) / WIDE), height: row * TALL };
  }

  function draw(found) {
    const { at, width, height } = layout(found.nodes);
    const path = bestPath(found);
    const lines = [];
    const boxes = [];
    for (const node of found.nodes) {
      const { x, y } = at.get(node.id);
      const kind = `${node.kept ? "kept" : "gone"} ${path.has(node.id) ? "best" : ""}`;
      if (node.parent !== null) {
        const from = at.get(node.parent);
        const d = `M${from.x + BOX} ${from.y + 10}C${from.x + WIDE - 6} ${from.y + 10} ${x - 18} ${y + 10} ${x} ${y +
          10}`;
        lines.push(svg("path", { d, class: kind }));
      }
      const label = node.parent === null ? "prompt" : visible(node.piece);
      const chance = node.parent === null ? "" : percent(Math.exp(node.logp), 0);
      const box = svg("g", { class: kind, transform: `translate(${x} ${y})`, on: { pointerenter: () => show(node) } },
        svg("rect", { width: BOX, height: 20, rx: 4 }), svg("text", { x: 6, y: 14, text: label.slice(0, 6) }),
        svg("text", { x: BOX - 5, y: 14, "text-anchor": "end", text: chance }),
        svg("title", { text: `${label}: log p ${number(node.logp, 4)}, sum ${number(node.score, 4)}` }));
      shown.groups.set(node.id, box);
      boxes.push(box);
    }
    return svg(
      "svg", { class: "figure-svg", width: width + 4, height: height + 4, viewBox: `-2 -2 ${width + 4} ${height + 4}` },
      lines, boxes,
    );
  }

  /* Right: the most likely continuation; left: the parent; up and down: neighbours of the same step. */
  function walk(event) {
    const { here, nodes } = shown;
    const height = (node) => shown.groups.get(node.id).getCTM().f;
    const level = nodes.filter((node) => node.level === here?.level).sort((a, b) => height(a) - height(b));
    const near = {
      ArrowRight: () => nodes.filter((node) => node.parent === here?.id).sort((a, b) => b.score - a.score)[0],
      ArrowLeft: () => nodes.find((node) => node.id === here?.parent),
      ArrowUp: () => level[level.indexOf(here) - 1],
      ArrowDown: () => level[level.indexOf(here) + 1],
    }[event.key];
    if (!near || !nodes.length) return;
    event.preventDefault();
    const next = here ? near() : nodes[0];
    if (!next) return;
    shown.groups.get(here?.id)?.classList.remove("pointed");
    shown.here = next;
    shown.groups.get(next.id).classList.add("pointed");
    shown.groups.get(next.id).scrollIntoView({ block: "nearest", inline: "nearest" });
    show(next);
  }

  function show(node) {
    if (node.parent === null) return;
    const fact = (name, value) => [h("dt", { text: name }), h("dd", { text: value })];
    inspect(`Beam: ${visible(node.piece)}`, h("dl", { class: "facts" }, fact("token id", node.token),
      fact("log p of the token", number(node.logp, 5)), fact("p of the token", percent(Math.exp(node.logp), 2)),
      fact("sum along the path", number(node.score, 5)), fact("kept", node.kept ? "yes" : "no")));
  }

  return { root: where.root, reset };
}
