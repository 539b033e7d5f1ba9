// When a person has changed the model, the data, the batch or the method, other settings follow:
// the server says which, and this script fills them in.

import { send } from "../../shared/dom.js";

const FOLLOWED = ["model.source", "data.source", "train.batch_size", "train.method"];

export class DerivedDefaults {
    // nameOf: returns the dotted name of the setting that a box shows. form: returns the form as
    // last checked. fill: changes settings. note: shows sentences. done: is called when what
    // follows is known, and is nothing.
    constructor({ nameOf, form, fill, note, done }) {
        Object.assign(this, { nameOf, form, fill, note, done });
        this.deriving = 0; // questions under way
        this.preset = undefined;
        this.rates = {}; // the learning rate that each method of training had
        this.known = {}; // the values of `FOLLOWED` that the other settings belong to
        document.addEventListener("focusout", ({ target }) => this.left(target));
        document.addEventListener("keydown", ({ key, target }) => {
            if (key === "Enter") this.left(target);
        });
        document.addEventListener("input", ({ target, inputType }) => {
            // A suggestion was chosen.
            if (inputType === "insertReplacementText") this.left(target);
        });
    }

    // Takes each form that is checked: one that a preset has filled in belongs together. A value
    // that arrived otherwise, such as a file that was uploaded, is sent; one that is being typed
    // is not.
    took({ preset, shown }) {
        // A check may come between the choice of a preset and its values, which have another name.
        const isNew = preset !== this.preset || this.preset === undefined;
        const isFilled = isNew || shown.name !== this.name;
        this.preset = preset;
        this.name = shown.name;
        const typed = document.activeElement && this.nameOf(document.activeElement);
        for (const name of FOLLOWED) {
            if (isFilled) this.rates = {};
            if (isFilled) this.known[name] = shown[name];
            else if (name !== typed && shown[name] !== this.known[name])
                this.derive(name, shown[name]);
        }
    }

    // Whether a person has just chosen these data, for which settings are to be fitted once.
    takesData(source) {
        const isOwn = this.chosen !== undefined && this.chosen === source;
        if (isOwn) this.chosen = undefined;
        return isOwn;
    }

    get isDeriving() {
        return this.deriving > 0;
    }

    left(box) {
        const name = box.matches?.(".rs-train input, .rs-train textarea") && this.nameOf(box);
        const form = this.form();
        if (!FOLLOWED.includes(name) || !form || this.known[name] === undefined) return;
        if (box.value !== this.known[name]) this.derive(name, box.value);
    }

    // A method that a person comes back to has the learning rate that it had.
    restoreRate(before, method, changes) {
        const rate = this.rates[method];
        this.rates[before["train.method"]] = before["train.learning_rate"];
        if (rate !== undefined) changes["train.learning_rate"] = rate;
    }

    async derive(name, value) {
        const shown = this.form().shown;
        const before = { ...shown, [name]: this.known[name] };
        this.known[name] = value;
        if (name === "data.source") this.chosen = value;
        const after = { ...shown, [name]: value };
        // An answer that does not arrive changes nothing: a run would still say what is wrong.
        this.deriving += 1;
        const { preset } = this;
        const answer = await send("/api/derived", { preset, before, after }).catch(() => null);
        this.deriving -= 1;
        this.take(name, before, value, answer);
        this.done();
    }

    take(name, before, value, answer) {
        if (!answer || this.known[name] !== value) return;
        if (name === "train.method") this.restoreRate(before, value, answer.changes);
        if (name === "model.source") this.rates = {}; // they were those of the model before
        this.note(answer.notes);
        if (Object.keys(answer.changes).length) this.fill(answer.changes);
    }
}
