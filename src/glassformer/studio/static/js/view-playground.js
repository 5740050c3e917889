/* Playground: what comes next, and how it is chosen. Parts: distribution.js, writing.js, beams.js. */
import { beams } from "./beams.js";
import { nextToken } from "./distribution.js";
import { View } from "./view.js";
import { writing } from "./writing.js";

class Playground extends View {
  build() {
    this.next = nextToken(this);
    this.writing = writing(this, () => this.next.sampling());
    this.beams = beams(this);
    this.append(this.next.root, this.writing.root, this.beams.root);
  }

  update(changed) {
    if (changed.has("ids") || changed.has("token")) this.next.ask();
    if (changed.has("ids")) {
      this.writing.reset();
      this.beams.reset();
    }
  }

  leave() {
    this.writing.stop();
  }
}

customElements.define("glass-playground", Playground);
