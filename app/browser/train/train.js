// Draws the Train tab's places: the machine, the verdict next to Start, and the preview of the
// data; and requests a verdict whenever the form has changed.

import { SmallFigure } from "../charts/small_figure.js";
import { el, field, isShown, send } from "../common/dom.js";
import { FieldLink } from "./field_link.js";
import { differ, findingOn, isOf, withFinding } from "./finding.js";
import { Intro } from "./intro.js";
import { drawPreview } from "./preview.js";

// Times in ms until a verdict is requested, by the reason for the request.
const TYPING_PAUSE = 80; // a letter was typed
const AT_ONCE = 20; // something was chosen or pasted
const TOGETHER = 5; // Gradio has handed the form over, which it may do again
const RETRY = 2000; // the server did not answer
const BEHIND = 100; // Gradio has not yet received what the boxes show
const TIMES_BEHIND = 50; // this many attempts
const TIMES_OLDER = 3; // at most this many repeated requests for a preview of an older form
const SUGGESTED = 8;
const AWAY = "The server does not answer; what you type is kept here and checked when it does.";
const BOX = '[data-testid="textbox"]';
const MODEL = `#field-model-source ${BOX}`;
const SOURCES = `:is(#field-model-source, #field-data-source) ${BOX}`;

const draw = {
    header: (place, value) => drawText(place, "machine", value),
    about: (place, value) => drawText(place, "about", value),
    why_not: (place, value) => drawText(place, "why_not", value),
    queued: (place, value) => drawText(place, "queued", value),
    preview: takePreview,
};
const places = {}; // by name, as received from Gradio
let hasRuns = null; // not known yet

export function mountTrain(place) {
    places[place.name] = place;
    if (place.name === "verdict") {
        mountVerdict(place);
        return;
    }
    if (place.name === "intro") {
        place.shown = new Intro(place.element, place.props.value);
        if (hasRuns !== null) place.shown.tellRuns(hasRuns);
        return;
    }
    const show = () => draw[place.name]?.(place, place.props.value ?? {});
    place.watch("value", show);
    show();
}

function drawText({ element }, name, value) {
    field(element, name).textContent = value[name] ?? "";
}

function takePreview(place, preview) {
    drawPreview(place, preview);
    if (preview.pending) return;
    place.read = preview;
    places.intro?.shown.read(preview);
    const { verdict } = places;
    if (!verdict?.said) return;
    // Otherwise nothing changes, and what Start has answered stays.
    if (differ(verdict.finding, findingOn(verdict.form, preview))) judge(verdict);
    // Answers may arrive out of order, so the preview may be of an earlier form. A box in use
    // requests a new preview when it loses the focus.
    place.older = isOf(verdict.form, preview) ? 0 : (place.older ?? 0) + 1;
    const isTyped = document.activeElement?.matches(`.rs-train ${BOX}`);
    if (place.older && place.older <= TIMES_OLDER && !isTyped) place.trigger("submit");
}

// Is called when the tab is shown, and when its form was filled. Once both have happened, the first
// preview of the data is requested.
// `again`: another tab was shown meanwhile, in which rates may have been measured.
export function trainShown(again = false) {
    const { verdict, preview } = places;
    if (again && verdict?.form) verdict.ask(AT_ONCE);
    if (!verdict?.form || !preview || verdict.wasLookedAt || !isShown(verdict.element)) return;
    verdict.wasLookedAt = true;
    preview.trigger("submit");
}

// Is called with whether there is any run, as far as the server knows.
export function runsFound(isAny) {
    hasRuns = isAny;
    places.intro?.shown.tellRuns(hasRuns);
}

// Is called with whether the server answers. Text typed during an outage is checked, and thereby
// stored, as soon as the server answers again.
export function serverAnswers(isAnswering) {
    const { verdict, why_not } = places;
    document.getElementById("preset")?.toggleAttribute("inert", !isAnswering);
    if (isAnswering) verdict?.ask(AT_ONCE);
    else if (verdict && why_not) {
        verdict.props.value = { ...verdict.props.value, can_start: false, can_queue: false };
        draw.why_not(why_not, { why_not: AWAY });
    }
}

// ---------------------------------------------------------------- what is typed

function mountVerdict(place) {
    place.models = place.props.value.models;
    place.parts = new Map();
    place.link = new FieldLink(place.element.querySelector('[data-part="to-field"]'));
    askAfterPauses(place);
    listenToBoxes(place);
    new Suggestions(place);
    takeForms(place);
}

