/* Residual stream view: logit lens, logit attribution, norms and rank by depth, activation patching. */
import { attribution } from "./attribution.js";
import { depthPanels } from "./depth.js";
import { lensGrid } from "./lens-grid.js";
import { patching } from "./patching.js";
import { View } from "./view.js";

class Stream extends View {
  build() {
    this.lens = lensGrid(this);
    this.attribution = attribution(this);
    this.depth = depthPanels(this);
    this.patching = patching(this);
    this.append(this.lens.root, this.attribution.root, ...this.depth.roots, this.patching.root);
  }

  update(changed) {
    if (changed.has("model") || changed.has("state")) this.patching.start();
    if (changed.has("ids")) {
      this.lens.ask();
      this.depth.ask();
      this.attribution.ask();
    } else if (changed.has("token")) {
      this.lens.mark();
      this.depth.draw();
      this.attribution.ask();
    } else if (changed.has("answer") || changed.has("wrong")) this.attribution.ask();
  }
}

customElements.define("glass-stream", Stream);

