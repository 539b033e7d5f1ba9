// The Train tab's places: the machine, the verdict beside Start, and the preview of the data.

import { SmallFigure } from "../charts/small_figure.js";
import { el, field, isShown, send } from "../common/dom.js";
import { Intro } from "./intro.js";
import { drawPreview } from "./preview.js";

const TYPING_PAUSE = 80;
const AT_ONCE = 20;
const TOGETHER = 5;
const RETRY = 2000;
const BEHIND = 100;
const TIMES_BEHIND = 50;
const TIMES_OLDER = 3;
const UNREAD =
    "A run would refuse the names of these columns: say which one is what, in the preview of the data.";
const SUGGESTED = 8;
const BOX = '[data-testid="textbox"]';
const MODEL = `#field-model-source ${BOX}`;
const SOURCES = `:is(#field-model-source, #field-data-source) ${BOX}`;

const text =
    (name) =>
    ({ element }, value) => {
        field(element, name).textContent = value[name] ?? "";
    };
const draw = {
    header: text("machine"),
    about: text("about"),
    why_not: text("why_not"),
    queued: text("queued"),
    preview: (place, preview) => {
        drawPreview(place, preview);
        if (preview.pending) return;
        place.read = preview;
        places.intro?.shown.read(preview);
        const { verdict } = places;
        if (!verdict?.said) return;
        if (verdict.unread !== areColumnsUnread(verdict.form)) offer(verdict);
        // Answers overtake one another. A box that is being typed into asks when it is left.
        place.older = isOf(verdict.form, preview) ? 0 : (place.older ?? 0) + 1;
        const isTyped = document.activeElement?.matches(`.rs-train ${BOX}`);
        if (place.older && place.older <= TIMES_OLDER && !isTyped) place.trigger("submit");
    },
};
const places = {};
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

// The tab is looked at, and its form was filled. The first time, the preview of its data is asked
// for.
export function trainShown() {
    const { verdict, preview } = places;
    if (!verdict?.form || !preview || verdict.wasLookedAt || !isShown(verdict.element)) return;
    verdict.wasLookedAt = true;
    preview.trigger("submit");
}

// Whether there is any run, as far as the server has looked.
export function runsFound(does) {
    hasRuns = does;
    places.intro?.shown.tellRuns(hasRuns);
}

// Whether the server answers. What was typed while it did not is checked, and so kept, as soon as
// it does.
export function serverAnswers(does) {
    const { verdict, why_not } = places;
    document.getElementById("preset")?.toggleAttribute("inert", !does);
    if (does) verdict?.ask(AT_ONCE);
    else if (verdict && why_not) {
        verdict.props.value = { ...verdict.props.value, can_start: false, can_queue: false };
        draw.why_not(why_not, {
            why_not:
                "The server does not answer; what you type is kept here and checked when it does.",
        });
    }
}

// ---------------------------------------------------------------- what is typed

