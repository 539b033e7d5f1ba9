// The Talk tab: the model before training and the tuned one, asked the same. The chat itself is the
// server's.

import { copyText, el, field, send, setText } from "../common/dom.js";
import { JobView } from "../common/jobs.js";

const WRITING_WAIT = 150;
const HIDDEN_WAIT = 5000;
const CHOICES_WAIT = 2000;
const FOLDER = ":folder";
const SIDES = ["base", "tuned"];
const NUMBERS = ["max_new_tokens", "temperature", "top_p", "seed"];

export class Talk {
    constructor(element) {
        this.root = element;
        this.version = 0;
        this.turns = [];
        this.runs = null;
        this.opened = this.choice = null;
        this.minutes = 10;
        this.readAt = 0;
        this.asked = "";
        this.working = false;
        this.who = this.part("who").elements;
        this.how = this.part("how").elements;
        this.message = this.part("say").elements.message;
        this.listen();
        this.sayHow();
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    listen() {
        const on = (name, event, act) => this.part(name).addEventListener(event, act);
        for (const name of ["who", "how"]) on(name, "submit", (event) => event.preventDefault());
        on("who", "change", ({ target }) => {
            if (target.name === "run") this.showWeights();
            this.tellWhom();
        });
        on("how", "input", () => this.sayHow());
        on("say", "submit", (event) => {
            event.preventDefault();
            this.say();
        });
        this.message.addEventListener("keydown", (event) => {
            if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
            event.preventDefault();
            this.say();
        });
        on("stop", "click", () => this.ask("stop"));
        on("new", "click", () => this.ask("new").then(() => this.message.focus()));
        on("unload", "click", () => this.ask("unload"));
        document.addEventListener("visibilitychange", () => {
            if (!document.hidden && this.working) this.read().catch(() => {});
        });
    }

    // -------------------------------------------------------------- whom to talk to

    // `run`: the one that the page's address names, or null; `asked`: the one whose newest weights
    // were asked for, or null.
    async refresh(run, asked = null) {
        if (!asked && (this.working || Date.now() - this.readAt < CHOICES_WAIT)) return;
        this.readAt = Date.now();
        try {
            const [choices] = await Promise.all([send("/api/talk/choices"), this.read()]);
            this.minutes = choices.idle_minutes;
            this.list(choices.runs, run, asked);
        } catch (error) {
            if (!error.unreachable) this.showError(error.message); // the run bar says that the server does not answer
        }
    }

    list(runs, run, asked) {
        const before = this.choices();
        const first = this.runs === null;
        const text = JSON.stringify(runs);
        if (text !== this.listed) {
            this.listed = text;
            this.runs = new Map(runs.map((found) => [found.id, found]));
            this.who.run.replaceChildren(
                ...runs.map((found) =>
                    el("option", { value: found.id }, `${found.name} (${found.id})`),
                ),
                el("option", { value: FOLDER }, "A folder on this machine"),
            );
            if (!first) this.who.run.value = before.folder === undefined ? before.run_id : FOLDER;
            if (this.who.run.selectedIndex < 0) this.who.run.selectedIndex = 0;
            this.showWeights(before.weights);
        }
        if (first && this.choice) this.choose(this.choice);
        if (run !== this.opened && run !== null && this.runs.has(run)) {
            if (this.who.run.value !== run) this.choose({ run_id: run });
            this.opened = run;
        }
        if (asked !== null && this.runs.has(asked)) {
            this.choose({ run_id: asked });
            this.message.focus();
        }
        this.tellWhom();
    }

    choose(choice) {
        this.who.run.value = choice.folder ? FOLDER : choice.run_id;
        if (this.who.run.selectedIndex < 0) this.who.run.selectedIndex = 0;
        if (choice.folder) this.who.folder.value = choice.folder;
        this.showWeights(choice.weights);
    }

    showWeights(wanted) {
        const run = this.runs?.get(this.who.run.value);
        const select = this.who.weights;
        select.replaceChildren(
            ...(run?.weights ?? []).map(({ value, label }) => el("option", { value }, label)),
        );
        if (wanted) select.value = wanted;
        if (select.selectedIndex < 0) select.selectedIndex = 0;
        this.part("weights").hidden = !run;
        this.part("folder").hidden = Boolean(run);
        this.who.compare.disabled = !run;
    }

    choices() {
        if (this.who.run.value === FOLDER) return { folder: this.who.folder.value.trim() };
        return { run_id: this.who.run.value, weights: this.who.weights.value };
    }

    // What is to be known of these weights before they are loaded.
    async tellWhom() {
        const choice = this.choices();
        const asked = JSON.stringify(choice);
        const said = field(this.root, "about");
        if (asked === this.asked) return;
        this.asked = asked;
        if (choice.folder === "") {
            said.textContent = this.runs?.size
                ? ""
                : "No run has saved weights yet: save a checkpoint of one, or name a folder.";
            return;
        }
        try {
            const about = await send("/api/talk/about", { choice });
            if (asked !== this.asked) return;
            const other =
                this.turns.length && this.choice && asked !== JSON.stringify(this.key(this.choice))
                    ? " Other weights begin a new chat with the next message."
                    : "";
            said.textContent =
                (about.template
                    ? "Messages are written by the model’s own chat template" +
                      (about.system ? "." : ", which takes no system message.")
                    : "This model has no chat template: it goes on with the text as it stands, and a message is added to what was written " +
                      "before.") +
                (choice.folder
                    ? " A folder does not say what it was trained from, so it answers alone."
                    : "") +
                other;
            this.part("system").hidden = !about.system;
        } catch (error) {
            if (asked === this.asked) said.textContent = error.message;
        }
    }

    key(choice) {
        return choice.folder
            ? { folder: choice.folder }
            : { run_id: choice.run_id, weights: choice.weights };
    }

    sayHow() {
        const [tokens, temperature, top, seed] = NUMBERS.map((name) =>
            Number(this.how[name].value),
        );
        const drawn =
            temperature > 0
                ? `temperature ${temperature}, top-p ${top}, seed ${seed}`
                : "the likeliest token each time";
        field(this.root, "how").textContent = `${drawn}, ${tokens} tokens at most`;
    }

    // -------------------------------------------------------------- talking

    async say() {
        if (this.working || !this.message.value.trim()) return;
        if (!this.part("how").reportValidity()) return;
        const numbers = NUMBERS.map((name) => [name, Number(this.how[name].value)]);
        const body = {
            choice: this.choices(),
            message: this.message.value,
            ...Object.fromEntries(numbers),
            compare: this.who.compare.checked && !this.who.compare.disabled,
            system: this.part("system").hidden ? "" : this.how.system.value,
        };
        this.part("send").disabled = true;
        if (await this.ask("say", body)) {
            this.message.value = "";
            this.asked = "";
            this.tellWhom();
        }
        this.part("send").disabled = this.working;
    }

    async ask(what, body = {}) {
        try {
            await send(`/api/talk/${what}`, body);
            await this.read();
            return true;
        } catch (error) {
            this.showError(error.message);
            return false;
        }
    }

    async read() {
        clearTimeout(this.timer);
        try {
            const state = await send(`/api/talk?since=${this.version}`);
            this.working = state.working;
            if (state.turns) this.show(state);
        } finally {
            const wait = document.hidden ? HIDDEN_WAIT : WRITING_WAIT;
            if (this.working) this.timer = setTimeout(() => this.read().catch(() => {}), wait);
        }
    }

    // -------------------------------------------------------------- the conversation

    show(state) {
        this.version = state.version;
        this.choice = state.choice;
        const log = this.part("log");
        const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
        log.setAttribute("aria-busy", String(state.working));
        log.dataset.job = state.job_id ?? "";
        const count = state.first + state.turns.length;
        const more = count > this.turns.length;
        while (this.turns.length > count) this.turns.pop().node.remove();
        state.turns.forEach((turn, place) => {
            const index = state.first + place;
            const sides = SIDES.filter((side) => turn.answers[side]);
            const same =
                this.turns[index]?.message === turn.message &&
                this.turns[index].sides === sides.join();
            if (!same) this.place(index, turn, sides);
            for (const side of sides)
                this.write(this.turns[index].answers[side], turn.answers[side], side);
        });
        this.part("nothing").hidden = count > 0;
        log.hidden = count === 0;
        if (atEnd || more) log.scrollTop = log.scrollHeight;
        this.showNote(state);
        this.showError(state.error);
        this.part("send").hidden = state.working;
        this.part("send").disabled = false;
        this.part("stop").hidden = !state.working;
        this.part("new").disabled = !count;
        this.part("unload").hidden = !state.loaded.length;
        field(this.root, "memory").textContent = state.loaded.length
            ? state.held
                ? `${state.held} of RAM in use, given back after ${this.minutes} idle minutes.`
                : "Nothing is copied: the paused run answers."
            : "";
    }

    place(index, turn, sides) {
        const answers = Object.fromEntries(sides.map((side) => [side, this.answer(side)]));
        const node = el(
            "article",
            { class: "rs-talk-turn", "aria-label": `Message ${index + 1}` },
            el(
                "p",
                { class: "rs-talk-message" },
                el("span", { class: "rs-hidden" }, "You: "),
                turn.message,
            ),
            el(
                "div",
                { class: `rs-talk-answers${sides.length > 1 ? " rs-talk-both" : ""}` },
                ...sides.map((side) => answers[side].node),
            ),
        );
        const old = this.turns[index];
        if (old) old.node.replaceWith(node);
        else this.part("log").append(node);
        this.turns[index] = { message: turn.message, sides: sides.join(), node, answers };
    }

    answer(side) {
        const weights = el("strong");
        const text = el("p", { class: "rs-talk-text" });
        const said = el("span", { class: "rs-hint" });
        const copy = el(
            "button",
            { type: "button", class: "rs-small", click: () => copyText(copy, text) },
            "Copy",
        );
        const node = el(
            "section",
            { class: "rs-talk-answer", "data-side": side },
            el("header", {}, weights),
            text,
            el("footer", {}, said, copy),
        );
        return { node, weights, text, said, copy };
    }

    write(nodes, answer, side) {
        const nothing = {
            waiting: "…",
            writing: "…",
            done: "(nothing: it ended at once)",
            stopped: "(no answer)",
            failed: answer.problem,
        };
        const tokens =
            answer.tokens === 1 ? "1 token" : `${answer.tokens.toLocaleString("en")} tokens`;
        setText(nodes.weights, answer.weights);
        setText(nodes.text, answer.text || nothing[answer.state]);
        setText(
            nodes.said,
            [answer.tokens ? tokens : "", answer.rate, answer.state === "stopped" ? "stopped" : ""]
                .filter(Boolean)
                .join(" · "),
        );
        nodes.node.dataset.state = answer.state;
        nodes.text.classList.toggle("rs-off", !answer.text && answer.state !== "failed");
        nodes.text.classList.toggle("rs-error", answer.state === "failed");
        nodes.copy.hidden = !answer.text || answer.state === "writing";
        nodes.copy.setAttribute(
            "aria-label",
            `Copy the answer ${side === "base" ? "before training" : "of the tuned model"}`,
        );
    }

    showNote(state) {
        this.loading ??= new JobView(this.part("loading"));
        this.loading.show(state.job);
        this.part("note").hidden = !state.note || Boolean(state.job);
        setText(field(this.root, "note"), state.note);
    }

    showError(text) {
        const node = field(this.root, "error");
        node.hidden = !text;
        setText(node, text);
    }
}
