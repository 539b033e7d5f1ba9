// The run bar, and the progress in the page's title and icon.

import { el, field, send, setText } from "./dom.js";

const COUNTERPARTS = { pause: "resume", resume: "pause" };
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
    // open(): shows the active run here.
    // opened(run): is called when Start has answered with its run.
    constructor({ element, props, trigger, watch }, { wake, open, opened }) {
        this.wake = wake;
        this.root = element.querySelector(".rs-bar");
        this.trigger = trigger;
        this.dialog = element.querySelector('[data-part="discard"]');
        const change = element.querySelector('[data-part="change"]');
        this.change = new ChangeDialog(change, (values) => this.post("change", values), wake);
        this.run = null;
        this.toldUntil = 0;
        this.buttons = [...element.querySelectorAll("[data-command]")];
        this.stop = this.buttons.find((button) => button.dataset.command === "stop");
        this.resume = this.buttons.find((button) => button.dataset.command === "resume");
        this.actions = element.querySelector(".rs-actions");
        for (const button of this.buttons)
            button.addEventListener("click", () => this.press(button.dataset.command));
        this.dialog.addEventListener("close", () => {
            if (this.dialog.returnValue === "discard") this.command("discard");
        });
        this.other = field(element, "other");
        this.other.querySelector("button").addEventListener("click", open);
        watch("value", () => {
            if (props.value?.open) opened(props.value.open);
        });
    }

    show(bar, active) {
        this.run = bar.run_id;
        this.shown = bar;
        this.root.dataset.tone = bar.tone;
        for (const name of ["word", "name", "sentence", "step", "left", "rate"])
            setText(field(this.root, name), bar[name]);
        field(this.root, "about").textContent = bar.note ?? "";
        const progress = this.root.querySelector(".rs-progress");
        const percent = Math.round(100 * bar.progress);
        progress.setAttribute("aria-valuenow", percent);
        progress.firstElementChild.style.width = `${100 * bar.progress}%`;
        for (const button of this.buttons) button.disabled = false;
        this.stop.textContent = bar.stop_saves === false ? "Stop without saving" : "Stop and save";
        this.resume.textContent = bar.begins_anew ? "Start again" : "Resume";
        this.showActions(bar.actions);
        this.announce(bar);
        if (this.dialog.open && !bar.actions.includes("discard")) this.dialog.close("keep");
        const elsewhere = Boolean(active) && active !== bar.run_id;
        this.other.hidden = !elsewhere;
        if (elsewhere)
            this.other.firstElementChild.textContent = `Another run is under way here: ${active}.`;
    }

    // Shows the buttons with these names. If a button with the focus disappears, the focus moves to
    // its counterpart, or to the group until the counterpart appears.
    showActions(names) {
        const focused = this.buttons.find((button) => button === document.activeElement);
        if (focused && !names.includes(focused.dataset.command)) this.hold(focused);
        for (const button of this.buttons) button.hidden = !names.includes(button.dataset.command);
        if (document.activeElement !== this.actions) return;
        const next = [this.held, COUNTERPARTS[this.held]].find((name) => names.includes(name));
        this.buttons.find((button) => button.dataset.command === next)?.focus();
    }

    hold(button) {
        this.held = button.dataset.command;
        this.actions.focus({ preventScroll: true });
    }

    // Nothing can be requested of the run until the next `show`.
    disable() {
        const focused = this.buttons.find((button) => button === document.activeElement);
        if (focused) this.hold(focused);
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
                sentence: "Choose a preset in Train and press Start.",
                step: "–",
                left: "–",
                rate: "–",
            },
            null,
        );
        document.title = "Ramstream";
    }

    // Shows a note below the bar; "" removes it. `aside` changes constantly and is not read aloud.
    note(text, { loggedOut = false, aside = "", tone = "warn" } = {}) {
        const node = field(this.root, "note");
        if (!text && performance.now() < this.toldUntil) return;
        node.hidden = !text;
        node.dataset.tone = tone;
        if (node.firstChild?.textContent !== text)
            node.replaceChildren(text, el("span", { "aria-hidden": "true" }));
        const beside = node.querySelector("span");
        if (beside) beside.textContent = aside && ` ${aside}`;
        if (loggedOut && !node.querySelector("a"))
            node.append(" ", el("a", { href: "/login" }, "Log in again"));
    }

    // Shows what happened, for long enough to read it.
    tell(text, tone = "good") {
        this.toldUntil = performance.now() + SHOWN;
        this.note(text, { tone });
    }

    press(command) {
        if (command === "change") this.change.open(this.shown);
        else if (command === "discard") {
            this.dialog.returnValue = "keep";
            this.dialog.showModal();
        } else this.command(command);
    }

    post(what, body) {
        return send(`/api/runs/${encodeURIComponent(this.run)}/${what}`, body);
    }

    async command(command) {
        this.disable();
        try {
            await this.post("control", { command, seen: this.shown.state ?? "" });
            this.wake();
        } catch (error) {
            this.tell(error.message, "warn");
            for (const button of this.buttons) button.disabled = false;
        }
    }

    activeChanged() {
        this.trigger("change"); // whether Start is enabled depends on it
    }
}

// ---------------------------------------------------------------- changing what goes on

// Requests a new learning rate or number of steps; the run applies them before its next step.
class ChangeDialog {
    constructor(dialog, post, wake) {
        this.dialog = dialog;
        this.post = post;
        this.wake = wake;
        this.rate = dialog.querySelector("[name=rate]");
        this.steps = dialog.querySelector("[name=steps]");
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
        this.dialog.showModal();
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
            this.wake();
        } catch (error) {
            this.problem.textContent = error.message;
        }
    }
}
