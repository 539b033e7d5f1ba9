// The line over a run, which stays in view, with the links to the run's views; and the progress in
// the page's title and icon.

import { addressOf, followLinks, markCurrent } from "../../shared/address.js";
import { el, field, send, setText } from "../../shared/dom.js";
import { Menu } from "../../shared/menu.js";
import { RenameDialog } from "../../shared/rename.js";
import { draftOf } from "../run/head.js";
import { Deletion } from "../runs/deletion.js";

const COUNTERPARTS = { pause: "resume", resume: "pause", change: "more" };
const MENUS = {
    stop: ["stop", "discard"],
    more: ["save", "change", "rename", "draft", "train-on", "delete"],
};
const LABELS = {
    save: "Save now",
    change: "Edit…",
    rename: "Rename…",
    draft: "Duplicate",
    "train-on": "Continue training from here",
    delete: "Delete…",
    stop: "Stop and save",
    discard: "Stop and discard",
};
const BESIDE = 60; // px of the views before the current one that are shown
const FURTHER = 0.7; // of their width, by which a press moves the views
const SHOWN = 8000; // ms for which a refusal, or a report after an outage, is shown

// ---------------------------------------------------------------- title and icon

const TONES = {
    busy: "#3b7de0",
    good: "#2f9e6e",
    warn: "#d19a1f",
    bad: "#d64550",
    calm: "#8a93a3",
};

// The page's title shows the run's progress, and its icon is a ring that fills.
export function showProgress(bar) {
    document.title = bar.title;
    const share = bar.tone === "good" ? 1 : bar.progress;
    const length = 2 * Math.PI * 12;
    const ring =
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">' +
        '<g fill="none" stroke-width="7">' +
        '<circle cx="16" cy="16" r="12" stroke="#8a93a3" stroke-opacity=".35"/>' +
        `<circle cx="16" cy="16" r="12" ` +
        `stroke="${TONES[bar.tone]}" stroke-dasharray="${(share * length).toFixed(1)} 99" ` +
        `transform="rotate(-90 16 16)"/></g></svg>`;
    const address = `data:image/svg+xml,${encodeURIComponent(ring)}`;
    let icon = document.querySelector('link[rel~="icon"]');
    if (!icon) {
        icon = el("link", { rel: "icon" });
        document.head.append(icon);
    }
    if (icon.href !== address) icon.href = address;
}

// ---------------------------------------------------------------- the bar

export class RunBar {
    // wake(): reads the run again at once.
    // go(place): shows another place.
    // open(): shows the active run here.
    // opened(run): is called when Start has answered with its run.
    // stay(): keeps the run that is shown.
    // attend(): lets a person type a message.
    // renamed(): the run has another name.
    // deleted(run): the run is gone.
    constructor(
        { element, props, trigger, watch },
        { wake, go, open, opened, stay, attend, renamed, deleted },
    ) {
        this.wake = wake;
        this.stay = stay;
        this.root = element.querySelector(".rs-bar");
        this.trigger = trigger;
        this.dialog = element.querySelector('[data-part="discard"]');
        const change = element.querySelector('[data-part="change"]');
        this.change = new ChangeDialog(change, async (values) => {
            await this.post("change", values);
            this.notify("The new values take effect at the next step.");
            wake();
        });
        this.rename = new RenameDialog(this.root, renamed);
        this.deletion = new Deletion(this.root, (ids) => ids.forEach(deleted));
        this.run = null;
        this.shownUntil = 0;
        this.actions = element.querySelector(".rs-actions");
        this.buttons = [...this.actions.querySelectorAll("button")];
        this.resume = this.buttons.find((button) => nameOf(button) === "resume");
        this.menu = new Menu(this.root);
        for (const button of this.buttons)
            button.addEventListener("click", () => {
                if (button.dataset.menu) this.openMenu(button);
                else this.press(button.dataset.command);
            });
        this.dialog.addEventListener("close", () => {
            if (this.dialog.returnValue === "discard") this.command("discard");
        });
        this.name = field(element, "name");
        this.views = [...element.querySelectorAll("a[data-view]")];
        followLinks(this.root, "a[data-view]", ({ dataset }, { detail }) => {
            go({ view: dataset.view });
            // By keyboard the focus stays on the link, and on a phone no keyboard opens.
            const hasMouse = detail > 0 && matchMedia("(pointer: fine)").matches;
            if (dataset.view === "chat" && hasMouse) attend();
        });
        followLinks(this.root, 'a[data-field="name"]', () => {
            if (this.run) go({ page: "run", run: this.run, view: "overview" });
        });
        this.nav = element.querySelector(".rs-views");
        this.nav.querySelector('[data-part="more-views"]').addEventListener("click", () => {
            this.nav.scrollBy({ left: FURTHER * this.nav.clientWidth, behavior: "smooth" });
        });
        this.nav.addEventListener("scroll", () => this.showCut(), { passive: true });
        new ResizeObserver(() => this.measure()).observe(this.root);
        this.other = field(element, "other");
        this.other.querySelector("button").addEventListener("click", open);
        watch("value", () => {
            if (props.value?.open) opened(props.value.open);
        });
    }

