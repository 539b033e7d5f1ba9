// Chat: the base model and the trained one get the same messages. The server keeps
// the chat itself.

import { isUnreadable, UNREADABLE } from "../../shared/answer_text.js";
import { copyText, el, field, send, setText } from "../../shared/dom.js";
import { JobView } from "../../shared/jobs.js";

const WRITING_WAIT = 150; // ms until an unfinished answer is read again
const HIDDEN_WAIT = 5000; // the same, while the page is hidden
const CHOICES_WAIT = 2000; // ms between reads of the list of runs
const AT_END = 40; // the log scrolls along with new text if it is at most this many px from its end
const FOLDER = ":folder";
const CURRENT = "current"; // the weights of a paused run
const SIDES = ["base", "tuned"];
const NO_WEIGHTS = "No run has saved weights yet. Save a checkpoint, or choose a folder.";
const TO_PAUSE = "It needs this machine: pause it to chat, and resume it when you are done.";
const TO_WAIT = "You can chat once it trains.";
const NONE_SAVED = "This run has saved no weights, so it cannot answer.";
const PAUSING = "Pausing after this step…";
const NO_TEMPLATE = "This model has no chat template: it continues your text as it stands.";
const NUMBERS = ["max_new_tokens", "temperature", "top_p", "seed"];

