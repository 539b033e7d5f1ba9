// Leads from the verdict to the setting that it names, which may be in the folded section.

const FOLDED = ".rs-rest > button";
const LOOK = 50; // ms until a box that Gradio is making is looked for again
const LOOKS = 60;

export class FieldLink {
    constructor(button) {
        this.button = button;
        this.field = null;
        button.addEventListener("click", () => this.open(LOOKS));
    }

    // field: the id of the component to lead to, or null.
    show(field) {
        this.field = field;
        this.button.hidden = !field;
    }

    // Gradio makes the boxes of the folded section when it is first opened.
    open(looks) {
        const node = document.getElementById(this.field);
        const box = node?.querySelector("input, textarea");
        if (box?.offsetParent) {
            node.classList.add("rs-wrong");
            const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
            box.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
            box.focus({ preventScroll: true });
            return;
        }
        if (looks === LOOKS) document.querySelector(FOLDED)?.click();
        if (looks > 0) setTimeout(() => this.open(looks - 1), LOOK);
    }
}