    // place: what the page shows.
    mark(place) {
        for (const link of this.views) {
            link.href = addressOf({ ...place, page: "run", view: link.dataset.view });
        }
        markCurrent(this.views, ({ dataset }) => dataset.view === place.view);
        // Elsewhere the bar shows no views, and to ask for their width costs a layout.
        if (place.page !== "run") return;
        this.reveal();
    }

    // The link of the view that is shown is in view, with a part of those beside it.
    reveal() {
        const current = this.views.find((link) => link.hasAttribute("aria-current"));
        if (!current || this.nav.scrollWidth <= this.nav.clientWidth) return;
        this.nav.scrollLeft = current.offsetLeft - this.nav.offsetLeft - BESIDE;
    }

    // On a phone, what stands above the state scrolls away.
    measure() {
        const top = (node) => node.getBoundingClientRect().top;
        const row = [field(this.root, "word"), this.actions].filter((node) => node.offsetHeight);
        const above = Math.min(...row.map(top)) - top(this.root);
        const place = this.root.closest("#rs-run_bar");
        place.style.setProperty("--rs-scrolls", `${Math.floor(above)}px`);
        // What else stays in view stands below the bar.
        const height = this.root.offsetHeight && place.offsetHeight;
        document.documentElement.style.setProperty("--rs-bar-height", `${height}px`);
        const width = this.nav.clientWidth;
        if (width !== this.width) this.reveal();
        this.width = width;
        this.showCut();
    }

    // Shows whether there are views beyond the right edge.
    showCut() {
        const { scrollLeft, clientWidth, scrollWidth } = this.nav;
        this.nav.classList.toggle("rs-cut", scrollLeft + clientWidth < scrollWidth - 1);
    }

    // other: the name of another run that is active, or an empty text.
    show(bar, other) {
        this.run = bar.run_id;
        this.shown = bar;
        this.root.dataset.tone = bar.tone;
        // Other pages show only a run that is under way.
        this.root.classList.toggle("rs-going", bar.tone === "busy" || bar.state === "paused");
        this.root.classList.toggle("rs-none", !bar.run_id);
        this.root.classList.toggle("rs-timed", bar.left !== "–");
        this.root.classList.toggle("rs-asked", Boolean(bar.pending));
        const place = { page: "run", view: "overview", run: bar.run_id, step: null };
        this.name.href = addressOf(place);
        for (const name of ["name", "step", "left"]) setText(field(this.root, name), bar[name]);
        setText(field(this.root, "word"), bar.outcome ?? bar.word);
        // The page of the run says more; elsewhere, a run that waits says what for.
        setText(field(this.root, "sentence"), bar.pending || bar.waits ? bar.sentence : "");
        this.showBadges(bar.badges ?? []);
        setText(
            field(this.root, "about"),
            [bar.note, ...(bar.remarks ?? [])].filter(Boolean).join(" · "),
        );
        const progress = this.root.querySelector(".rs-progress");
        const percent = Math.round(100 * bar.progress);
        progress.setAttribute("aria-valuenow", percent);
        progress.firstElementChild.style.width = `${100 * bar.progress}%`;
        for (const button of this.buttons) button.disabled = false;
        this.resume.textContent = bar.begins_anew ? "Start again" : "Resume";
        this.showActions(bar);
        this.announce(bar);
        if (this.dialog.open && !bar.actions.includes("discard")) this.dialog.close("keep");
        this.other.hidden = !other;
        if (other) this.other.firstElementChild.textContent = `${other} is training.`;
    }

