// Draws charts one after the other. Each is drawn in a task of its own, so that clicks and
// scrolling wait for at most one chart. Pages in one browser take turns too: on few processors,
// each of several charts that are drawn at once takes as long as all of them.

const TURN = "ramstream-drawing";
// After this many ms a page draws anyway: the page whose turn it is may be halted, for example in a
// debugger.
const PATIENCE = 500;

const waiting = new Set();
let isDrawing = false;

const asTask = window.scheduler?.postTask
    ? (work) => scheduler.postTask(work, { priority: "user-visible" })
    : (work) => setTimeout(work, 0);

// Calls `draw` soon, and only once for all requests until then.
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
        await inTurn(draw);
    } catch (error) {
        reportError(error); // a chart that cannot be drawn must not block the others
    }
    isDrawing = waiting.size > 0;
    if (isDrawing) asTask(drawNext);
}

async function inTurn(draw) {
    // Browsers provide locks only to pages from this machine or over https.
    if (!navigator.locks) {
        await draw();
        return;
    }
    let isGranted = false;
    try {
        await navigator.locks.request(TURN, { signal: AbortSignal.timeout(PATIENCE) }, () => {
            isGranted = true;
            return draw();
        });
    } catch (error) {
        if (isGranted) throw error;
        await draw();
    }
}