// Gives the place two functions that request a verdict after a pause; a later call restarts the
// pause.
function askAfterPauses(place) {
    let pause;
    const edited = new Set();
    // Makes Gradio pass on the form.
    place.ask = (wait) => {
        clearTimeout(pause);
        pause = setTimeout(() => {
            edited.clear();
            place.trigger("input");
        }, wait);
    };
    // Requests a verdict with the text in a box, which is known here well before Gradio has
    // received it and passed on the form.
    place.askFor = (box, wait) => {
        if (!place.form) {
            place.ask(wait);
            return;
        }
        edited.add(box);
        clearTimeout(pause);
        pause = setTimeout(() => {
            const typed = [...edited].map((each) => [settingOf(each), each.value]);
            edited.clear();
            const shown = { ...place.form.shown, ...Object.fromEntries(typed) };
            check(place, { ...place.form, shown });
        }, wait);
    };
}

function listenToBoxes(place) {
    document.addEventListener("input", ({ target, inputType }) => {
        // Gradio itself handles checkboxes and lists.
        if (!target.matches(`.rs-train ${BOX}`)) return;
        // The hub is not queried for each beginning of a name: unbundled sources are checked when
        // the box loses the focus or Enter is pressed.
        if (target.matches(SOURCES) && !isKnown(place, target)) return;
        const isTyped = /^(insertText|delete)/.test(inputType);
        place.askFor(target, isTyped ? TYPING_PAUSE : AT_ONCE);
    });
    const leave = ({ target }) => {
        if (!target.matches(SOURCES)) return;
        if (place.form?.shown[settingOf(target)] !== target.value) place.ask(AT_ONCE);
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
        push: (form) => {
            clearTimeout(soon);
            soon = setTimeout(() => check(place, form), TOGETHER);
        },
    };
    for (const form of given) window.ramstreamForms.push(form);
}

// The dotted name of the setting that a box shows.
const settingOf = (box) =>
    box.closest('[id^="field-"]')?.id.slice("field-".length).replaceAll("-", ".");

async function check(place, form) {
    // Only the newest request counts: the one before is aborted, and its answer is not drawn.
    place.asking?.abort();
    place.asking = new AbortController();
    const { signal } = place.asking;
    place.form = form;
    // A page without any input has nothing to store: what was typed in another page is newer.
    place.opened ??= JSON.stringify(form);
    if (JSON.stringify(form) !== place.opened) place.typed = true;
    trainShown();
    // On a busy machine, Gradio takes a while to receive what was typed, or to show new values.
    place.behind = isBehind(form.shown) ? (place.behind ?? 0) + 1 : 0;
    if (place.behind && place.behind <= TIMES_BEHIND) place.ask(BEHIND);
    let verdict;
    try {
        const keep = Boolean(place.typed);
        verdict = await send("/api/check", { ...form, keep }, signal);
    } catch (error) {
        if (error.unreachable && !signal.aborted) place.ask(RETRY);
        verdict = { ...UNCHECKED, reasons: [error.message], why_not: error.message };
    }
    if (signal.aborted) return;
    place.said = verdict;
    judge(place);
}

// Shows the server's verdict together with what the preview found about the data.
function judge(place) {
    place.finding = findingOn(place.form, places.preview?.read);
    const verdict = withFinding(place.said, place.finding);
    drawVerdict(place, verdict);
    offer(place, verdict);
    places.intro?.shown.judged(verdict, place.form);
}

// Shows what can be started. Start and the remedies are Gradio's, and follow these values; Start
// itself may have said earlier why it failed.
function offer(place, { can_start, can_queue, remedies, why_not }) {
    place.props.value = { can_start, can_queue, remedies };
    places.why_not.props.value = { why_not };
    draw.why_not(places.why_not, { why_not });
    // A message about a place in the queue is no longer true.
    if (!can_queue && places.queued) draw.queued(places.queued, {});
}

// Whether a box shows a value that differs from the form's. Boxes of a hidden tab do not count:
// they are not redrawn, and nobody types into them.
function isBehind(shown) {
    return [...document.querySelectorAll(`.rs-train ${BOX}`)].some((box) => {
        const name = settingOf(box);
        return isShown(box) && name in shown && (shown[name] ?? "") !== box.value;
    });
}

// Whether the box for the model holds the name of a bundled one.
function isKnown({ models }, box) {
    const typed = box.value.trim().toLowerCase();
    return box.matches(MODEL) && models.some(([id]) => id.toLowerCase() === typed);
}

// A list below the model's box: the bundled models that contain all typed words, in any order.
class Suggestions {
    constructor(place) {
        this.place = place;
        this.chosen = -1;
        this.list = el("ul", {
            class: "rs-suggestions",
            id: "rs-models",
            role: "listbox",
            "aria-label": "Known models",
        });
        this.list.hidden = true;
        // The document listens, since Gradio may create the box later, or replace it.
        const onBox = (name, act, options) => {
            const listener = (event) => {
                if (event.target.matches?.(MODEL)) act(event);
            };
            document.addEventListener(name, listener, options);
        };
        onBox("input", ({ target, isTrusted }) => {
            if (isTrusted) this.open(target);
        });
        onBox("focusout", () => this.close());
        onBox("keydown", (event) => this.key(event), { capture: true });
        // The box must keep the focus: when it loses it, its unfinished text is checked.
        this.list.addEventListener("mousedown", (event) => event.preventDefault());
        this.list.addEventListener("click", ({ target }) =>
            this.take(target.closest('[role="option"]')?.dataset.model),
        );
    }