    // Shows the buttons of what can be done. If a button with the focus disappears, the focus moves
    // to its counterpart, or to the group until the counterpart appears.
    showActions({ state, ...bar }) {
        const actions = possible(bar);
        const text = JSON.stringify(actions);
        if (text !== this.possible) this.menu.close();
        this.possible = text;
        const names = this.buttons.map(nameOf).filter((name) => isOffered(name, actions, state));
        const focused = this.buttons.find((button) => button === document.activeElement);
        if (focused && !names.includes(nameOf(focused))) this.hold(focused);
        for (const button of this.buttons) button.hidden = !names.includes(nameOf(button));
        if (document.activeElement !== this.actions) return;
        const next = [this.held, COUNTERPARTS[this.held]].find((name) => names.includes(name));
        this.buttons.find((button) => nameOf(button) === next)?.focus();
    }

    openMenu(button) {
        const { stop_saves: saves } = this.shown;
        const actions = possible(this.shown);
        const labels = saves ? LABELS : { ...LABELS, stop: "Stop without saving" };
        const items = MENUS[button.dataset.menu]
            .filter((act) => actions.includes(act))
            .map((act) => ({
                act,
                label: labels[act],
                isDangerous: act === "discard" || act === "delete",
                work: (opener) => this.press(act, opener),
            }));
        this.menu.open(button, button.title || button.textContent, items);
    }

    // What is special about this run, in a word each.
    showBadges(badges) {
        const text = JSON.stringify(badges);
        if (text === this.badges) return;
        this.badges = text;
        const list = this.root.querySelector('[data-part="badges"]');
        list.replaceChildren(
            ...badges.map(({ label, title }) => el("span", { class: "rs-badge", title }, label)),
        );
    }

    hold(button) {
        this.held = nameOf(button);
        this.actions.focus({ preventScroll: true });
    }

    // Nothing can be requested of the run until the next `show`.
    disable() {
        const focused = this.buttons.find((button) => button === document.activeElement);
        if (focused) this.hold(focused);
        this.menu.close();
        for (const button of this.buttons) button.disabled = true;
    }

    // A new state of the run is read aloud, but not each step and each percentage.
    announce({ run_id, state, name, word, tone, sentence }) {
        const now = `${run_id} ${state}`;
        const isFirst = this.announced === undefined;
        if (now === this.announced) return;
        this.announced = now;
        if (isFirst || !run_id) return;
        const more = tone === "busy" ? "" : ` ${sentence}`;
        field(this.root, "announced").textContent = `${name}: ${word}.${more}`;
    }

    clear() {
        this.show(
            {
                run_id: null,
                tone: "calm",
                word: "No run",
                name: "Nothing is running",
                progress: 0,
                actions: [],
                sentence: "Choose a preset in New and press Start.",
                step: "–",
                left: "–",
            },
            null,
        );
        document.title = "Ramstream";
    }

    // The run of the address cannot be shown; its page says why.
    miss(run) {
        this.clear();
        setText(field(this.root, "word"), "Not shown");
        setText(this.name, run);
        this.note("");
    }

    // Shows a note below the bar; "" removes it. `aside` changes constantly and is not read
    // aloud. A note that `passes` by itself lies over the page, so that nothing moves when it goes.
    note(text, { loggedOut = false, aside = "", tone = "warn", passes = false } = {}) {
        const node = field(this.root, "note");
        if (!text && performance.now() < this.shownUntil) return;
        node.hidden = !text;
        node.dataset.tone = tone;
        node.toggleAttribute("data-passes", passes);
        if (node.firstChild?.textContent !== text)
            node.replaceChildren(text, el("span", { "aria-hidden": "true" }));
        const beside = node.querySelector("span");
        if (beside) beside.textContent = aside && ` ${aside}`;
        if (loggedOut && !node.querySelector("a"))
            node.append(" ", el("a", { href: "/login" }, "Log in again"));
    }

