// Has charts drawn one after the other. Each is drawn in a task of its own, so that clicks and
// scrolling never wait for more than one. Pages of one browser take turns too: where processors are
// few, charts that are drawn at once all take as long as all of them.

const TURN = "ramstream-drawing";
// After so many ms a page draws anyway: another one may stand still, say in a debugger.
const PATIENCE = 500;

const waiting = new Set();
let isDrawing = false;

const asTask = window.scheduler?.postTask
    ? (work) => scheduler.postTask(work, { priority: "user-visible" })
    : (work) => setTimeout(work, 0);

// Calls `draw` soon: once, however often it is asked for until then.
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
        reportError(error); // one chart that cannot be drawn holds up no other
    }
    isDrawing = waiting.size > 0;
    if (isDrawing) asTask(drawNext);
}

async function inTurn(draw) {
    // Only pages of this machine, or by https, have locks.
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
