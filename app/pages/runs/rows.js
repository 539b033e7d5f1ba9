// One row of the list of runs.

import { el } from "../../shared/dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 96,
    HEIGHT = 30,
    EDGE = 2;

const ABOUT_QUEUE = "It is resumed when the runs before it have ended";

// Returns the node of a row. `works` are functions of the run and the pressed button by the name of
// the action; `tick` is the run's box.
export function rowOf(run, works, tick) {
    const state = el(
        "span",
        { class: "rs-state", "data-tone": run.tone, title: run.reason },
        run.word,
    );
    const row = el(
        "tr",
        { "data-run": run.id },
        el("td", { class: "rs-pick" }, tick, state),
        nameCell(run, works),
        el("td", { class: "rs-spark", "data-tone": run.curve_tone }, curve(run)),
        lossCell(run),
        el("td", {}, run.model, el("small", {}, run.data)),
        timeCell(run),
        el("td", { class: "rs-row-actions" }, actions(run, works)),
    );
    if (run.actions.includes("open")) {
        row.classList.add("rs-opens");
        row.addEventListener("click", ({ target }) => {
            const isOwn = target.closest("button, input, summary, label, a");
            // A click that ends a selection of text opens nothing.
            if (!isOwn && getSelection().isCollapsed) works.open(run);
        });
    }
    return row;
}

function nameCell(run, works) {
    const name = run.actions.includes("open")
        ? button(run, "open", run.name, works, "rs-link", "Open: ")
        : el("strong", {}, run.name);
    const note = run.note ? el("p", { class: "rs-note" }, run.note) : null;
    const reason = run.worse || (run.tone === "bad" && run.reason);
    const why = reason ? el("small", { class: "rs-error" }, reason) : null;
    const tags = run.tags.map((tag) => el("span", { class: "rs-tag" }, tag));
    return el(
        "td",
        {},
        name,
        tags.length ? el("span", { class: "rs-tags" }, ...tags) : null,
        note,
        run.name === run.id ? null : el("small", {}, run.id),
        why,
    );
}

function lossCell(run) {
    const line = (label, value) =>
        value ? el("small", {}, `${label} `, el("b", {}, value)) : null;
    return el(
        "td",
        { class: "rs-number", "data-label": "Loss" },
        run.loss,
        line("validation", run.validation),
        line("answered", run.accuracy),
    );
}

function timeCell(run) {
    const work = run.state === "unreadable" ? "" : `${run.steps} steps in ${run.at_work}`;
    const facts = [work, run.size].filter(Boolean).join(" · ");
    return el("td", {}, started(run.created), el("small", {}, facts));
}

function started(seconds) {
    return new Date(1000 * seconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

// ---------------------------------------------------------------- actions

function actions(run, works) {
    const one = (act, label) => button(run, act, label, works);
    const first = [
        one("resume", run.begins_anew ? "Start again" : "Resume"),
        one("queue", "Queue its resume"),
        one("chat", "Chat"),
    ];
    const more = [
        one("details", "Settings"),
        one("draft", "New run from this one"),
        one("train-on", "Train on"),
        one("export", "Export"),
        one("delete", "Delete"),
    ];
    first[1]?.setAttribute("title", ABOUT_QUEUE);
    const summary = el(
        "summary",
        { "aria-label": `More: ${run.name}`, "data-act": "more" },
        "More",
    );
    return el(
        "div",
        {},
        ...first,
        el("details", { class: "rs-more" }, summary, el("div", {}, ...more)),
    );
}

function button(run, act, label, works, kind = "rs-small", caption = `${label}: `) {
    if (!run.actions.includes(act)) return null;
    return el(
        "button",
        {
            type: "button",
            class: kind,
            "data-act": act,
            "aria-label": `${caption}${run.name}`,
            click: ({ target }) => works[act](run, target),
        },
        label,
    );
}

// ---------------------------------------------------------------- the small curve

// Draws the loss of the whole run, from its lowest to its highest value.
function curve(run) {
    const values = run.curve;
    if (values.length < 2) return null;
    const low = Math.min(...values),
        high = Math.max(...values);
    const across = (WIDTH - 2 * EDGE) / (values.length - 1);
    const down = high > low ? (HEIGHT - 2 * EDGE) / (high - low) : 0;
    const points = values.map((value, index) => {
        const x = EDGE + index * across,
            y = EDGE + (high - value) * down;
        return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    const drawing = document.createElementNS(SVG, "svg");
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    drawing.setAttribute("role", "img");
    const [first, last] = [values[0], values[values.length - 1]];
    drawing.setAttribute("aria-label", `Loss from ${first} to ${last}`);
    drawing.append(line);
    return drawing;
}
