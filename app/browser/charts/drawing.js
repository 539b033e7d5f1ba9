// Drawing in turn: each chart is drawn in a task of its own, so that clicks and scrolling never
// wait for more than one; pages of one browser take turns, since charts that are drawn at once on
// few processors all take as long as all of them.

const TURN = "ramstream-drawing";
const PATIENCE = 500; // ms until a page draws anyway: another one may stand still, in a debugger say

const waiting = new Set();
let isDrawing = false;

const asTask = window.scheduler?.postTask
    ? (work) => scheduler.postTask(work, { priority: "user-visible" })
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
        await inTurn(draw);
    } catch (error) {
        reportError(error); // one chart that cannot be drawn holds up no other
    }
    isDrawing = waiting.size > 0;
    if (isDrawing) asTask(drawNext);
}

async function inTurn(draw) {
    if (!navigator.locks) return draw(); // which a page has that is secure, or of this machine
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