function mountVerdict(place) {
    Object.assign(place, { models: place.props.value.models, parts: new Map() });
    let pause;
    const edited = new Set();
    place.ask = (wait) => {
        clearTimeout(pause);
        pause = setTimeout(() => {
            edited.clear();
            place.trigger("input");
        }, wait);
    };
    // What is typed into a box is known here well before Gradio has taken it over and handed the
    // form out.
    place.askFor = (box, wait) => {
        if (!place.form) {
            place.ask(wait);
            return;
        }
        edited.add(box);
        clearTimeout(pause);
        pause = setTimeout(() => {
            const typed = Object.fromEntries(
                [...edited].map((each) => [settingOf(each), each.value]),
            );
            edited.clear();
            check(place, { ...place.form, shown: { ...place.form.shown, ...typed } });
        }, wait);
    };
    document.addEventListener("input", ({ target, inputType }) => {
        if (!target.matches(`.rs-train ${BOX}`)) return; // Gradio asks for boxes to tick and lists itself
        // A hub is not asked for every beginning of a name: other sources are checked when they are
        // left or Enter is pressed.
        if (target.matches(SOURCES) && !isKnown(place, target)) return;
        place.askFor(target, /^(insertText|delete)/.test(inputType) ? TYPING_PAUSE : AT_ONCE);
    });
    for (const name of ["focusout", "keydown"]) {
        document.addEventListener(name, ({ target, key = "Enter" }) => {
            if (key !== "Enter" || !target.matches(SOURCES)) return;
            if (place.form?.shown[settingOf(target)] !== target.value) place.ask(AT_ONCE);
        });
    }
    new Suggestions(place);
    // Gradio hands the form over here. It does so twice in a millisecond when something is chosen
    // from a list.
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

const settingOf = (box) =>
    box.closest('[id^="field-"]')?.id.slice("field-".length).replaceAll("-", ".");

async function check(place, form) {
    // The newest request counts: the one before is given up, and its answer is not drawn.
    place.asking?.abort();
    const { signal } = (place.asking = new AbortController());
    place.form = form;
    // A page in which nothing was typed has nothing to keep: what another page has typed meanwhile
    // is newer.
    place.opened ??= JSON.stringify(form);
    place.typed ||= JSON.stringify(form) !== place.opened;
    trainShown();
    // On a busy machine Gradio takes a while to take over what was typed, or to show what it was
    // given.
    place.behind = isBehind(form.shown) ? (place.behind ?? 0) + 1 : 0;
    if (place.behind && place.behind <= TIMES_BEHIND) place.ask(BEHIND);
    let verdict;
    try {
        verdict = await send("/api/check", { ...form, keep: place.typed }, signal);
    } catch (error) {
        if (error.unreachable && !signal.aborted) place.ask(RETRY);
        verdict = { ...UNCHECKED, reasons: [error.message], why_not: error.message };
    }
    if (signal.aborted) return;
    place.said = verdict;
    drawVerdict(place, verdict);
    offer(place);
    places.intro?.shown.judged(verdict, form);
}

// Start and the remedies are Gradio's, which follows these values; Start may have answered why not
// itself before.
function offer(place) {
    const { can_start, can_queue, remedies, why_not } = place.said;
    const unread = areColumnsUnread(place.form);
    place.unread = unread;
    place.props.value = {
        can_start: can_start && !unread,
        can_queue: can_queue && !unread,
        remedies,
    };
    const why = unread && (can_start || can_queue) ? UNREAD : why_not;
    places.why_not.props.value = { why_not: why };
    draw.why_not(places.why_not, { why_not: why });
    if (!can_queue && places.queued) draw.queued(places.queued, {}); // of a place in the queue that is no longer true
}

// Whether the preview that is shown, if it is of these data, waits for a person to choose columns.
function areColumnsUnread(form) {
    const preview = places.preview?.read;
    return Boolean(preview?.mapping?.refused) && isOf(form, preview);
}

// Whether a preview goes by what the form shows.
function isOf({ shown }, { given = {} }) {
    return Object.entries(given).every(
        ([name, value]) => String(shown[name] ?? "") === String(value ?? ""),
    );
}

// Boxes of a tab that is not looked at are not drawn anew, and nobody types into them.
function isBehind(shown) {
    return [...document.querySelectorAll(`.rs-train ${BOX}`)].some((box) => {
        const name = settingOf(box);
        return isShown(box) && name in shown && (shown[name] ?? "") !== box.value;
    });
}

function isKnown({ models }, box) {
    const typed = box.value.trim().toLowerCase();
    return box.matches(MODEL) && models.some(([id]) => id.toLowerCase() === typed);
}

class Suggestions {
    // A list under the model's box: the bundled models that have every word that was typed, in
    // whatever order.
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
        const own = (act) => (event) => {
            if (event.target.matches?.(MODEL)) act(event);
        };
        document.addEventListener(
            "input",
            own(({ target, isTrusted }) => {
                if (isTrusted) this.open(target);
            }),
        );
        document.addEventListener(
            "focusout",
            own(() => this.close()),
        );
        document.addEventListener(
            "keydown",
            own((event) => this.key(event)),
            { capture: true },
        );
        // The box keeps the focus: it would be checked as it stands if it were left.
        this.list.addEventListener("mousedown", (event) => event.preventDefault());
        this.list.addEventListener("click", ({ target }) =>
            this.take(target.closest('[role="option"]')?.dataset.model),
        );
    }

    open(box) {
        const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
        const found = words.length
            ? this.place.models.filter(([id, title]) => {
                  const all = `${id} ${title}`.toLowerCase();
                  return words.every((word) => all.includes(word));
              })
            : [];
        if (!found.length || isKnown(this.place, box)) {
            this.close();
            return;
        }
        this.box = box;
        this.list.replaceChildren(
            ...found
                .slice(0, SUGGESTED)
                .map(([id, title], index) =>
                    el(
                        "li",
                        { role: "option", id: `rs-model-${index}`, "data-model": id },
                        el("b", {}, title),
                        el("span", {}, id),
                    ),
                ),
        );
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

    close() {
        this.list.hidden = true;
        this.box?.setAttribute("aria-expanded", "false");
        this.box?.removeAttribute("aria-activedescendant");
    }

    choose(index) {
        this.chosen = index;
        [...this.list.children].forEach((node, place) =>
            node.setAttribute("aria-selected", String(place === index)),
        );
        const node = this.list.children[index];
        if (node) this.box.setAttribute("aria-activedescendant", node.id);
        else this.box.removeAttribute("aria-activedescendant");
        node?.scrollIntoView({ block: "nearest" });
    }

    key(event) {
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        const count = this.list.children.length;
        if (this.list.hidden) return;
        if (step)
            this.choose(
                this.chosen < 0 && step < 0 ? count - 1 : (this.chosen + step + count) % count,
            );
        else if (event.key === "Enter" && this.chosen >= 0)
            this.take(this.list.children[this.chosen].dataset.model);
        else if (event.key === "Escape") this.close();
        else return;
        event.preventDefault();
        event.stopPropagation();
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
    field(element, "time").replaceChildren(
        ...verdict.time.map((row) =>
            el(
                "div",
                {},
                el("dt", {}, row.name),
                el("dd", {}, row.text, row.note ? el("small", {}, row.note) : null),
            ),
        ),
    );
    for (const node of document.querySelectorAll(".rs-wrong")) node.classList.remove("rs-wrong");
    if (verdict.field) document.getElementById(verdict.field)?.classList.add("rs-wrong");
}

function drawParts({ element, parts }, bars) {
    // A part keeps its nodes, so that what was unfolded stays unfolded.
    for (const bar of bars) {
        if (!parts.has(bar.name)) parts.set(bar.name, new FitPart(bar));
        parts.get(bar.name).show(bar);
    }
    const shown = bars.map((bar) => parts.get(bar.name).root);
    const place = field(element, "bars");
    if (
        shown.length !== place.children.length ||
        shown.some((node, index) => node !== place.children[index])
    ) {
        place.replaceChildren(...shown);
    }
}

class FitPart {
    // Host memory, GPU memory or disk: a bar, and under it the items in words.
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
        this.rows.replaceChildren(
            ...bar.items.map((item) => {
                const key = el("i");
                key.style.background = item.colour;
                return el(
                    "tr",
                    {},
                    el(
                        "th",
                        { scope: "row" },
                        key,
                        item.name,
                        item.note ? el("small", {}, item.note) : null,
                    ),
                    el("td", {}, item.text),
                );
            }),
        );
    }
}
