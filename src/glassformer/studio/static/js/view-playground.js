/* Playground view: next-token distribution, text generation, beam search. */
import { beams } from "./beams.js";
import { nextToken } from "./distribution.js";
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
    if (changed.has("ids") || changed.has("token")) this.next.ask();
    if (changed.has("ids")) {
      this.generation.reset();
      this.beams.reset();
    }
  }

  leave() {
    this.generation.stop();
  }
}

customElements.define("glass-playground", Playground);
