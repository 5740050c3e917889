/* Text generation panel: one token at a time or many, with or without the KV cache, and the time of each token.
 *
 *   generation(view, sampling) -> {root, reset(), stop()}   sampling() returns the values of the sliders
 */
import { events, post } from "./api.js";
import { line, plot } from "./charts.js";
import { bytes, field, fill, h, millis, number, percent, visible } from "./dom.js";
import { store } from "./store.js";
import { panel } from "./view.js";

export function generation(view, sampling) {
  const at = { generated: [], cost: { on: [], off: [] }, steps: 0, body: null };
  const where = panel({
    title: "Generate",
    name: "generate",
    figure: () => (at.generated.length ? figure : null),
    python: () => ({ view: "generate", ...(at.body ?? request(Number(length.value))) }),
  });
  const button = (text, action, kind) => h("button", { text, class: kind, on: { click: action } });
  const [step, run, stop] = [
    button("Step", () => write(1)),
    button("Run", () => write(Math.min(available(), Number(length.value) || 1)), "primary"),
    button("Stop", halt),
  ];
  const clear = button("Clear", () => reset());
  const keep = button("Use as prompt", () => take());
  const cache = h("input", { type: "checkbox", checked: true, id: "use-cache" });
  const length = h("input", { type: "number", min: 1, max: 1024, value: 64 });
  const seed = h("input", { type: "number", min: 0, max: 4294967295, value: 0 });
  const page = h(
    "div", { class: "written", tabindex: 0, role: "log", "aria-label": "Generated text", "aria-live": "off" },
  );
  const tiles = h("div", { class: "tiles" });
  const chart = h("div", { "aria-label": "Milliseconds per token" });
  const figure = h("div", {}, page, tiles, chart);
  where.body.append(
    h("div", { class: "row" }, step, run, stop, h("label", { class: "check", for: "use-cache" }, cache, "KV cache")),
    h("div", { class: "row end" }, h("div", { class: "grow" }, field("New tokens", length)),
      h("div", { class: "grow" }, field("Seed", seed))),
    figure, h("div", { class: "row" }, keep, clear));

  function enable() {
    const running = view.busy("write");
    for (const one of [step, run]) one.disabled = running || !store.ids.length || store.model?.kind === "encoder";
    stop.disabled = !running;
    for (const one of [keep, clear]) one.disabled = running || !at.generated.length;
  }

  /* How many more tokens fit into the context. */
  function available() {
    const read = store.target ? 1 : store.ids.length;
    return Math.max(1, Math.min(1024, (store.model?.context ?? Infinity) - read - at.generated.length));
  }

  function reset() {
    halt();
    Object.assign(at, { generated: [], steps: 0, body: null });
    length.max = available();
    fill(page, h("span", { class: "soft", text: store.pieces.join("") }));
    fill(tiles, tile("–", "per token"), tile("–", "tokens per second"), tile("–", "KV cache"));
    enable();
  }

  const tile = (value, name) => h("div", { class: "tile" }, h("b", { text: value }), h("span", { text: name }));

  function append(token) {
    at.generated.push(token.id);
    const title = `${visible(token.piece)}, id ${token.id}, sampled with ${percent(token.p)}, ${millis(token.ms)}`;
    page.append(h("span", { class: "new", title, text: token.text }));
    page.scrollTop = page.scrollHeight;
  }

  function measured(costs, token) {
    const rest = costs.length > 1 ? costs.slice(1) : costs;
    const mean = rest.reduce((sum, one) => sum + one, 0) / rest.length;
    fill(tiles, tile(millis(mean), "per token after the first"), tile(number(1000 / mean), "tokens per second"),
      tile(token.kv_bytes ? bytes(token.kv_bytes) : "none", "KV cache"));
  }

  /* An encoder-decoder reads the prompt and generates from the start token on. */
  function context() {
    if (!store.target) return { ids: [...store.ids, ...at.generated] };
    return { ids: store.ids, ...(at.generated.length ? { target: [store.target.ids[0], ...at.generated] } : {}) };
  }

  function request(many) {
    return {
      model: store.get("model"), ...context(), max_new_tokens: many, cache: cache.checked,
      seed: (Number(seed.value) + at.steps) % 2 ** 32, ...sampling(),
    };
  }

  async function write(many) {
    const kind = cache.checked ? "on" : "off";
    const body = (at.body = request(many));
    if (many === 1) at.steps++; // each step has its own seed
    const costs = [];
    const working = view.work(where, "write", async (signal) => {
      for await (const { event, data } of events("generate", { body, signal })) {
        if (event !== "token") continue;
        costs.push(data.ms);
        append(data);
        measured(costs, data);
      }
    });
    enable();
    await working;
    enable();
    if (costs.length > 2) {
      at.cost[kind] = costs;
      drawCosts();
    }
  }

  function drawCosts() {
    const lines = [["on", "with KV cache", "accent"], ["off", "without KV cache", "orange"]]
      .filter(([kind]) => at.cost[kind].length)
      .map(([kind, name, colour]) => line(
        at.cost[kind].map((_, i) => i + 1), at.cost[kind], { name, colour, width: 1.6 },
      ));
    plot(chart, lines, {
      height: 190, showlegend: true, margin: { l: 44, r: 8, t: 24, b: 36 },
      xaxis: { title: "token" }, yaxis: { title: "ms", rangemode: "tozero" },
    });
  }

  function halt() {
    view.stop("write");
    enable();
  }

  async function take() {
    const model = store.get("model");
    const { ids, target } = context();
    const key = target ? "answered" : "prompt";
    if (store.model?.tokenizer === false) return store.set({ [key]: (target ?? ids).join(" "), token: null });
    const body = { model, ids, ...(target ? { target } : {}) };
    const tokens = await view.work(where, "take", (signal) => post("tokens", body, { signal }));
    if (tokens) store.set({ [key]: (tokens.target ?? tokens).text, token: null });
  }

  return { root: where.root, reset, stop: halt };
}
