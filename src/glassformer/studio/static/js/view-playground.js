/* Playground view: next-token distribution, text generation, beam search, and chat for models with a template. */
import { beams } from "./beams.js";
import { nextToken } from "./distribution.js";
import { store } from "./store.js";
import { View } from "./view.js";
import { generation } from "./generation.js";

class Playground extends View {
  build() {
    this.next = nextToken(this);
    this.generation = generation(this, () => this.next.sampling());
    this.beams = beams(this);
    this.append(this.next.root, this.generation.root, this.beams.root);
  }

  update(changed) {
    if (store.model?.chat) this.addChat();
    if (changed.has("model") || changed.has("state")) this.chat?.update();
    if (changed.has("ids") || changed.has("token")) this.next.ask();
    if (changed.has("ids")) {
      this.generation.reset();
      this.beams.reset();
    }
  }

  /* The chat panel is imported for the first model that has a template: most have none. */
  async addChat() {
    this.adding ??= import("./chat.js");
    const { chat } = await this.adding;
    if (this.chat) return;
    this.chat = chat(this);
    this.prepend(this.chat.root);
    this.chat.update();
  }

  leave() {
    this.generation.stop();
    this.chat?.stop();
  }
}

customElements.define("glass-playground", Playground);