export class Chat {
    constructor(element) {
        this.root = element;
        this.version = 0; // of the chat that is shown
        this.server = null; // the server's start that this version belongs to
        this.turns = [];
        this.runs = null; // the runs with weights, by id; null before they are known
        this.run = null; // the run whose view this is
        this.lacks = false; // whether the run of this chat has no weights
        this.busy = ""; // a sentence on the run that needs the machine
        this.isClosed = false; // whether nobody can answer for now
        this.wantsFocus = false; // the message box gets the focus once it can be used
        this.choice = null; // the weights that the chat is with
        this.instead = ""; // what was chosen as those of a pause were gone, as JSON
        this.minutes = 10;
        this.readAt = Number.NEGATIVE_INFINITY;
        this.asked = ""; // the choice that the shown description is about
        this.working = false;
        this.pausing = null; // the run that is being paused for a chat
        this.who = this.part("who").elements;
        this.how = this.part("how").elements;
        this.message = this.part("message").elements.message;
        this.listen();
        this.showHow();
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    listen() {
        const on = (name, event, act) => this.part(name).addEventListener(event, act);
        for (const name of ["who", "how"]) on(name, "submit", (event) => event.preventDefault());
        on("who", "change", ({ target }) => {
            if (target.name === "run") this.showWeights();
            this.showClosed();
            this.showChosen();
        });
        on("how", "input", () => this.showHow());
        on("message", "submit", (event) => {
            event.preventDefault();
            this.sendMessage();
        });
        this.message.addEventListener("keydown", (event) => {
            if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
            event.preventDefault();
            this.sendMessage();
        });
        on("stop", "click", () => this.ask("stop"));
        on("new", "click", () => this.ask("new").then(() => this.message.focus()));
        on("unload", "click", () => this.ask("unload"));
        on("pause", "click", () => this.pause());
        document.addEventListener("visibilitychange", () => {
            if (!document.hidden && this.working) this.read().catch(() => {});
        });
    }

    // -------------------------------------------------------------- the weights

    // run: the run whose view this is, or null. The page moves there before the next refresh.
    setRun(run) {
        this.run = run;
        this.showLog();
    }

    // asked: the run whose newest weights were requested, or null.
    async refresh(run, asked = null) {
        this.setRun(run);
        if (!asked && (this.working || performance.now() - this.readAt < CHOICES_WAIT)) return;
        this.readAt = performance.now();
        try {
            const [choices] = await Promise.all([send("/api/chat/choices"), this.read()]);
            this.minutes = choices.idle_minutes;
            this.busy = choices.busy;
            this.part("closed").dataset.pause = choices.pause;
            // An answer may come after the person has left that view and chosen other weights.
            if (run === this.run) this.list(choices.runs, run, asked);
        } catch (error) {
            // The run bar reports that the server does not answer.
            if (!error.unreachable) this.showError(error.message);
        }
    }

    list(runs, run, asked) {
        const isFirst = this.runs === null;
        this.listRuns(runs, isFirst);
        if (isFirst && this.choice) this.choose(this.choice);
        if (this.runs.has(run) && this.who.run.value !== run) this.choose({ run_id: run });
        if (asked !== null && this.runs.has(asked)) {
            this.choose({ run_id: asked });
            this.wantsFocus = true;
        }
        this.choosePaused();
        this.showClosed();
        this.showLog();
        this.showChosen();
    }

    // Once the run is paused, its weights of that moment are offered and chosen, unless the chat is
    // with another run.
    choosePaused() {
        if (!this.pausing || this.busy) return;
        if ((this.run ?? this.pausing) === this.pausing)
            this.choose({ run_id: this.pausing, weights: CURRENT });
        this.pausing = null;
        this.wantsFocus = true;
    }

    // The view was opened by a person, who probably wants to type.
    attend() {
        this.wantsFocus = true;
        this.outdated();
    }

    // What is read of the runs is no longer true.
    outdated() {
        this.readAt = Number.NEGATIVE_INFINITY;
    }

    // A choice is kept when the list is rebuilt.
    listRuns(runs, isFirst) {
        const text = JSON.stringify(runs);
        if (text === this.listed) return;
        const before = this.chosen();
        this.listed = text;
        this.runs = new Map(runs.map((found) => [found.id, found]));
        const options = runs.map(({ id, name }) => el("option", { value: id, title: id }, name));
        const folder = el("option", { value: FOLDER }, "A folder on this machine");
        this.who.run.replaceChildren(...options, folder);
        if (!isFirst) this.who.run.value = before.folder === undefined ? before.run_id : FOLDER;
        chooseOne(this.who.run);
        this.showWeights(before.weights);
        const now = this.chosen();
        const isLeft = before.weights === CURRENT && before.run_id === now.run_id;
        if (isLeft && now.weights && now.weights !== CURRENT) this.instead = JSON.stringify(now);
    }

    choose(choice) {
        this.who.run.value = choice.folder ? FOLDER : choice.run_id;
        chooseOne(this.who.run);
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
        chooseOne(select);
        this.part("weights").hidden = !run?.weights.length;
        this.part("folder").hidden = Boolean(run);
        this.who.compare.disabled = !run;
    }

    async pause() {
        const { pause } = this.part("closed").dataset;
        this.pausing = pause;
        this.showClosed();
        try {
            await send(`/api/runs/${encodeURIComponent(pause)}/control`, { command: "pause" });
        } catch (error) {
            this.pausing = null;
            this.showClosed();
            this.showError(error.message, true);
        }
    }

    // While nobody can answer, the conversation stays, a sentence says why and what to do, and the
    // message box is away unless it holds what a person has begun to write.
    showClosed() {
        const id = this.run ?? this.who.run.value;
        this.lacks = id !== FOLDER && !this.runs.get(id)?.weights.length;
        const box = this.part("closed");
        const hadFocus = box.contains(document.activeElement);
        const { pause } = box.dataset;
        const busy = this.busy && `${this.busy} ${pause ? TO_PAUSE : TO_WAIT}`;
        const why = busy || (this.lacks ? NONE_SAVED : "");
        this.part("model").hidden = this.lacks && this.run !== null;
        setText(field(this.root, "closed"), this.pausing ? PAUSING : why);
        box.hidden = !why;
        this.part("pause").hidden = !pause;
        this.part("pause").disabled = Boolean(this.pausing);
        if (this.isClosed !== Boolean(why)) this.asked = "";
        this.isClosed = Boolean(why);
        if (this.isClosed && this.refused) this.showError("");
        const isTyping = document.activeElement === this.message;
        this.message.disabled = this.isClosed;
        this.part("message").hidden = this.isClosed && !this.message.value;
        this.part("send").disabled = this.isClosed || this.working;
        if (this.isClosed && isTyping) this.part("pause").focus();
        if (!this.isClosed && (this.wantsFocus || hadFocus))
            this.message.focus({ preventScroll: true });
        this.wantsFocus = Boolean(this.pausing);
    }

    // The choice in the form.
    chosen() {
        if (this.who.run.value === FOLDER) return { folder: this.who.folder.value.trim() };
        return { run_id: this.who.run.value, weights: this.who.weights.value };
    }

    // Shows what a person should know about these weights before they are loaded.
    async showChosen() {
        const choice = this.chosen();
        // The current weights of a paused run are others once it went on.
        const asked = JSON.stringify([choice, this.who.weights.selectedOptions[0]?.text]);
        if (asked === this.asked) return;
        this.asked = asked;
        this.showLog();
        const caption = field(this.root, "about");
        if (this.lacks) {
            caption.textContent = "";
            return;
        }
        if (choice.folder === "") {
            caption.textContent = this.runs?.size ? "" : NO_WEIGHTS;
            return;
        }
        try {
            const about = await send("/api/chat/about", { choice });
            if (asked !== this.asked) return;
            caption.textContent = this.aboutWeights(about, choice);
            caption.classList.remove("rs-error");
            this.part("system").hidden = !about.system;
        } catch (error) {
            if (asked !== this.asked) return;
            setText(caption, error.message);
            caption.classList.add("rs-error");
            this.asked = ""; // what is in the way may end: the next refresh asks again
        }
    }

    aboutWeights({ template, label }, choice) {
        const sentences = template ? [] : [NO_TEMPLATE];
        const goesOn = !this.turns.length || !this.choice || isSameChoice(choice, this.choice);
        if (!goesOn && !this.isClosed) sentences.push(this.aboutNewChat());
        if (this.instead === JSON.stringify(choice)) {
            const { text } = this.who.weights.selectedOptions[0];
            sentences.push(`The run went on from its pause. Chat now has other weights: ${text}.`);
        }
        const before = this.turns.at(-1)?.answers.tuned?.weights.textContent;
        if (goesOn && before && before !== label)
            sentences.push(`The weights have changed. Your next message goes to: ${label}.`);
        return sentences.join(" ");
    }

    aboutNewChat() {
        if (this.isShown()) return "Your next message starts a new chat with these weights.";
        const other = this.choice.folder || this.runs?.get(this.choice.run_id)?.name;
        return `Your next message replaces the chat with ${other ?? "a deleted run"}.`;
    }

    showHow() {
        const [tokens, temperature, top, seed] = NUMBERS.map((name) =>
            Number(this.how[name].value),
        );
        const how =
            temperature > 0 ? `temperature ${temperature}, top-p ${top}, seed ${seed}` : "greedy";
        field(this.root, "how").textContent = `${how}, up to ${tokens.toLocaleString("en")} tokens`;
    }

    // -------------------------------------------------------------- messages

    async sendMessage() {
        if (this.working || this.isClosed || !this.runs || !this.message.value.trim()) return;
        if (!this.part("how").reportValidity()) return;
        const numbers = NUMBERS.map((name) => [name, Number(this.how[name].value)]);
        const body = {
            choice: this.chosen(),
            message: this.message.value,
            ...Object.fromEntries(numbers),
            compare: this.who.compare.checked && !this.who.compare.disabled,
            system: this.part("system").hidden ? "" : this.how.system.value,
        };
        this.part("send").disabled = true;
        if (await this.ask("send", body)) {
            this.message.value = "";
            this.asked = "";
            this.showChosen();
        }
        this.part("send").disabled = this.isClosed || this.working;
    }

    async ask(what, body = {}) {
        try {
            await send(`/api/chat/${what}`, body);
            await this.read();
            return true;
        } catch (error) {
            this.showError(error.message, true);
            return false;
        }
    }

    // Reads the chat, and repeats that until the answer is complete.
    async read() {
        clearTimeout(this.timer);
        try {
            const state = await send(`/api/chat?since=${this.version}`);
            // Of two reads, either may reach the server first, and either answer may come first.
            if (state.server === this.server && state.version < this.version) return;
            this.server = state.server;
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
        const count = state.first + state.turns.length;
        this.showTurns(state, count);
        this.showNote(state);
        this.showError(state.error);
        this.part("send").hidden = state.working;
        this.part("send").disabled = this.isClosed;
        this.part("stop").hidden = !state.working;
        this.part("unload").hidden = !state.loaded.length;
        field(this.root, "memory").textContent = this.memoryText(state);
        setText(field(this.root, "slow"), state.slow);
    }

    // count: the number of turns in the whole chat; the state has those from `first` on. A log that
    // is scrolled to its end follows new text.
    showTurns({ working, job_id, first, turns }, count) {
        const log = this.part("log");
        const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - AT_END;
        const hasMore = count > this.turns.length;
        log.setAttribute("aria-busy", String(working));
        log.dataset.job = job_id ?? "";
        while (this.turns.length > count) this.turns.pop().node.remove();
        for (const [place, turn] of turns.entries()) this.showTurn(first + place, turn);
        this.showLog();
        if (isAtEnd || hasMore) log.scrollTop = log.scrollHeight;
    }

    // The chat of another run is out of sight, and comes back when that run is chosen again.
    showLog() {
        const isShown = this.turns.length > 0 && this.isShown();
        this.part("log").hidden = !isShown;
        this.part("nothing").hidden = isShown || this.isClosed;
        this.part("new").disabled = !isShown;
    }

    // Whether the chat is one with the run of this view, or with the chosen run or folder.
    isShown() {
        if (!this.choice) return true;
        const { folder, run_id: run } = this.choice;
        if (this.run !== null) return this.run === run;
        const given = this.chosen();
        return folder ? given.folder === folder : given.run_id === run;
    }

    showTurn(index, turn) {
        const sides = SIDES.filter((side) => turn.answers[side]);
        const shown = this.turns[index];
        const isSame = shown?.message === turn.message && shown.sides === sides.join();
        if (!isSame) this.place(index, turn, sides);
        const { answers } = this.turns[index];
        for (const side of sides) this.write(answers[side], turn.answers[side], side);
    }

    memoryText({ loaded, held, lent }) {
        if (!loaded.length) return "";
        if (lent) return "The served model answers, so no more memory is needed.";
        if (!held) return "The paused run answers, so no more memory is needed.";
        return `Model loaded (${held}); unloads after ${this.minutes} min.`;
    }

    // Creates the nodes of a turn, in place of the old ones.
    place(index, turn, sides) {
        const answers = Object.fromEntries(sides.map((side) => [side, this.answer(side)]));
        const node = el(
            "article",
            { class: "rs-chat-turn", "aria-label": `Message ${index + 1}` },
            el(
                "p",
                { class: "rs-chat-message" },
                el("span", { class: "rs-hidden" }, "You: "),
                turn.message,
            ),
            el(
                "div",
                { class: `rs-chat-answers${sides.length > 1 ? " rs-chat-both" : ""}` },
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
        const text = el("p", { class: "rs-chat-text" });
        const caption = el("span", { class: "rs-hint" });
        const copy = el(
            "button",
            { type: "button", class: "rs-small", click: () => copyText(copy, text) },
            "Copy",
        );
        const show = el("button", { type: "button", class: "rs-small", hidden: true }, "Show");
        const node = el(
            "section",
            { class: "rs-chat-answer", "data-side": side },
            el("header", {}, weights),
            text,
            el("footer", {}, caption, show, copy),
        );
        const nodes = { node, weights, text, caption, copy, show, isOpen: false };
        show.addEventListener("click", () => {
            nodes.isOpen = true;
            nodes.rewrite();
        });
        return nodes;
    }

    write(nodes, answer, side) {
        const nothing = {
            waiting: "…",
            writing: "…",
            done: "(empty answer)",
            stopped: "(no answer)",
            failed: answer.problem,
        };
        const isFolded = !nodes.isOpen && isUnreadable(answer.text);
        nodes.rewrite = () => this.write(nodes, answer, side);
        nodes.show.hidden = !isFolded;
        setText(nodes.weights, answer.weights);
        setText(nodes.text, (isFolded ? UNREADABLE : answer.text) || nothing[answer.state]);
        setText(nodes.caption, aboutAnswer(answer));
        nodes.node.dataset.state = answer.state;
        const isOff = isFolded || (!answer.text && answer.state !== "failed");
        nodes.text.classList.toggle("rs-off", isOff);
        nodes.text.classList.toggle("rs-error", answer.state === "failed");
        nodes.copy.hidden = isFolded || !answer.text || answer.state === "writing";
        nodes.copy.setAttribute(
            "aria-label",
            `Copy the answer of the ${side === "base" ? "base" : "trained"} model`,
        );
    }

    showNote(state) {
        this.loading ??= new JobView(this.part("loading"));
        this.loading.show(state.job);
        this.part("note").hidden = !state.note || Boolean(state.job);
        setText(field(this.root, "note"), state.note);
    }

    // Which run is active has changed: what was refused because of a run may be possible now.
    activeChanged() {
        if (this.refused) this.showError("");
    }

    showError(text, refused = false) {
        this.refused = refused;
        const node = field(this.root, "error");
        node.hidden = !text;
        setText(node, text);
    }
}

// If the value of a select is not in its list, selects the first one.
function chooseOne(select) {
    if (select.selectedIndex < 0) select.selectedIndex = 0;
}

// given: from the form; kept: from the server, with every name filled in.
function isSameChoice(given, kept) {
    if (kept.folder) return given.folder === kept.folder;
    return given.run_id === kept.run_id && given.weights === kept.weights;
}

function aboutAnswer({ tokens, rate, state }) {
    const caption = [];
    if (tokens) caption.push(tokens === 1 ? "1 token" : `${tokens.toLocaleString("en")} tokens`);
    if (rate) caption.push(rate);
    if (state === "stopped") caption.push("stopped");
    return caption.join(" · ");
}
