// Evaluate: the trained model beside its base model. Starts the job, and shows its figures
// and the answers side by side.

import { answerNodes } from "../../shared/answer_text.js";
import { copyText, el, field, send, setText } from "../../shared/dom.js";
import { JobView, noticeJobs } from "../../shared/jobs.js";
import { BlindVotes } from "./blind_votes.js";
import { commandRow } from "./settings_view.js";

const AGAIN = 3000; // ms after which it is asked whether what stands against evaluating is over
const NOTHING = "Not evaluated yet. Evaluate compares the trained model with its base model.";

export class EvaluateView {
    constructor(root) {
        this.root = root.querySelector(".rs-evaluate");
        this.card = this.part("evaluate");
        this.form = this.card.querySelector("form");
        this.inputs = this.form.elements;
        this.button = this.form.querySelector("button.rs-primary");
        this.caption = field(this.card, "evaluate-caption");
        this.job = new JobView(this.part("evaluating"));
        this.votes = new BlindVotes(this.part("blind"), (path, body) => this.act(path, body));
        this.form.addEventListener("change", () => this.unfold());
        this.form.addEventListener("input", () => this.unfold());
        this.inputs.limit.addEventListener("change", () => this.readTimes());
        this.form.addEventListener("submit", (event) => {
            event.preventDefault();
            this.start();
        });
        const copy = this.part("copy-install");
        copy.addEventListener("click", () => copyText(copy, field(this.root, "install")));
        this.clear();
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    address(what) {
        return `/api/runs/${encodeURIComponent(this.run)}/${what}`;
    }

    clear() {
        this.run = null;
        this.version = null;
        this.form.hidden = true;
        this.job.show(null);
        this.report("");
        this.votes.show(null);
        this.part("side-by-side").hidden = true;
        this.showFigures({ helped: null, figures: [], caption: "", note: "", problem: "" });
    }

    // Reads what is known: again when the state of the run has changed, and again and again while
    // another run stands against evaluating this one.
    async refresh({ run_id, bar }) {
        const moment = this.isRefused ? Math.floor(performance.now() / AGAIN) : 0;
        const version = JSON.stringify([run_id, bar.state, bar.begins_anew, moment]);
        if (version === this.version) return;
        this.version = version;
        const isOther = this.run !== run_id;
        this.run = run_id;
        try {
            await this.read(isOther);
        } catch (error) {
            this.version = null;
            this.report(error.message, true);
        }
    }

    async read(isOther) {
        const { run } = this;
        const details = await send(this.address("evaluation"));
        if (this.run !== run) return;
        this.show(details, isOther);
        // It was started in another tab, or before this page was loaded.
        if (details.job && !this.isFollowing) this.follow(details.job);
    }

    // The times of tasks depend on the number of samples; an empty box means all.
    async readTimes() {
        const { run } = this;
        const limit = Number(this.inputs.limit.value);
        try {
            const { form } = await send(this.address(`evaluation?limit=${limit}`));
            if (run === this.run) this.showTimes(form.tasks);
        } catch {
            this.showTimes([]); // those of another number would be wrong
        }
    }

    showTimes(tasks) {
        const times = Object.fromEntries(tasks.map(({ name, time }) => [name, time]));
        for (const item of this.part("tasks").children)
            setText(item.querySelector("time"), times[item.querySelector("input").value] ?? "");
    }

    // isOther: whether the form is filled anew; what a person has chosen stays otherwise.
    show(details, isOther) {
        this.showFigures(details);
        this.showForm(details, isOther);
        this.showAnswers(details.answers);
    }

    showFigures({ helped, figures, caption, note, problem }) {
        const answer = this.part("helped");
        answer.hidden = !helped;
        answer.dataset.tone = helped?.tone ?? "";
        setText(field(answer, "helped-word"), helped?.word ?? "");
        setText(field(answer, "helped-text"), helped?.text ?? "");
        setText(field(this.root, "figures-caption"), figures.length ? caption : NOTHING);
        setText(field(this.root, "figures-note"), note);
        setText(field(this.root, "figures-problem"), problem);
        const table = this.root.querySelector(".rs-figures table");
        table.hidden = !figures.length;
        table.querySelector("tbody").replaceChildren(...figures.map(figureRow));
    }

    // -------------------------------------------------------------- the form

    showForm({ form, why_not, unfinished, command }, isOther) {
        this.form.hidden = !form.can_evaluate;
        this.isRefused = Boolean(why_not);
        const nothing = "No checkpoint is saved, so there is nothing to evaluate.";
        const why = form.can_evaluate ? why_not || unfinished : nothing;
        setText(field(this.card, "evaluate-why"), why);
        const rows = form.can_evaluate ? [commandRow(command)] : [];
        this.part("evaluate-command").replaceChildren(...rows);
        setText(field(this.root, "about-rows"), form.about_rows);
        setText(field(this.root, "about-answers"), form.about_answers);
        setText(field(this.root, "install"), form.install);
        this.part("no-harness").hidden = form.has_harness;
        this.part("benchmarks-form").hidden = !form.has_harness;
        this.inputs.validation.disabled = this.inputs.answers.disabled = !form.rows;
        if (isOther) this.fill(form);
        setText(this.button, form.goes_on ? "Continue" : "Evaluate");
        this.unfold();
    }

    fill({ weights, tasks, chosen }) {
        const { inputs } = this;
        this.part("weights").hidden = weights.length < 2;
        inputs.weights.replaceChildren(
            ...weights.map(({ value, label }) => el("option", { value }, label)),
        );
        this.part("tasks").replaceChildren(
            ...tasks.map((task) => taskItem(task, chosen.tasks.includes(task.name))),
        );
        for (const name of ["validation", "answers", "blind", "chat"])
            inputs[name].checked = chosen[name];
        inputs.benchmarks.checked = Boolean(chosen.tasks.length || chosen.own);
        inputs.programs.checked = false;
        for (const name of ["count", "own", "limit"]) inputs[name].value = chosen[name] ?? "";
    }

    // Shows what belongs to the boxes that are ticked.
    unfold() {
        const { inputs } = this;
        this.part("answers-how").hidden = !inputs.answers.checked;
        this.part("benchmarks-how").hidden = !inputs.benchmarks.checked;
        this.part("programs").hidden = !inputs.own.value.trim();
        const { validation, answers, tasks, own } = this.wanted();
        const isNothing = !validation && !answers && !tasks.length && !own;
        this.button.disabled = this.isRefused || this.isFollowing || isNothing;
    }

    wanted() {
        const { inputs } = this;
        const hasTasks = inputs.benchmarks.checked && !this.part("benchmarks-form").hidden;
        const ticked = [...this.part("tasks").querySelectorAll("input:checked")];
        const own = hasTasks ? inputs.own.value.trim() : "";
        return {
            validation: inputs.validation.checked,
            answers: inputs.answers.checked ? Number(inputs.count.value) : 0,
            blind: inputs.answers.checked && inputs.blind.checked,
            tasks: hasTasks ? ticked.map(({ value }) => value) : [],
            own,
            limit: Number(inputs.limit.value),
            chat: inputs.chat.checked,
            programs: Boolean(own) && inputs.programs.checked,
            weights: inputs.weights.value,
        };
    }

    async start() {
        this.report("");
        this.job.show(null);
        this.button.disabled = true;
        try {
            const job = await send(this.address("evaluate"), this.wanted());
            noticeJobs();
            await this.follow(job);
        } catch (error) {
            this.report(error.message, true);
            this.unfold();
        }
    }

    // Shows the job until it is over, and each of its figures once it is known.
    async follow(job) {
        const { run } = this;
        this.isFollowing = true;
        this.report("");
        this.unfold();
        const known = setInterval(() => this.reread(run), 3000);
        try {
            await this.job.follow(job); // it shows what came of it
        } catch (error) {
            if (run === this.run) this.report(error.message, true);
        }
        clearInterval(known);
        this.isFollowing = false;
        await this.reread(run);
    }

    // The run may be another one, and the server away, meanwhile.
    async reread(run) {
        if (run !== this.run) return;
        try {
            await this.read(false);
        } catch {
            this.version = null; // the next poll reads it
        }
    }

    report(text, isError = false) {
        this.caption.textContent = text;
        this.caption.classList.toggle("rs-error", isError);
    }

    // -------------------------------------------------------------- answers

    showAnswers(answers) {
        this.votes.show(answers?.is_hidden ? answers : null);
        const card = this.part("side-by-side");
        card.hidden = !answers || answers.is_hidden;
        if (card.hidden) return;
        setText(field(card, "side-caption"), answers.sentence);
        card.querySelector("tbody").replaceChildren(...answers.rows.map(answersRow));
    }

    // Sends a vote, and shows what is known then.
    async act(path, body) {
        const { run } = this;
        const details = await send(this.address(`evaluation/${path}`), body);
        if (run !== this.run) return;
        this.show(details, false);
        if (details.answers && !details.answers.is_hidden) {
            // The buttons that had the focus are gone.
            const title = this.root.querySelector("#rs-side-title");
            title.tabIndex = -1;
            title.focus();
        }
    }
}

function taskItem({ name, about, time }, isChosen) {
    const box = el("input", { type: "checkbox", value: name });
    box.checked = isChosen;
    const words = el("small", {}, about, " ", el("time", {}, time));
    return el("li", {}, el("label", {}, box, el("span", {}, name, words)));
}

function figureRow({ name, about, base, trained, difference, interval, word, tone }) {
    const change = el("td", { "data-label": "Difference", "data-tone": tone }, difference);
    if (word) change.append(el("small", {}, word));
    return el(
        "tr",
        {},
        el("th", { scope: "row" }, name, el("small", {}, about)),
        el("td", { "data-label": "Base model" }, base),
        el("td", { "data-label": "Trained" }, trained),
        change,
        el("td", { "data-label": "95 % interval" }, interval || "–"),
    );
}

function answersRow({ prompt, expected, preferred, ...of }) {
    const cells = [
        ["base", "Base model", of.is_base_right],
        ["trained", "Trained", of.is_trained_right],
    ].map(([side, label, isRight]) => {
        const cell = el("td", { "data-label": label }, ...answerNodes(of[side]));
        // That the base model is wrong is no news.
        if (isRight || side === "trained") cell.dataset.right = isRight;
        if (preferred === side) cell.append(el("small", {}, "your choice"));
        return cell;
    });
    const asked = el("td", { class: "rs-asked" }, prompt, el("small", {}, `expected: ${expected}`));
    return el("tr", {}, asked, ...cells);
}
