// Draws the places of New: the machine, the fit panel next to Start, and the preview of the
// data; and requests a fit panel whenever the form has changed.

import { el, field, isShown, send } from "../../shared/dom.js";
import { tabName } from "../../shared/tab.js";
import { give, whenGiven } from "./changes.js";
import { CopyCommand } from "./copy_command.js";
import { DerivedDefaults } from "./derived_defaults.js";
import { FieldLink } from "./field_link.js";
import { differ, findingOn, isOf, withFinding } from "./finding.js";
import { FitPart, needRow } from "./fit_part.js";
import { foldByTitles, searchLists, summarize, tipsOfLists } from "./folded.js";
import { Models } from "./models.js";
import { NewHead } from "./new_head.js";
import { offerCard, reasonRow } from "./offers.js";
import { earlyAnswer } from "./opening.js";
import { drawPreview } from "./preview.js";
import { Receipt } from "./receipt.js";
import { isSame, Replaced } from "./replaced.js";
import { RunLength } from "./run_length.js";
import { SettingsTools } from "./settings_tools.js";
import { StartGate } from "./start_gate.js";
import { isKnown, MODEL, Suggestions } from "./suggestions.js";
import { Task } from "./task.js";
import { waitUntilFilled } from "./unfilled.js";

// Times in ms until a fit panel is requested, by the reason for the request.
const TYPING_PAUSE = 80; // a letter was typed
const TIMES_PAUSE = 250; // a fit panel stands, and its suggestions have no times yet
const AT_ONCE = 20; // something was chosen or pasted
const TOGETHER = 5; // Gradio has sent the form, which it may do again
const RETRY = 2000; // the server did not answer, or failed to
const AGAIN = 10000; // free memory may be another, or another run under way
const LOST = 10000; // what was chosen has not arrived in the form
const BEHIND = 100; // Gradio has not yet received what the boxes show
const TIMES_BEHIND = 50; // this many attempts
const TIMES_OLDER = 3; // at most this many repeated requests for a preview of an older form
const TO_ENTER = "Press Enter to check";
const AWAY = "The server does not answer; what you type is kept here and checked when it does.";
const FORM = ".rs-train";
const REST = ".rs-rest > :not(button)"; // what the folded section holds
const BOX = '[data-testid="textbox"]';
const SOURCES = `:is(#field-model-source, #field-data-source) ${BOX}`;

const draw = {
    sidebar: (place, value) => drawText(place, "machine", value),
    about: drawAbout,
    why_not: (place, value) => drawText(place, "why_not", value),
    queued: drawQueued,
    copy_command: mountCopy,
    run_length: mountLength,
    task: mountTask,
    models: mountModels,
    settings_tools: mountTools,
    preview: takePreview,
};
const places = {}; // by name, as received from Gradio
let showMachines = null; // shows the machines for a model, on another page

export function leadToMachines(show) {
    showMachines = show;
}

export function mountTrain(place) {
    places[place.name] = place;
    if (place.name === "fit_panel") {
        mountVerdict(place);
        return;
    }
    if (place.name === "new_head") {
        place.shown = new NewHead(place.element, replaceDraft, begins);
        return;
    }
    const show = () => draw[place.name]?.(place, place.props.value ?? {});
    place.watch("value", show);
    show();
}

function drawText({ element }, name, value) {
    field(element, name).textContent = value[name] ?? "";
}

function drawAbout(place, value) {
    place.replaced ??= new Replaced(place);
    drawText(place, "about", value);
}

function drawQueued(place, value) {
    drawText(place, "queued", value);
    place.element.querySelector('[data-part="see-queue"]').hidden = !value.is_queued;
}

function takePreview(place, preview) {
    drawPreview(place, preview);
    if (preview.pending) return;
    place.read = preview;
    if (preview.rows) countRows(preview.given?.["data.source"]);
    const { fit_panel: fit } = places;
    if (!fit?.answer) return;
    showTask(fit);
    // Otherwise nothing changes, and what Start has answered stays.
    if (differ(fit.finding, findingOn(fit.form, preview))) judge(fit);
    askForPreview();
}

