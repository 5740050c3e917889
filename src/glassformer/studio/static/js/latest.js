/* Asking while a slider moves: one request at a time, and what was wanted meanwhile is asked next, only the last of it.
 *
 *   latest(f) -> a function that runs async f; calls during a run make one more run after it
 *
 * The picture follows the slider at the server's pace, and no work is begun only to be thrown away.
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
