/* Chat panel: a conversation, the probability of each token of an answer, and the prompt that the template rendered.
 *
 *   chat(view) -> {root, update(), stop()}   shown only for models that have a chat template
 */
import { events } from "./api.js";
import { field, fill, h, percent, visible } from "./dom.js";
import { store } from "./store.js";
import { panel } from "./view.js";

export function chat(view) {
  const at = { model: null, messages: [], body: null };
  const where = panel({
    title: "Chat",
    name: "chat",
    wide: true,
    hint: "The shade of a token is its probability; point at it to see the most likely tokens in its place.",
    figure: () => (at.messages.length ? log : null),
    python: () => ({ view: "chat", ...(at.body ?? request()) }),
  });
  const log = h("div", { class: "talk", tabindex: 0, role: "log", "aria-label": "Conversation" });
  const system = h("input", { type: "text", maxlength: 4000, placeholder: "none" });
  const message = h("textarea", { rows: 2, maxlength: 20000, placeholder: "Write a message" });
  const temperature = h("input", { type: "number", min: 0, max: 10, step: 0.1, value: 0.8 });
  const length = h("input", { type: "number", min: 1, max: 1024, value: 256 });
  const seed = h("input", { type: "number", min: 0, max: 4294967295, value: 0 });
  const button = (text, action, kind) => h("button", { text, class: kind, on: { click: action } });
  const send = button("Send", () => ask(), "primary");
  const [stop, undo, reset] = [
    button("Stop", halt), button("Undo", () => take(2)), button("Reset", () => take(Infinity)),
  ];
  const rendered = h("pre", { class: "rendered", tabindex: 0, "aria-label": "Rendered prompt" });
  const facts = h("summary", { text: "Rendered prompt" });
  where.body.append(
    log,
    field("Message", message),
    h("div", { class: "row" }, send, stop, undo, reset),
    h("div", { class: "row end" }, h("div", { class: "grow" }, field("System message", system)),
      field("Temperature", temperature), field("New tokens", length), field("Seed", seed)),
    h("details", { class: "prompt" }, facts, rendered));
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!send.disabled) ask();
  });

  function enable() {
    const running = view.busy("chat");
    send.disabled = running;
    stop.disabled = !running;
    for (const one of [undo, reset]) one.disabled = running || !at.messages.length;
  }

  function request() {
    const first = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    return {
      model: store.get("model"), messages: [...first, ...at.messages], max_new_tokens: Number(length.value) || 1,
      temperature: Number(temperature.value) || 0, seed: Number(seed.value) || 0,
    };
  }

  const line = (role, ...content) =>
    h("div", { class: "message", dataset: { role } }, h("b", { text: role }), h("p", {}, ...content));

  function token({ id, piece, p, top }) {
    const others = top.map((one) => `${visible(one.piece)} ${percent(one.p)}`).join("\n");
    const title = `${visible(piece)}, id ${id}, probability ${percent(p)}\n${others}`;
    const shade = `color-mix(in srgb, var(--accent) ${Math.round(45 * p)}%, transparent)`;
    return h("span", { class: "token", title, text: piece, style: { background: shade } });
  }

  function showPrompt({ tokens, dropped }) {
    fill(rendered, tokens.map(({ id, piece, special }) =>
      h("span", { class: special ? "special" : null, title: `id ${id}`, text: piece })));
    const left = dropped ? `, ${dropped} old messages left out because the context is full` : "";
    facts.textContent = `Rendered prompt: ${tokens.length} tokens${left}`;
  }

  async function ask() {
    const text = message.value.trim();
    if (!text) return where.say("The message is empty: write something.", "error");
    at.messages.push({ role: "user", content: text });
    log.append(line("user", text));
    message.value = "";
    const body = (at.body = request());
    const answer = h("p", {});
    log.append(h("div", { class: "message", dataset: { role: "assistant" } }, h("b", { text: "assistant" }), answer));
    let answered = "";
    let started = false;
    const working = view.work(where, "chat", async (signal) => {
      for await (const { event, data } of events("chat", { body, signal })) {
        if (event === "prompt") {
          showPrompt(data);
          started = true;
        } else answer.append(...data.tokens.map(token));
        if (event === "tokens") answered += data.text;
        log.scrollTop = log.scrollHeight;
      }
    });
    enable();
    await working;
    if (started) at.messages.push({ role: "assistant", content: answered }); // also what came before Stop
    else {
      at.messages.pop(); // refused: the message may be corrected and sent again
      message.value = text;
      for (const one of [...log.children].slice(-2)) one.remove();
    }
    log.dataset.messages = at.messages.length;
    enable();
  }

  function take(count) {
    at.messages.splice(-Math.min(count, at.messages.length));
    for (const one of [...log.children].slice(-count)) one.remove();
    log.dataset.messages = at.messages.length;
    enable();
  }

  function halt() {
    view.stop("chat");
    enable();
  }

  function update() {
    where.root.hidden = !store.model?.chat;
    if (store.get("model") !== at.model) {
      halt();
      Object.assign(at, { model: store.get("model"), messages: [], body: null });
      fill(log);
      fill(rendered);
      facts.textContent = "Rendered prompt";
    }
    enable();
  }

  return { root: where.root, update, stop: halt };
}
