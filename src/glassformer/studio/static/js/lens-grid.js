/* The logit lens as a grid: a row per depth, a column per position, in each cell the most likely token.
 *
 *   lensGrid(view) -> {root, ask(), mark()}
 */
import { post } from "./api.js";
import { fill, h, inspect, number, percent, visible } from "./dom.js";
import { css, inkOn } from "./maps.js";
import { store } from "./store.js";
import { panel } from "./view.js";

const COLOURS = { "probability": "p", "entropy": "entropy", "KL to the output": "kl" };

export function lensGrid(view) {
  const at = { got: null, by: "p", model: null };
  const where = panel({
    title: "Logit lens", name: "lens", wide: true, figure: () => (at.got ? table : null),
    python: () => ({ view: "lens", ...store.about, top: 5 }),
    hint:
      "The prediction at each depth: the final norm and the output head applied to the residual stream. Select a " +
      "cell to see its attribution below.",
  });
  const table = h("table", { role: "grid", "aria-label": "Most likely token by depth and position" });
  const grid = h("div", { class: "lens-grid" }, table);
  const legend = h("p", { class: "small soft" });
  const choice = h("div", { class: "segments", role: "group", "aria-label": "What the colour shows" });
  for (const [name, key] of Object.entries(COLOURS))
    choice.append(h("button", { text: name, "aria-pressed": String(key === at.by), on: { click: () => colour(key) } }));
  where.tools.append(choice);
  where.body.append(grid, legend);
  table.addEventListener("click", (event) => take(event.target.closest("td")));
  table.addEventListener("pointerover", (event) => show(event.target.closest("td")));
  table.addEventListener("focusin", (event) => show(event.target.closest("td")));
  table.addEventListener("keydown", keys);

  async function ask() {
    if (!store.ids.length) return where.say("Type a prompt to see the prediction of each layer.");
    const body = { ...store.about, top: 5 };
    const got = await view.work(where, "lens", (signal) => post("lens", body, { signal }));
    if (!got) return undefined;
    at.got = got;
    return draw();
  }

  function colour(key) {
    at.by = key;
    [...choice.children].forEach((one) => one.setAttribute("aria-pressed", String(COLOURS[one.textContent] === key)));
    if (at.got) draw();
  }

  const amount = (depth, position) => (at.by === "p"
    ? at.got.cells[depth][position][0].p : at.got[at.by][depth][position]);

  function draw() {
    const { layers, cells, pieces } = at.got;
    const most = at.by === "p" ? 1 : Math.max(...at.got[at.by].flat(), 1e-9);
    const cell = (depth) => (options, position) => {
      const share = amount(depth, position) / most;
      const td = h("td", { tabindex: -1, text: visible(options[0].piece).slice(0, 9), dataset: { depth, position } });
      Object.assign(td.style, { background: css("viridis", share), color: inkOn("viridis", share) });
      return td;
    };
    const deepest = cells.map((row, depth) => h(
      "tr", {}, h("th", { text: layers[depth], scope: "row" }), row.map(cell(depth)),
    )).reverse();
    const head = h(
      "thead", {},
      h("tr", {}, h("th", { text: "after" }), pieces.map((piece) => h("th", { text: visible(piece).slice(0, 9) }))),
    );
    fill(table, head, h("tbody", {}, deepest));
    const unit = at.by === "p" ? "0 to 1" : `0 to ${number(most)} nats`;
    legend.textContent = `Dark to bright: ${Object.keys(COLOURS).find((name) => COLOURS[name] === at.by)}, ${unit}. ` +
      `Share of positions whose most likely token is already that of the output: ` +
      `${at.got.agreement.map((a) => percent(a, 0)).join(", ")} (from the embedding to the last block).`;
    const first = table.querySelector("td");
    if (first) first.tabIndex = 0;
    where.root.dataset.ready = String(pieces.length);
    mark();
    show(
      table.querySelector(
        `td[data-depth="${cells.length - 1}"][data-position="${store.get("token") ?? pieces.length - 1}"]`
      )
    );
  }

  function mark() {
    const token = store.get("token");
    for (const td of table.querySelectorAll("td")) td.classList.toggle(
      "chosen", token !== null && Number(td.dataset.position) === token,
    );
  }

  function take(td) {
    if (!td) return;
    const { depth, position } = td.dataset;
    store.set({ token: Number(position), answer: String(at.got.cells[depth][position][0].id) }, { replace: true });
  }

  function show(td) {
    if (!td) return;
    const [depth, position] = [Number(td.dataset.depth), Number(td.dataset.position)];
    const rows = at.got.cells[depth][position].map((one) => h(
      "tr", {}, h("td", { class: "mono", text: visible(one.piece) }), h("td", { class: "n", text: percent(one.p, 2) }),
    ));
    const fact = (name, value) => [h("dt", { text: name }), h("dd", { text: value })];
    inspect(`${at.got.layers[depth]}, after “${visible(at.got.pieces[position])}”`,
      h("table", {}, h("tbody", {}, rows)),
      h(
        "dl", { class: "facts" }, fact("entropy", `${number(at.got.entropy[depth][position])} nats`),
        fact("KL to the output", `${number(at.got.kl[depth][position])} nats`), fact("site", at.got.sites[depth]),
      ));
  }

  function keys(event) {
    const td = event.target.closest("td");
    if (!td) return;
    if (event.key === "Enter" || event.key === " ") return event.preventDefault(), take(td);
    const row = td.parentNode;
    const near = {
      ArrowLeft: td.previousElementSibling, ArrowRight: td.nextElementSibling,
      ArrowUp: row.previousElementSibling?.children[td.cellIndex],
      ArrowDown: row.nextElementSibling?.children[td.cellIndex],
    }[event.key];
    if (near?.tagName !== "TD") return;
    event.preventDefault();
    td.tabIndex = -1;
    near.tabIndex = 0;
    near.focus();
  }

  return { root: where.root, ask, mark };
}
