// What is wrong with a setting stands at its box, and the fit panel leads there. The box may be in
// the folded section, which is then opened.

import { el } from "../../shared/dom.js";
import { unfold, unfoldAround } from "./folded.js";

const RETRY = 50; // ms until a box that Gradio is making is looked for again
const TRIES = 60;

export class FieldLink {
    constructor(button) {
        this.button = button;
        this.field = null;
        this.value = ""; // of that setting, in the form that was checked last
        this.opened = null; // the setting for which the section was opened
        this.caption = el("p", { class: "rs-field-error", id: "rs-field-error" });
        button.addEventListener("click", () => this.find((box) => this.lead(box)));
        // What is typed anew is not known to be wrong.
        document.addEventListener("input", ({ target }) => {
            if (target.closest(".rs-wrong")) this.clear();
        });
    }

    // field: the id of the component that is wrong, or null; sentence: what is wrong with it.
    show(field, sentence) {
        this.button.hidden = !field;
        if (field !== this.field || !field) this.clear();
        this.field = field;
        this.caption.textContent = sentence;
        if (field) this.find((box) => this.mark(box));
    }

    // Takes the values of each form that is checked, by the id of their setting.
    took(shownBy) {
        const value = this.field ? String(shownBy(this.field) ?? "") : "";
        if (value !== this.value) this.clear();
        this.value = value;
    }

    clear() {
        for (const node of document.querySelectorAll(".rs-wrong")) {
            node.classList.remove("rs-wrong");
            for (const box of node.querySelectorAll("[aria-invalid]")) {
                box.removeAttribute("aria-invalid");
                box.removeAttribute("aria-describedby");
            }
        }
        this.caption.remove();
    }

    // Calls `found` with the box of the setting once it is shown. Gradio makes the boxes of the
    // folded section when it is first opened.
    find(found, tries = TRIES) {
        const box = document.getElementById(this.field)?.querySelector("input, textarea");
        if (box?.offsetParent) {
            found(box);
            return;
        }
        if (tries === TRIES) unfold();
        unfoldAround(document.getElementById(this.field));
        const { field } = this;
        if (tries > 0) {
            setTimeout(() => {
                if (this.field === field) this.find(found, tries - 1);
            }, RETRY);
        }
    }

    mark(box) {
        const node = document.getElementById(this.field);
        node.classList.add("rs-wrong");
        box.setAttribute("aria-invalid", "true");
        box.setAttribute("aria-describedby", this.caption.id);
        if (this.caption.parentNode !== node) node.append(this.caption);
    }

    lead(box) {
        this.mark(box);
        const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
        box.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
        box.focus({ preventScroll: true });
    }
}