// The preview may be of an earlier form: answers may arrive out of order, and Gradio asks for none
// while another one is under way. A box in use requests a new preview when it loses the focus; that
// of a source may keep it after its name is entered.
function askForPreview() {
    const { fit_panel: fit, preview: place } = places;
    const box = document.activeElement;
    const isTyped = box?.matches(`${FORM} ${BOX}`) && (isNamed(fit) || !box.matches(SOURCES));
    if (!place?.read || place.props.value?.pending || isTyped) return;
    // Each form may ask so often: on a busy machine its values may reach Gradio late.
    const form = JSON.stringify(fit.form.shown);
    if (form !== place.asked) place.older = 0;
    place.asked = form;
    place.older = isOf(fit.form, place.read) ? 0 : (place.older ?? 0) + 1;
    if (place.older && place.older <= TIMES_OLDER) place.trigger("submit");
}

// Is called when the page is shown, and when its form was filled. Once both have happened, the
// first preview of the data is requested.
// `again`: another page was shown meanwhile, in which rates may have been measured.
export function trainShown(again = false) {
    const { fit_panel: fit, preview } = places;
    if (again && fit?.form) {
        waitUntilFilled(fit.element.closest(FORM), isFilled); // redrawn only now
        places.models?.models.shownAgain();
        fit.ask(AT_ONCE);
        ownAgain(fit);
    }
    if (!fit?.form || !preview || fit.wasExamined || !isShown(fit.element)) return;
    fit.wasExamined = true;
    preview.trigger("submit");
}

// Who opens New anew finds the own draft, not settings that continued a run.
async function ownAgain(fit) {
    const { continues } = fit.answer ?? {};
    if (!continues || fit.awaits) return;
    const answer = await send("/api/draft/own", { tab: tabName() }).catch(() => null);
    if (!answer?.draft || fit.awaits) return; // something was chosen meanwhile
    replaceDraft(
        answer.draft,
        `Your settings are back, in place of those to continue ${continues}.`,
    );
}

// Is called with whether the server answers. Text typed during an outage is checked, and thereby
// stored, as soon as the server answers again.
export function serverAnswers(isAnswering) {
    const { fit_panel: fit, why_not } = places;
    document.getElementById("preset")?.toggleAttribute("inert", !isAnswering);
    if (isAnswering) fit?.ask(AT_ONCE);
    else if (fit && why_not) {
        fit.props.value = { ...fit.props.value, can_start: false, can_queue: false };
        draw.why_not(why_not, { why_not: AWAY });
    }
}

// ---------------------------------------------------------------- what is typed

function mountVerdict(place) {
    place.models = place.props.value.models;
    place.parts = new Map();
    place.receipt = new Receipt(place.element, () => place.ask(AT_ONCE), fill);
    place.gate = new StartGate(() => place.receipt.asking);
    place.link = new FieldLink(place.element.querySelector('[data-part="to-field"]'));
    askAfterPauses(place);
    listenToBoxes(place);
    tipsOfLists();
    searchLists();
    foldByTitles();
    new Suggestions(place.models);
    place.defaults = new DerivedDefaults({
        nameOf: settingOf,
        form: () => place.form,
        fill,
        note: (notes) => writeRunLength("derived", notes.join(" ")),
        done: () => settle(place),
    });
    whenGiven(() => chosen(place));
    takeForms(place);
    waitUntilFilled(place.element.closest(FORM), isFilled);
}

function mountTools(place) {
    if (place.tools) return;
    place.tools = new SettingsTools(place, fill);
    waitUntilFilled(place.element.closest(REST), isFilled);
    // Gradio makes this place when the section is first opened, after the form was checked.
    if (places.fit_panel?.form) place.tools.took(places.fit_panel.form);
}