    open(box) {
        const found = this.found(box.value);
        if (!found.length || isKnown(this.place, box)) {
            this.close();
            return;
        }
        this.box = box;
        this.list.replaceChildren(...found.slice(0, SUGGESTED).map(suggestion));
        if (!this.list.isConnected) box.closest("#field-model-source").append(this.list);
        const combobox = {
            role: "combobox",
            autocomplete: "off",
            "aria-autocomplete": "list",
            "aria-controls": this.list.id,
            "aria-expanded": "true",
        };
        for (const [name, value] of Object.entries(combobox)) box.setAttribute(name, value);
        this.list.hidden = false;
        this.choose(-1);
    }

    found(typed) {
        const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
        if (!words.length) return [];
        return this.place.models.filter(([id, title]) => {
            const text = `${id} ${title}`.toLowerCase();
            return words.every((word) => text.includes(word));
        });
    }

    close() {
        this.list.hidden = true;
        this.box?.setAttribute("aria-expanded", "false");
        this.box?.removeAttribute("aria-activedescendant");
    }

    choose(index) {
        this.chosen = index;
        const nodes = [...this.list.children];
        for (const [place, each] of nodes.entries())
            each.setAttribute("aria-selected", String(place === index));
        const node = nodes[index];
        if (node) this.box.setAttribute("aria-activedescendant", node.id);
        else this.box.removeAttribute("aria-activedescendant");
        node?.scrollIntoView({ block: "nearest" });
    }

    key(event) {
        if (this.list.hidden) return;
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (step) this.choose(this.next(step));
        else if (event.key === "Enter" && this.chosen >= 0)
            this.take(this.list.children[this.chosen].dataset.model);
        else if (event.key === "Escape") this.close();
        else return;
        event.preventDefault();
        event.stopPropagation();
    }

    // The next or the previous suggestion; the list wraps around.
    next(step) {
        const count = this.list.children.length;
        if (this.chosen < 0 && step < 0) return count - 1;
        return (this.chosen + step + count) % count;
    }

    take(model) {
        if (!model) return;
        this.close();
        this.box.value = model;
        this.box.dispatchEvent(
            new InputEvent("input", { bubbles: true, inputType: "insertReplacementText" }),
        );
    }
}

function suggestion([id, title], index) {
    const attributes = { role: "option", id: `rs-model-${index}`, "data-model": id };
    return el("li", attributes, el("b", {}, title), el("span", {}, id));
}

// ---------------------------------------------------------------- the verdict

const UNCHECKED = {
    tone: "bad",
    headline: "This cannot be checked now.",
    size: "",
    help: "",
    bars: [],
    time: [],
    remedies: [],
    field: null,
    can_start: false,
    can_queue: false,
};

function drawVerdict(place, verdict) {
    const { element } = place;
    element.querySelector(".rs-verdict").dataset.tone = verdict.tone;
    for (const name of ["headline", "size", "help"])
        field(element, name).textContent = verdict[name];
    field(element, "reasons").replaceChildren(
        ...verdict.reasons.map((reason) => el("li", {}, reason)),
    );
    drawParts(place, verdict.bars);
    field(element, "time").replaceChildren(...verdict.time.map(timeRow));
    for (const node of document.querySelectorAll(".rs-wrong")) node.classList.remove("rs-wrong");
    if (verdict.field) document.getElementById(verdict.field)?.classList.add("rs-wrong");
    place.link.show(verdict.field);
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

// Host memory, GPU memory or disk: a bar, and below it the items in words.
class FitPart {
    constructor({ name, label }) {
        this.text = el("span");
        const plot = el("div", { class: "rs-fit-bar", role: "img", "data-fit": name });
        this.bar = new SmallFigure(plot);
        this.rows = el("tbody");
        this.note = el("p", { class: "rs-hint" });
        this.root = el(
            "details",
            { class: "rs-fit" },
            el("summary", {}, el("span", {}, label), this.text, plot),
            this.note,
            el("table", {}, this.rows),
        );
    }

    show(bar) {
        this.bar.show(bar.figure, bar.said);
        this.root.dataset.tone = bar.tone;
        this.text.textContent = bar.text;
        this.note.textContent = bar.note;
        this.rows.replaceChildren(...bar.items.map(itemRow));
    }
}

function itemRow({ name, text, note, colour }) {
    const key = el("i");
    key.style.background = colour;
    const small = note ? el("small", {}, note) : null;
    return el("tr", {}, el("th", { scope: "row" }, key, name, small), el("td", {}, text));
}
