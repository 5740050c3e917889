/* <glass-chips>: tokens as chips; one can be selected with the mouse or the keyboard.
 *
 *   .show(pieces, ids, {colours, selected, notes})   a CSS colour and a tooltip per chip, or absent
 *   .selected = index or null
 *   event "pick" {detail: index}                     a click or Enter; null if it was selected already
 *   event "point" {detail: index or null}            the mouse is over it
 */
import { h, visible } from "./dom.js";

export class Chips extends HTMLElement {
  #selected = null;

  connectedCallback() {
    if (this.dataset.ready) return;
    this.dataset.ready = "1";
    this.setAttribute("role", "listbox");
    this.setAttribute("aria-orientation", "horizontal");
    this.addEventListener("click", (event) => this.#take(this.#index(event)));
    this.addEventListener("pointerover", (event) => this.#send("point", this.#index(event)));
    this.addEventListener("pointerleave", () => this.#send("point", null));
    this.addEventListener("keydown", (event) => this.#key(event));
  }

  show(pieces, ids = [], { colours, selected = null, notes } = {}) {
    const chips = pieces.map((piece, i) => {
      const chip = h("span", { class: "chip", role: "option", tabindex: -1, text: visible(piece) });
      chip.title = notes?.[i] ?? `${i}: ${JSON.stringify(piece)}${ids[i] === undefined ? "" : `, id ${ids[i]}`}`;
      if (colours?.[i]) chip.style.background = colours[i];
      return chip;
    });
    this.replaceChildren(...chips);
    this.selected = selected;
  }

  get selected() {
    return this.#selected;
  }

  set selected(index) {
    this.#selected = index !== null && index < this.children.length ? index : null;
    [...this.children].forEach((chip, i) => {
      chip.setAttribute("aria-selected", String(i === this.#selected));
      chip.tabIndex = i === (this.#selected ?? 0) ? 0 : -1;
    });
  }

  #index(event) {
    const at = [...this.children].indexOf(event.target.closest(".chip"));
    return at < 0 ? null : at;
  }

  #send(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  #take(index) {
    if (index === null) return;
    this.selected = index === this.#selected ? null : index;
    this.#send("pick", this.#selected);
  }

  #key(event) {
    const here = [...this.children].indexOf(document.activeElement);
    const last = this.children.length - 1;
    const to = { ArrowRight: here + 1, ArrowDown: here +
      1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.children[Math.max(0, Math.min(last, to))]?.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#take(here < 0 ? null : here);
    }
  }
}

customElements.define("glass-chips", Chips);