export function fill(changes) {
    if (places.preview) give(places.preview, changes);
}

function mountCopy(place) {
    place.copy ??= new CopyCommand(place.element, () => places.fit_panel.form);
}

function mountTask(place) {
    place.task ??= new Task(place.element, fill);
    const { fit_panel: fit } = places;
    if (fit?.form) showTask(fit);
}

function showTask({ form }) {
    places.task?.task.show(form, places.preview?.read);
}

function mountModels(place) {
    const { fit_panel: fit } = places;
    place.models ??= new Models(place.element, fill);
    if (fit?.form) place.models.took(fit.form);
    place.models.continues(fit?.answer?.continues ?? "");
}

function mountLength(place) {
    const { fit_panel: fit } = places;
    place.length ??= new RunLength(place.element, fill, () => places.fit_panel?.answer?.length);
    if (fit?.form) place.length.took(fit.form);
}

// Fills the form with a draft. words: what stands above the form then, beside Undo.
function replaceDraft(draft, words) {
    const { fit_panel: fit, about } = places;
    if (!fit?.form || !about?.replaced) return;
    about.replaced.replace(draft, fit.form, words);
    chosen(fit);
}

// The id of the button that begins these settings: empty while they are not those of the form, or
// not checked, or cannot begin.
function begins(shown) {
    const { fit_panel: fit } = places;
    if (!fit?.form || !isSame(shown, fit.form.shown) || fit.receipt.asking) return "";
    const { can_start, can_queue } = fit.props.value;
    const id = can_start ? "start" : can_queue ? "add-to-queue" : "";
    return id && document.getElementById(id)?.disabled === false ? id : "";
}

function writeRunLength(name, text) {
    if (places.run_length) field(places.run_length.element, name).textContent = text;
}

// Has the rows of the form's data counted, which the fit panel then shows. Reading them may take a
// while, and nothing waits for it. Settings then follow data that a person has just chosen.
async function countRows(source) {
    const { fit_panel: fit } = places;
    if (!fit?.form) return;
    const { shown } = fit.form;
    const answer = await send("/api/rows", { shown }).catch(() => null);
    if (!answer || !fit.form) return;
    fit.ask(AT_ONCE);
    if (!fit.defaults.takesData(source)) return;
    const asked = { shown: fit.form.shown };
    const { changes } = await send("/api/fitting", asked).catch(() => ({ changes: {} }));
    if (Object.keys(changes).length) fill(changes);
}

// Gives the place two functions that request a fit panel after a pause; a later call restarts the
// pause.
function askAfterPauses(place) {
    let pause;
    place.edited = new Set(); // boxes whose text no check knows yet
    // Makes Gradio pass on the form.
    place.ask = (wait) => {
        clearTimeout(pause);
        pause = setTimeout(() => {
            place.edited.clear();
            // Gradio's form has the beginning of a name already.
            if (place.form && isNamed(place)) check(place, place.form);
            else place.trigger("input");
        }, wait);
    };
    // Requests a fit panel with the text in a box, which is known here well before Gradio has
    // received it and passed on the form.
    place.askFor = (box, wait) => {
        changed(place);
        if (!place.form) {
            place.ask(wait);
            return;
        }
        place.edited.add(box);
        clearTimeout(pause);
        pause = setTimeout(() => {
            const typed = [...place.edited].map((each) => [settingOf(each), each.value]);
            place.edited.clear();
            const shown = { ...place.form.shown, ...Object.fromEntries(typed) };
            check(place, { ...place.form, shown });
        }, wait);
    };
}

// ---------------------------------------------------------------- a verdict of other settings

// Settings have changed: from here on, the verdict that stands is one of other settings. The
// request that is under way, if any, is about those too.
function changed(place, words) {
    place.asking?.abort();
    place.receipt.isAsking(true, words);
}

