// Draws the preview of the data: the first rows with the trained parts marked, and the lengths of
// the examples.

import { SmallFigure } from "../../shared/charts/small_figure.js";
import { el, field } from "../../shared/dom.js";
import { give } from "./changes.js";
import { Mapping } from "./mapping.js";

const PATIENCE = 600; // ms until the page says that it is waiting
const FLAGS = "data.unused_flags";
const isColumn = (name) => name.startsWith("data.columns.");
const OTHER_DATA = "These columns are of the data before; those of the new data are looked up.";

const typedSource = () =>
    document.querySelector('#field-data-source [data-testid="textbox"]')?.value;

export function drawPreview(place, preview) {
    // The old preview stays until the answer arrives. If that takes long, it is removed: its rows
    // are not those of the data that are being read.
    clearTimeout(place.late);
    const { element } = place;
    element.querySelector(".rs-preview").setAttribute("aria-busy", Boolean(preview.pending));
    if (preview.pending) {
        place.late = setTimeout(() => {
            field(element, "understood").classList.remove("rs-error");
            clearRows(element, "Reading the first rows …");
            drawLengths(place, null);
        }, PATIENCE);
        return;
    }
    const failed = Boolean(preview.error);
    place.mapping ??= new Mapping(element.querySelector(".rs-mapping"), (changes) =>
        applyColumns(place, changes),
    );
    if (!isOfColumnsBefore(place, preview) && !isBeforeRefusal(place, preview)) {
        place.mapping.show(preview.mapping ?? null, failed && !preview.confirm);
    }
    place.source = preview.given?.["data.source"];
    field(element, "understood").classList.toggle("rs-error", failed);
    field(element, "understood").classList.toggle(
        "rs-unread",
        "unread" in preview && !preview.texts,
    );
    field(element, "understood").classList.toggle("rs-as-is", Boolean(preview.texts));
    element.querySelector(".rs-preview-key").hidden = failed || !preview.rows;
    ask(place, preview);
    if (isOfDataBefore(place, preview)) clearColumns(place);
    else if (isConfirmedForOther(place, preview)) clearConfirmed(place);
    if (preview.rows) drawRows(element, preview);
    else clearRows(element, preview.error ?? preview.unread ?? "", preview.texts);
    drawLengths(place, preview.rows ? preview : null);
}

// Offers to confirm that keys of the data are no flags.
function ask(place, { confirm, given }) {
    const root = place.element.querySelector(".rs-preview-ask");
    root.hidden = !confirm;
    if (!confirm) return;
    const button = root.querySelector("button");
    button.textContent = confirm.new === 1 ? "This key is no flag" : "These keys are no flags";
    button.onclick = () => {
        const source = given["data.source"];
        if (source !== typedSource()) return; // other data were typed meanwhile
        place.confirmed = { source, flags: confirm.shown };
        give(place, { [FLAGS]: confirm.shown });
    };
}

// Whether the form still has the flags that a person confirmed for other data, and no others.
function isConfirmedForOther({ confirmed }, { given = {} }) {
    if (!confirmed || given["data.source"] === confirmed.source) return false;
    return given[FLAGS] === confirmed.flags;
}

function clearConfirmed(place) {
    place.confirmed = null;
    give(place, { [FLAGS]: "" });
}

// Makes settings of the chosen columns. Gradio does that, since it owns the form. The columns are
// those of the last answer, also while the same data are being read again.
function applyColumns(place, changes) {
    const { source } = place;
    if (source !== typedSource()) {
        // Other data were typed meanwhile, and their preview has been requested.
        place.isRefused = true;
        place.mapping.report(OTHER_DATA);
        return;
    }
    place.mapped = { source, columns: columnsIn(changes) };
    place.awaitsMapped = !("data.source" in changes);
    give(place, changes);
}

// Whether the data were already being read when a person chose columns. The choice stays until the
// answer to it, which is the next one.
function isOfColumnsBefore(place, { given = {} }) {
    const { mapped, awaitsMapped } = place;
    place.awaitsMapped = false;
    if (!awaitsMapped || !mapped || given["data.source"] !== mapped.source) return false;
    return columnsIn(given) !== mapped.columns;
}

// Whether columns were refused since other data were typed, and this is once more an answer on the
// data before. Its columns would be refused, too: the sentence that says why stays until the answer
// on what was typed.
function isBeforeRefusal(place, { given = {} }) {
    place.isRefused &&= given["data.source"] !== typedSource();
    return place.isRefused;
}

