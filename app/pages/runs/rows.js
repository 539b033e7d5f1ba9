// One row of the list of runs.

import { el } from "../../shared/dom.js";
import { clockText, dayText, isToday, momentText } from "../../shared/moments.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 96,
    HEIGHT = 30,
    EDGE = 2;

const PIN = "M9 3h6M10 3v6l-3 5h10l-3-5V3M12 14v7";

const UNKNOWN = "–";
const BOTH = "base model → trained";

const LABELS = {
    resume: "Resume",
    queue: "Add to queue",
    chat: "Chat",
    rename: "Rename…",
    details: "Settings",
    draft: "Duplicate",
    "train-on": "Continue training from here",
    evaluate: "Evaluate",
    export: "Export",
    pin: "Pin to the top",
    baseline: "Set as baseline",
    delete: "Delete…",
};

const cells = {
    name: nameCell,
    state: stateCell,
    curve: (run) => [curve(run)],
    validation: (run) => [run.validation, run.before],
    accuracy: ({ accuracy }) => [accuracy.share, accuracy.count],
    loss: (run) => [run.loss],
    evaluated_loss: ({ evaluated }) => [evaluated.loss, BOTH],
    evaluated_right: ({ evaluated }) => [evaluated.right, BOTH],
    tasks: ({ evaluated }) => [evaluated.tasks || UNKNOWN, evaluated.tasks],
    steps: (run) => [run.steps],
    model: (run) => [shortened(run.model), run.model],
    data: (run) => [shortened(run.data), run.data],
    time: (run) => [run.at_work],
    size: (run) => [run.size || UNKNOWN],
    note: (run) => [run.note, run.note],
    started: (run) => [started(run.created), momentText(run.created)],
};

// Returns the node of a row with the `columns`. `works` are functions of the run and the pressed
// button by the name of the action; `tick` is the run's box; `marks` say whether it is pinned, or
// the baseline; openMenu(button) opens its other actions.
export function rowOf(run, { columns, works, tick, marks, openMenu }) {
    const row = el(
        "tr",
        { "data-run": run.id, class: marks.isPinned ? "rs-pinned" : "" },
        el("td", { "data-column": "pick" }, tick),
        ...columns.map((column) => cellOf(column, run, { works, marks })),
        el("td", { "data-column": "actions" }, el("div", {}, ...actions(run, works, openMenu))),
    );
    if (run.actions.includes("open")) {
        row.classList.add("rs-opens");
        row.addEventListener("click", ({ target }) => {
            const isOwn = target.closest("button, input, label, a");
            // A click that ends a selection of text opens nothing.
            if (!isOwn && getSelection().isCollapsed) works.open(run);
        });
    }
    return row;
}

function cellOf({ name, label }, run, about) {
    const [content, title] = cells[name](run, about);
    const attributes = { "data-column": name, "data-label": label, title };
    if (content === UNKNOWN) attributes["data-unknown"] = "";
    if (name === "curve") attributes["data-tone"] = run.curve_tone;
    return el("td", attributes, content);
}

function nameCell(run, { works, marks }) {
    const name = run.actions.includes("open")
        ? button(run, "open", run.name, works, "rs-link", "Open: ")
        : el("strong", {}, run.name);
    const badges = [
        marks.isPinned ? el("span", { class: "rs-pin", title: "Pinned" }, pin()) : null,
        marks.isPinned ? el("span", { class: "rs-hidden" }, "pinned") : null,
        marks.isBaseline ? el("span", { class: "rs-tag rs-mark" }, "baseline") : null,
        ...run.tags.map((tag) => el("span", { class: "rs-tag" }, tag)),
    ];
    const title = [run.name, run.note, run.id].filter(Boolean).join("\n");
    return [el("div", { class: "rs-run-name" }, name, ...badges), title];
}

function pin() {
    const drawing = document.createElementNS(SVG, "svg");
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", PIN);
    drawing.setAttribute("viewBox", "0 0 24 24");
    drawing.setAttribute("aria-hidden", "true");
    drawing.append(path);
    return drawing;
}

// Why a run failed is in a tooltip, and is read by screen readers.
function stateCell(run) {
    const reason = [run.worse, run.reason].filter(Boolean).join(" ");
    const hidden = reason ? el("span", { class: "rs-hidden" }, `: ${reason}`) : null;
    return [el("span", { class: "rs-state", "data-tone": run.tone }, run.word, hidden), reason];
}

// The last part of a path or of an id of the hub.
function shortened(text) {
    return text.split("/").filter(Boolean).pop() ?? "";
}

const started = (seconds) => (isToday(seconds) ? clockText(seconds) : dayText(seconds));

// ---------------------------------------------------------------- actions

// Returns the items of a run's menu.
export function itemsOf(run, works, { isPinned, isBaseline }) {
    const words = {
        ...LABELS,
        resume: run.begins_anew ? "Start again" : LABELS.resume,
        pin: isPinned ? "Unpin" : LABELS.pin,
        baseline: isBaseline ? "Remove as baseline" : LABELS.baseline,
    };
    const marks = run.actions.includes("compare") ? ["pin", "baseline"] : ["pin"];
    const possible = [...run.actions, "rename", ...marks];
    return Object.keys(LABELS)
        .filter((act) => possible.includes(act))
        .map((act) => ({
            act,
            label: words[act],
            isDangerous: act === "delete",
            work: (pressed) => works[act](run, pressed),
        }));
}

function actions(run, works, openMenu) {
    const act = ["resume", "queue"].find((name) => run.actions.includes(name));
    const label = act === "resume" && run.begins_anew ? "Start again" : LABELS[act];
    const more = el(
        "button",
        {
            type: "button",
            class: "rs-menu-button",
            "data-act": "more",
            "aria-label": `More: ${run.name}`,
            "aria-haspopup": "menu",
            "aria-expanded": "false",
            title: "More",
            click: ({ currentTarget }) => openMenu(currentTarget),
        },
        "⋯",
    );
    return [act ? button(run, act, label, works) : null, more].filter(Boolean);
}

function button(run, act, label, works, kind = "rs-small", caption = `${label}: `) {
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