// Something was chosen that Gradio fills into the form, which it passes on later.
function chosen(place) {
    changed(place);
    clearTimeout(place.lost);
    place.awaits = true;
    place.lost = setTimeout(() => {
        place.awaits = false;
        place.ask(AT_ONCE);
    }, LOST);
}

function arrived(place) {
    clearTimeout(place.lost);
    place.awaits = false;
}

// Shows the verdict once it is about all that was chosen and typed.
function settle(place) {
    if (place.checked !== place.form) return; // asked for now
    const isBehind = place.behind > 0 && place.behind <= TIMES_BEHIND;
    const waits = place.awaits || place.named || place.edited.size || isBehind;
    if (waits || place.defaults.isDeriving) return;
    place.receipt.isAsking(false);
    place.gate.release(place.props.value);
}

// Whether a person is typing the name of a source, which is not entered yet.
function isNamed({ named }) {
    return Boolean(named) && named === document.activeElement;
}

function listenToBoxes(place) {
    document.addEventListener("input", ({ target, inputType }) => {
        // Gradio itself handles checkboxes and lists.
        if (!target.matches(`${FORM} ${BOX}`)) return;
        // The hub is not queried for each beginning of a name: unbundled sources are checked when
        // the box loses the focus or Enter is pressed.
        place.named = target.matches(SOURCES) && !isKnown(place.models, target) ? target : null;
        if (place.named) {
            changed(place, TO_ENTER);
            return;
        }
        const isTyped = /^(insertText|delete)/.test(inputType);
        place.askFor(target, isTyped ? TYPING_PAUSE : AT_ONCE);
    });
    const leave = ({ target }) => {
        if (!target.matches(SOURCES)) return;
        const wasNamed = place.named === target;
        place.named = null;
        const name = settingOf(target);
        // What is wrong as before is marked again.
        const isWrong = nameOf(place.link.field) === name;
        const isNew = place.form?.shown[name] !== target.value;
        if (isNew || wasNamed) changed(place);
        if (isNew || wasNamed || isWrong) place.ask(AT_ONCE);
    };
    document.addEventListener("focusout", leave);
    document.addEventListener("keydown", (event) => {
        if (event.key === "Enter") leave(event);
    });
}

// Gradio passes the form on by a push. It does so twice within a millisecond when an item of a list
// is chosen, and may have done so before this script ran.
function takeForms(place) {
    const given = window.ramstreamForms ?? [];
    let soon;
    window.ramstreamForms = {
        push: ({ settled, ...form }) => {
            if (settled) {
                arrived(place);
                places.about?.replaced?.filled(form);
            }
            if (isChange(place, form)) changed(place);
            clearTimeout(soon);
            soon = setTimeout(() => check(place, form), TOGETHER);
        },
        choosing: () => {
            places.about?.replaced?.choosing(place.form);
            chosen(place);
        },
    };
    for (const form of given) window.ramstreamForms.push(form);
}

// Whether a form has other settings than the one that was checked last.
function isChange(place, { shown }) {
    return !place.form || differ(shown, place.form.shown);
}

// The dotted name of the setting that a box shows.
const settingOf = (box) => nameOf(box.closest('[id^="field-"]')?.id);
const nameOf = (id) => id?.slice("field-".length).replaceAll("-", ".");