// The columns that values of the form name, as text that can be compared.
function columnsIn(values) {
    const named = Object.entries(values).filter(([name, value]) => isColumn(name) && value);
    return JSON.stringify(named.sort());
}

// Whether the form still names the columns that a person chose for other data. Columns that were
// typed since are the person's own.
function isOfDataBefore({ mapped }, { given = {} }) {
    if (!mapped || given["data.source"] === mapped.source) return false;
    const named = columnsIn(given);
    return named !== "[]" && named === mapped.columns;
}

function clearColumns(place) {
    const { given } = place.props.value;
    place.mapped = null;
    const names = Object.keys(given).filter(isColumn);
    give(place, Object.fromEntries(names.map((name) => [name, ""])));
}

// texts: the rows as they are, where a model is missing that would read them.
function clearRows(element, problem, texts = []) {
    field(element, "understood").textContent = problem;
    element.querySelector(".rs-preview-key").hidden = true;
    field(element, "rows").replaceChildren(...texts.map(plainRow));
    field(element, "warnings").replaceChildren();
}

function plainRow({ where, text }) {
    return el("li", {}, el("p", { class: "rs-tokens" }, text), el("small", {}, where));
}

function drawRows(element, preview) {
    field(element, "understood").textContent = understoodText(preview);
    const notes = [`${preview.percent_trained} % is learned`];
    if (preview.rows_skipped) notes.push(`${preview.rows_skipped} are skipped`);
    if (preview.ends.length) notes.push(`answers end with ${preview.ends.join(" or ")}`);
    field(element, "counted").textContent = `· ${notes.join(" · ")}`;
    field(element, "rows").replaceChildren(...preview.rows.map(rowNode));
    field(element, "warnings").replaceChildren(
        ...[preview.endless, ...preview.warnings].filter(Boolean).map((each) => el("li", {}, each)),
    );
}

// How the rows are read, in the words of what people mean by them, or whether they are.
function understoodText({ mapping, format, format_detected: isDetected, columns }) {
    if (mapping?.question) return mapping.question;
    const named = (meant) =>
        columns.filter(([, meaning]) => meaning === meant).map(([name]) => name);
    // A mix has columns of each of its data sets.
    const [prompts, answers] = [named("the prompt"), named("the answer")];
    const turns = named("the turns of the conversation");
    if (answers.length && columns.length === prompts.length + answers.length)
        return `Prompt: ${prompts.join(", ")} · Answer: ${answers.join(", ")}`;
    if (columns.length && columns.length === turns.length) {
        const which = turns.length === 1 ? "column" : "columns";
        return `Conversations found (${which} ${turns.join(", ")})`;
    }
    const how = isDetected ? "Recognized as" : "Read as";
    const meanings = columns.map(([name, meaning]) => `${name} → ${meaning}`);
    return meanings.length ? `${how} ${format}: ${meanings.join(", ")}.` : `${how} ${format}.`;
}

function rowNode({ skipped, spans, where, tokens, trained_tokens: trained, cut }) {
    const text = skipped ? [el("em", {}, `Skipped: ${skipped}`)] : spans.flatMap(spanNodes);
    const counted = `${where} · ${tokens} tokens, ${trained} trained${cut ? " · cut" : ""}`;
    return el("li", {}, el("p", { class: "rs-tokens" }, ...text), el("small", {}, counted));
}

// The text of a span. The answers of a pair have a name and a color each, and an answer with a
// weight of its own shows it.
function spanNodes({ text, trained, answer, weight }) {
    if (weight !== undefined) {
        return [el("b", { class: "rs-answer-name" }, `weight ${weight}`), el("mark", {}, text)];
    }
    if (!answer) return [el(trained ? "mark" : "span", {}, text)];
    return [
        el("b", { class: "rs-answer-name" }, answer),
        el("mark", { class: `rs-${answer}` }, text),
    ];
}

// Shows the lengths of the examples; null removes the figure.
function drawLengths(place, preview) {
    const root = place.element.querySelector(".rs-lengths");
    root.hidden = !preview?.caption;
    if (root.hidden) return;
    place.lengths ??= new SmallFigure(root.querySelector(".rs-lengths-plot"));
    place.lengths.show(preview.lengths, preview.caption);
    root.querySelector("p").textContent = preview.caption;
    root.title = preview.packing;
}
