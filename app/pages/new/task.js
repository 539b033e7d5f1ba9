// What the model should learn, as three cards. They show and change what the objective and the
// format of the data say.

import { isOf } from "./finding.js";

const OBJECTIVE = "train.objective";
const FORMAT = "data.format";
const TEXT = "text";

export class Task {
    // fill: changes settings.
    constructor(element, fill) {
        this.root = element;
        this.root.addEventListener("change", ({ target }) => fill(this.changes(target.value)));
    }

    // form: the form as checked; preview: what was read of its data.
    show(form, preview) {
        this.form = form;
        const task = taskOf(form, preview);
        for (const radio of this.root.querySelectorAll("input"))
            radio.checked = radio.value === task;
    }

    // The settings of a task. Those that already say so stay: KTO is a way to learn preferences.
    changes(task) {
        const { [OBJECTIVE]: objective, [FORMAT]: format } = this.form.shown;
        if (task === TEXT) return { [OBJECTIVE]: "sft", [FORMAT]: TEXT };
        const wanted = task === "answers" ? "sft" : "dpo";
        const isSo = task === "preferences" && objective !== "sft";
        return {
            [OBJECTIVE]: isSo ? objective : wanted,
            [FORMAT]: format === TEXT ? "auto" : format,
        };
    }
}

function taskOf(form, preview) {
    if (form.shown[OBJECTIVE] !== "sft") return "preferences";
    const isRead = preview?.rows && isOf(form, preview);
    const format = isRead ? preview.format : form.shown[FORMAT];
    return format === TEXT ? TEXT : "answers";
}
