// The cards of a run's overview: what it is doing before its first step, its memory now, and what
// came of it at the end.

import { el, field, send, setText } from "../../shared/dom.js";

const LABELS = {
    "export-again": "Export again",
    chat: "Chat",
    export: "Export",
    "train-on": "Continue training from here",
    again: "Train again",
    draft: "New run from this one",
};

// Opens a form with the settings of a run; with `trainsOn`, the new run starts from its weights. A
// newly opened page shows the form that the server has stored.
export async function draftOf(run, trainsOn, button, problem) {
    button.disabled = true;
    setText(problem, "");
    try {
        const body = { changes: {}, trains_on: trainsOn };
        await send(`/api/runs/${encodeURIComponent(run)}/draft`, body);
        location.assign("?show=new");
    } catch (error) {
        setText(problem, error.message);
    }
    button.disabled = false;
}

class Card {
    // go(place) shows another place, openChat(run) opens Chat.
    constructor(root, { go, openChat }) {
        this.root = root;
        this.go = go;
        this.openChat = openChat;
        this.shown = "";
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // Whether there is something to show that is not shown yet.
    isNews(value, run) {
        this.root.hidden = !value;
        const text = JSON.stringify([run, value]);
        if (text === this.shown) return false;
        this.shown = text;
        this.run = run;
        return Boolean(value);
    }

    buttons(names, problem) {
        return names.map((name, index) =>
            el(
                "button",
                {
                    type: "button",
                    class: index ? null : "rs-primary",
                    "data-action": name,
                    click: ({ target }) => this.act(name, target, problem),
                },
                LABELS[name],
            ),
        );
    }

    act(name, button, problem) {
        if (name === "chat") this.openChat(this.run);
        else if (name === "export" || name === "export-again")
            this.go({ page: "run", run: this.run, view: "export" });
        else draftOf(this.run, name === "train-on", button, problem);
    }
}

export class Stage extends Card {
    show(stage, run) {
        if (!this.isNews(stage, run)) return;
        this.root.dataset.tone = stage.tone;
        setText(field(this.root, "stage-title"), stage.title);
        setText(field(this.root, "stage-text"), stage.text);
        this.showShare(stage.share);
        this.part("stage-done").replaceChildren(...stage.done.map((text) => el("li", {}, text)));
        const problem = field(this.root, "stage-problem");
        this.part("stage-actions").replaceChildren(...this.buttons(stage.actions, problem));
    }

    showShare(share) {
        const bar = this.root.querySelector(".rs-stage-bar");
        bar.hidden = share === null;
        if (share === null) return;
        bar.setAttribute("aria-valuenow", Math.round(100 * share));
        bar.firstElementChild.style.width = `${100 * share}%`;
    }
}

export class Result extends Card {
    show(result, run) {
        if (!this.isNews(result, run)) return;
        this.root.dataset.tone = result.tone;
        setText(field(this.root, "result-title"), result.title);
        this.part("result-rows").replaceChildren(...result.rows.map(resultRow));
        setText(field(this.root, "result-of"), result.of);
        const problem = field(this.root, "result-problem");
        this.part("result-actions").replaceChildren(...this.buttons(result.actions, problem));
    }
}

function resultRow({ label, from, since, to, note }) {
    const begin = from
        ? [
              el("span", { class: "rs-from" }, from),
              el("span", { class: "rs-arrow", "aria-label": "then" }, "→"),
          ]
        : [];
    return el(
        "div",
        {},
        el("dt", {}, label),
        el("dd", {}, ...begin, el("strong", {}, to)),
        el("dd", { class: "rs-hint" }, [from && since, note].filter(Boolean).join("; ")),
    );
}

// Memory now, against its limits.
export class Meters {
    constructor(root) {
        this.root = root;
    }

    show(meters) {
        this.root.hidden = !meters.length;
        if (this.root.children.length !== meters.length)
            this.root.replaceChildren(...meters.map(emptyMeter));
        for (const [index, meter] of meters.entries()) fillMeter(this.root.children[index], meter);
    }
}

// A row for each rank of a run that has several.
export class RankTable {
    constructor(root) {
        this.root = root;
    }

    show(table) {
        this.root.hidden = !table;
        if (!table) return;
        setText(field(this.root, "ranks-caption"), table.caption);
        const heads = table.heads.map((head) => el("th", { scope: "col" }, head));
        this.root.querySelector("thead").replaceChildren(el("tr", {}, ...heads));
        this.root.querySelector("tbody").replaceChildren(...table.rows.map(rankRow));
    }
}

function rankRow([rank, ...values]) {
    const cells = values.map((text) => el("td", {}, text));
    return el("tr", {}, el("th", { scope: "row" }, rank), ...cells);
}

function emptyMeter() {
    return el(
        "div",
        { class: "rs-meter" },
        el("p", {}, el("strong"), el("span")),
        el(
            "div",
            { class: "rs-meter-bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 },
            el("i"),
            el("b", { title: "Predicted" }),
        ),
        el("p", { class: "rs-hint" }),
    );
}

function fillMeter(node, { name, text, note, tone, share, predicted }) {
    const [head, bar, foot] = node.children;
    const [used, mark] = bar.children;
    node.dataset.tone = tone;
    setText(head.children[0], name);
    setText(head.children[1], text);
    setText(foot, note);
    bar.setAttribute("aria-label", name);
    bar.setAttribute("aria-valuenow", Math.round(100 * share));
    bar.setAttribute("aria-valuetext", `${text}; ${note}`);
    used.style.width = `${100 * share}%`;
    mark.hidden = predicted === null;
    mark.style.left = `${100 * (predicted ?? 0)}%`;
}
