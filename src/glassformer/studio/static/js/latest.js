/* Requests while a slider moves: one at a time; of the values chosen meanwhile, only the last one is requested next.
 *
 *   latest(f) -> a function that runs async f; calls during a run cause one more run after it
 *
 * The figure follows the slider as fast as the server responds, and no request is made in vain.
 */
export function latest(f) {
  let [running, wanted] = [false, false];
  return async () => {
    wanted = true;
    if (running) return;
    running = true;
    try {
      while (wanted) {
        wanted = false;
        await f();
      }
    } finally {
      running = false;
    }
  };
}