    // Shows what happened, for long enough to read it.
    notify(text, tone = "good") {
        this.shownUntil = performance.now() + SHOWN;
        this.note(text, { tone, passes: true });
    }

    // Opens the form with what can be changed of the run.
    edit() {
        this.change.open(this.shown);
    }

    press(command, button) {
        if (command === "change") this.edit();
        else if (command === "draft" || command === "train-on") this.draft(command, button);
        else if (command === "delete") this.delete();
        else if (command === "rename") this.rename.open({ id: this.run, name: this.shown.name });
        else if (command === "discard") {
            this.dialog.returnValue = "keep";
            this.dialog.showModal();
        } else this.command(command);
    }

    // Opens the form with the settings of the run, and its weights to train on from.
    async draft(command, button) {
        const problem = el("span");
        await draftOf(this.run, { trainsOn: command === "train-on" }, button, problem);
        if (problem.textContent) this.notify(problem.textContent, "warn");
    }

    async delete() {
        const { run } = this;
        try {
            const { runs } = await send(`/api/runs?search=${encodeURIComponent(run)}`);
            const found = runs.filter(({ id }) => id === run);
            if (found.length && (await this.deletion.ask(found))) await this.deletion.delete(found);
        } catch (error) {
            this.notify(error.message, "warn");
        }
    }

    post(what, body) {
        return send(`/api/runs/${encodeURIComponent(this.run)}/${what}`, body);
    }

    async command(command) {
        this.disable();
        this.stay(); // the next run of the queue does not come under the pointer
        try {
            await this.post("control", { command, seen: this.shown.state ?? "" });
            this.wake();
        } catch (error) {
            this.notify(error.message, "warn");
            for (const button of this.buttons) button.disabled = false;
        }
    }

    activeChanged() {
        this.trigger("change"); // whether Start is enabled depends on it
    }
}

const nameOf = ({ dataset }) => dataset.command ?? dataset.menu;

// What can be done with the run: what can be asked of it, and what the list of runs offers, too.
const possible = ({ actions, offers = [] }) => [...actions, ...offers];

// Whether the button of this name is shown. A paused run is likely to be edited, so it has a button
// for that; the menu has it always.
function isOffered(name, actions, state) {
    if (name === "change") return state === "paused" && actions.includes(name);
    return (MENUS[name] ?? [name]).some((act) => actions.includes(act));
}

// ---------------------------------------------------------------- changing what is shown

// Requests a new learning rate or number of steps; the run applies them before its next step.
class ChangeDialog {
    constructor(dialog, post) {
        this.dialog = dialog;
        this.post = post;
        this.rate = dialog.querySelector("[name=rate]");
        this.steps = dialog.querySelector("[name=steps]");
        this.falls = field(dialog, "falls");
        this.steps.addEventListener("input", () => this.showFall());
        this.problem = field(dialog, "problem");
        dialog.querySelector("form").addEventListener("submit", (event) => {
            event.preventDefault();
            this.send();
        });
        dialog.querySelector('[data-part="leave"]').addEventListener("click", () => dialog.close());
    }

    open({ settings }) {
        this.before = settings;
        this.rate.value = settings.learning_rate;
        this.steps.value = settings.steps;
        this.steps.min = Math.max(1, settings.done);
        this.problem.textContent = "";
        this.showFall();
        this.dialog.showModal();
        this.steps.select();
    }

    // The length of the run is also that of the schedule of the learning rate.
    showFall() {
        const { falls, steps } = this.before;
        const asked = Number(this.steps.value);
        const isMoved = falls && asked > 0 && asked !== steps;
        const [until, before] = [asked, steps].map((step) => step.toLocaleString("en"));
        setText(
            this.falls,
            isMoved ? `The learning rate then falls until step ${until} instead of ${before}.` : "",
        );
    }

    async send() {
        const values = {};
        if (Number(this.rate.value) !== this.before.learning_rate)
            values["train.learning_rate"] = Number(this.rate.value);
        if (Number(this.steps.value) !== this.before.steps)
            values["train.steps"] = Number(this.steps.value);
        if (!Object.keys(values).length) {
            this.dialog.close();
            return;
        }
        try {
            await this.post({ values });
            this.dialog.close();
        } catch (error) {
            this.problem.textContent = error.message;
        }
    }
}