async function check(place, form) {
    // Only the newest request counts: the one before is aborted, and its answer is not drawn.
    place.asking?.abort();
    place.asking = new AbortController();
    clearTimeout(place.again);
    const { signal } = place.asking;
    if (isChange(place, form)) place.receipt.isAsking(true);
    place.form = form;
    place.link.took((id) => form.shown[nameOf(id)]);
    place.defaults.took(form);
    places.settings_tools?.tools?.took(form);
    places.run_length?.length.took(form);
    places.files?.files?.took(form);
    summarize(form.shown);
    places.models?.models.took(form);
    showTask(place);
    // A page without any input has nothing to store.
    place.opened ??= JSON.stringify(form);
    if (JSON.stringify(form) !== place.opened) place.typed = true;
    trainShown();
    // On a busy machine, Gradio takes a while to receive what was typed, or to show new values.
    place.behind = !isNamed(place) && isBehind(form.shown) ? (place.behind ?? 0) + 1 : 0;
    if (place.behind && place.behind <= TIMES_BEHIND) place.ask(BEHIND);
    let fit;
    try {
        const keep = Boolean(place.typed);
        const early = keep ? null : await earlyAnswer(form);
        fit = early ?? (await send("/api/check", { tab: tabName(), ...form, keep }, signal));
    } catch (error) {
        // What is wrong with the form itself is so the next time, too.
        const passes = error.unreachable || error.status >= 500;
        if (passes && !signal.aborted) place.ask(RETRY);
        fit = { ...UNCHECKED, reasons: [error.message], why_not: error.message };
    }
    if (signal.aborted) return;
    place.answer = fit;
    place.answered = JSON.stringify(fit);
    place.checked = form;
    lookAgain(place);
    // What a preset says of its data and its model is not true of others.
    document.body.classList.toggle("rs-own", fit.as_preset === false);
    places.new_head?.shown.took(form, fit.as_preset === false || Boolean(place.typed));
    judge(place);
    settle(place);
    askForPreview();
    if (fit.to_be_timed) await askForTimes(place, form, signal);
}

// Asks once more after a while, and draws what is another answer.
function lookAgain(place) {
    place.again = setTimeout(async () => {
        const { form, asking } = place;
        const isSeen = isShown(place.element) && !document.hidden && !place.receipt.asking;
        const fit =
            isSeen && (await send("/api/check", { ...form, keep: false }).catch(() => null));
        if (place.asking !== asking) return; // a newer one was asked for
        if (fit && JSON.stringify(fit) !== place.answered) check(place, form);
        else lookAgain(place);
    }, AGAIN);
}

// Draws the fit panel again, with the time of each suggestion, unless the form has changed
// meanwhile. To predict these times takes longer than the fit panel may take.
async function askForTimes(place, form, signal) {
    await new Promise((resolve) => setTimeout(resolve, TIMES_PAUSE));
    if (signal.aborted) return;
    const asked = { ...form, keep: false, timed: true };
    const fit = await send("/api/check", asked, signal).catch(() => null);
    if (!fit || signal.aborted) return; // the fit panel stands without times
    place.answer = fit;
    judge(place);
}

// Shows the server's fit panel together with what the preview found about the data.
function judge(place) {
    place.finding = findingOn(place.form, places.preview?.read);
    const fit = withFinding(place.answer, place.finding);
    drawFit(place, fit);
    offer(place, fit);
}

// Shows what can be started. Start is Gradio's, and follows these values; it may have said earlier
// why it failed.
function offer(place, { can_start, can_queue, queue_text, why_not, reasons }) {
    place.props.value = { can_start, can_queue, queue_text };
    const beside = reasons.includes(why_not) ? "" : why_not; // nothing stands there twice
    places.why_not.props.value = { why_not: beside };
    draw.why_not(places.why_not, { why_not: beside });
    // A message about a place in the queue is no longer true.
    if (!can_queue && places.queued) draw.queued(places.queued, {});
}

// Whether a box shows a value that differs from the form's. Boxes of a hidden tab do not count:
// they are not redrawn, and nobody types into them.
function isBehind(shown) {
    return [...document.querySelectorAll(`${FORM} ${BOX}`)].some((box) => {
        const name = settingOf(box);
        return isShown(box) && name in shown && (shown[name] ?? "") !== box.value;
    });
}

const isFilled = () => Boolean(places.fit_panel?.form) && !isBehind(places.fit_panel.form.shown);

// ---------------------------------------------------------------- the fit panel

