// Drawing in turn: each chart is drawn in a task of its own, so that clicks and scrolling never wait for more than one.

const waiting = new Set();
let isDrawing = false;

const asTask = window.scheduler?.postTask ? (work) => scheduler.postTask(work, {priority: 'user-visible'})
  : (work) => setTimeout(work, 0);

// Calls `draw` soon; once, however often it is asked for until then.
export function drawLater(draw) {
  waiting.add(draw);
  if (isDrawing) return;
  isDrawing = true;
  asTask(drawNext);
}

async function drawNext() {
  const [draw] = waiting;
  waiting.delete(draw);
  try {
    await draw();
  } catch (error) {
    reportError(error);  // one chart that cannot be drawn holds up no other
  }
  isDrawing = waiting.size > 0;
  if (isDrawing) asTask(drawNext);
}
