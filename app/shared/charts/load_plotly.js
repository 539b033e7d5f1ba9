// Loads plotly.js when a chart is first needed: it is larger than everything else of the page.

import { el, isShown } from "../dom.js";

const PATIENCE = 2000; // ms after a failure in which no drawing tries again by itself

let loading = null; // the promise of plotly.js
const missed = new Set(); // the drawings that a failure has left out

const notice = el(
    "div",
    { class: "rs-unloaded", role: "alert" },
    el("p", {}, "The charts could not be loaded: the server does not answer."),
    el("button", { type: "button", click: tryAgain }, "Try again"),
);

// Begins to load plotly.js for charts that are drawn in a moment. If it fails, a drawing says so.
export function preparePlotly() {
    loadPlotly().catch(() => {});
}

// Returns plotly.js for a drawing in `node`, or null if it cannot be loaded. The page then says so
// in one of the charts, with a button that calls `draw` again.
export async function plotlyFor(node, draw) {
    try {
        const Plotly = await loadPlotly();
        if (notice.isConnected) leaveNotice();
        return Plotly;
    } catch {
        missed.add(draw);
        if (!isShown(notice)) node.append(notice);
        return null;
    }
}

function loadPlotly() {
    loading ??= load();
    return loading;
}

function load() {
    const address = document.querySelector('meta[name="ramstream-plotly"]').content;
    const found = new Promise((resolve, reject) => {
        const script = el("script", {
            src: address,
            load: () => resolve(window.Plotly),
            error: () => {
                script.remove();
                setTimeout(() => forget(found), PATIENCE);
                reject(new Error("plotly.js could not be loaded."));
            },
        });
        document.head.append(script);
    });
    return found;
}

function forget(failed) {
    if (loading === failed) loading = null;
}

function tryAgain() {
    loading = null;
    const drawings = [...missed];
    missed.clear();
    for (const draw of drawings) draw();
}

// The focus stays with the chart.
function leaveNotice() {
    const node = notice.parentElement;
    const hadFocus = notice.contains(document.activeElement);
    notice.remove();
    if (!hadFocus) return;
    if (!node.hasAttribute("tabindex")) node.tabIndex = -1;
    node.focus();
}