const UNCHECKED = {
    tone: "bad",
    headline: "Cannot be checked now",
    fixes: {},
    job: [],
    continues: "",
    clock: { seconds: null, begins: 0, text: "", why: "", note: "", to_measure: false },
    size: "",
    help: "",
    run_length: "",
    length: null,
    smaller: [],
    model: null,
    free: "",
    lives: "",
    lives_more: "",
    bars: [],
    time: [],
    answers: [],
    suggestions: [],
    to_be_timed: false,
    field: null,
    can_start: false,
    can_queue: false,
    queue_text: "",
};

function drawFit(place, fit) {
    const { element } = place;
    place.receipt.show(fit);
    places.models?.models.continues(fit.continues);
    places.models?.models.judgedWith(fit.free);
    for (const name of ["lives", "lives_more", "size", "help"])
        field(element, name).textContent = fit[name];
    element.querySelector('[data-part="memory"]').hidden = !fit.bars.length;
    field(element, "reasons").replaceChildren(
        ...fit.reasons.map((reason) => reasonRow(reason, fixesOf(reason, fit, place))),
    );
    field(element, "suggestions").replaceChildren(
        ...fit.suggestions.map((each) => offerCard(each, fill)),
    );
    field(element, "needs").replaceChildren(...fit.bars.map(needRow));
    drawParts(place, fit.bars);
    const rows = [...fit.time, ...fit.answers];
    field(element, "time").replaceChildren(...rows.map(timeRow));
    place.link.show(fit.field, fit.reasons[0]);
    writeRunLength("length", fit.run_length);
    drawInstead(element, fit);
}

// What one click can do about a sentence against a run. A guess about columns is confirmed here.
function fixesOf(reason, { fixes }, place) {
    const fix = fixes[reason];
    if (fix) return [{ label: fix.label, act: () => fill(fix.changes) }];
    const isOfData = reason === place.finding?.text;
    return isOfData ? (places.preview?.mapping?.answers() ?? []) : [];
}

// Instead of a model that does not fit: smaller ones that do, and machines that would train it.
function drawInstead(element, { smaller, model }) {
    const part = (name) => element.querySelector(`[data-part="${name}"]`);
    part("smaller").hidden = !smaller.length;
    const use = (id) => () => {
        const box = document.querySelector(MODEL);
        box.value = id;
        box.dispatchEvent(
            new InputEvent("input", { bubbles: true, inputType: "insertReplacementText" }),
        );
    };
    field(element, "smaller").replaceChildren(
        ...smaller.map(({ id, title }) =>
            el("button", { type: "button", class: "rs-small", title: id, click: use(id) }, title),
        ),
    );
    part("machines").hidden = !model;
    part("machines").querySelector("button").onclick = () =>
        showMachines?.(model, jobOf(places.fit_panel.form.shown));
}

// The form's settings by the names that Hardware has for them, where it has them.
function jobOf(shown) {
    return {
        method: shown["train.method"] === "lora" ? "lora" : "full",
        rows: shown["train.batch_size"],
        tokens: shown["data.max_seq_len"],
        dtype: shown["model.dtype"],
        optimizer: shown["train.optimizer"],
    };
}

function timeRow({ name, text, note }) {
    const small = note ? el("small", {}, note) : null;
    return el("div", {}, el("dt", {}, name), el("dd", {}, text, small));
}

function drawParts({ element, parts }, bars) {
    // A part keeps its nodes, so that a person's unfolded items stay unfolded.
    for (const bar of bars) {
        if (!parts.has(bar.name)) parts.set(bar.name, new FitPart(bar));
        parts.get(bar.name).show(bar);
    }
    const shown = bars.map((bar) => parts.get(bar.name).root);
    const place = field(element, "bars");
    const isSame =
        shown.length === place.children.length &&
        shown.every((node, index) => node === place.children[index]);
    if (!isSame) place.replaceChildren(...shown);
}
