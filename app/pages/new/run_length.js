// How long a run is: one number, of passes over the data or of steps. The form has a box for each,
// of which one is shown.

const USUAL_PASSES = 3;

export class RunLength {
    // fill: changes settings. found: returns the length in passes and steps, where it is known.
    constructor(element, fill, found) {
        this.root = element;
        this.fill = fill;
        this.found = found;
        for (const button of this.buttons())
            button.addEventListener("click", () => this.choose(button.dataset.length));
    }

    buttons() {
        return this.root.querySelectorAll("[data-length]");
    }

    // Takes each form that is checked. While a box is empty, it stays: something is typed into it.
    took({ shown }) {
        const [steps, passes] = ["train.steps", "train.epochs"].map((name) => shown[name] ?? "");
        const { length } = document.body.dataset;
        if (steps && passes) this.show("both");
        else if (steps || passes) this.show(steps ? "steps" : "epochs");
        else if (!length) this.show("epochs");
    }

    show(length) {
        document.body.dataset.length = length;
        for (const button of this.buttons())
            button.setAttribute("aria-pressed", String(button.dataset.length === length));
    }

    // What was chosen in one unit is about as long in the other.
    choose(length) {
        if (length === document.body.dataset.length) return;
        const { passes = USUAL_PASSES, steps = 100 } = this.found() ?? {};
        const whole = (value) => String(Math.max(1, Math.round(value)));
        this.show(length);
        this.fill(
            length === "steps"
                ? { "train.steps": whole(steps), "train.epochs": "" }
                : { "train.epochs": whole(passes), "train.steps": "" },
        );
    }
}
